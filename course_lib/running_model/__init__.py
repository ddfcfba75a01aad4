"""One small transformer, trained in every way of the course, with one row of a table for each way.

    >>> from course_lib.running_model import measure, table
    >>> rows = [measure("one rank"), measure("overlap")]
    >>> print(table(rows))  # doctest: +ELLIPSIS
    way                  ranks  ms a step  kB sent  kB state  kB saved
    one rank                 1 ...
    overlap                  4 ...

A lecture adds the rows of the ways that it explains, or of a function that its reader has written.
Model, data, global batch and network are the same in all rows. So a row shows what its way changes:
the time of a step, the bytes that a rank sends, the memory that it needs.

- `problem`: the model, its batches, and what messages and computation cost
- `ways`: each way as one step of one rank
- `row`: measures a way, or any program that trains, and prints the table
"""

from course_lib.running_model.problem import (
    DEVICE,
    NETWORK,
    ROWS,
    SHAPE,
    WORLD_SIZE,
    batches,
    held_out_loss,
    new_model,
    texts,
)
from course_lib.running_model.row import Row, measure, table
from course_lib.running_model.ways import WAYS
