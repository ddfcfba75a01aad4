"""Buckets: groups of gradients that are sent together, and how many bytes a bucket has.

    >>> from course_lib.bucketing import assign_buckets
    >>> buckets = assign_buckets(list(model.parameters()), bucket_cap_mb=25, first_bucket_mb=1)

- `buckets`: gradients in reverse order, cut at a cap
- `size`: the cap at which a step is shortest
"""

from course_lib.bucketing.buckets import (
    MEGABYTE,
    Bucket,
    Kind,
    assign_buckets,
    lay_out_like,
    trained_buckets,
)
from course_lib.bucketing.size import best_bucket_bytes, overlapped_time
