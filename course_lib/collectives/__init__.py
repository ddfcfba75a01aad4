"""Collectives by hand: from messages between two ranks to all-reduce in seven ways.

    >>> from course_lib.collectives import ring_all_reduce
    >>> ring_all_reduce(gradient)  # in place; every rank then holds the sum

Read in this order:

- `point_to_point`: messages between two ranks
- `rooted`: broadcast, reduce
- `ring`: reduce-scatter, all-gather, and the ring made of them
- `all_to_all`: a different chunk for every rank
- `direct`: direct and one-shot all-reduce, in which every rank sends to every rank at once
- `all_reduce`: central, tree, ring, halving-doubling, hierarchical
- `rounding`: a mean that is rounded once, and a sum whose bits do not depend on K
"""

from course_lib.collectives.all_reduce import (
    AllReduce,
    central_all_reduce,
    halving_doubling_all_reduce,
    hierarchical_all_reduce,
    library_all_reduce,
    tree_all_reduce,
    two_level_groups,
)
from course_lib.collectives.all_to_all import all_to_all
from course_lib.collectives.direct import direct_all_reduce, exchange_with_all, one_shot_all_reduce
from course_lib.collectives.point_to_point import (
    Group,
    exchange,
    flat_in_place,
    pair_of,
    place_in,
    rotate,
    start_recv,
    start_send,
)
from course_lib.collectives.ring import (
    all_gather,
    reduce_scatter,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from course_lib.collectives.rooted import (
    broadcast,
    naive_broadcast,
    pipelined_broadcast,
    reduce,
    tree_broadcast,
)
from course_lib.collectives.rounding import mean_rounded_once, sum_in_one_order
