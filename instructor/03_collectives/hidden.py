"""Cases that are never handed out and never enter a sandbox."""

from course_lib.checking import Case, Form, in_many_forms
from course_lib.ranks import Network

DTYPES = ("int64", "bfloat16", "float32", "float64")
LAYOUTS = ("strided", "contiguous", "transposed")


def in_nodes_of(size):
    return Network(10e-6, 2e9, node_size=size, inside=Network(1e-6, 50e9))


APART = Form(((0, 2, 3, 5), (1,), (4,)), "bfloat16", "transposed")

RINGS = in_many_forms(
    Case("2 ranks, one number", 2, {"shape": (1,)}),
    Case("7 ranks, 30 numbers", 7, {"shape": (5, 6)}),
    Case("8 ranks in two groups, 37 numbers", 8, {"shape": (37,)}),
    Case("6 ranks, 4 numbers", 6, {"shape": (2, 2)}),
    Case("4 ranks in two groups, called twice", 4, {"shape": (9,), "calls": 2}),
    Case("6 ranks, groups of 4, 1 and 1", 6, {"shape": (3, 4)}, APART),
    dtypes=DTYPES,
    layouts=LAYOUTS,
)

HIDDEN = {
    "tree_broadcast": in_many_forms(
        Case("3 ranks, from rank 1", 3, {"shape": (2, 2), "root": 1}),
        Case("6 ranks in two groups, each from its last", 6, {"shape": (3, 2), "root": 2}),
        # Bandwidth costs more than latency here, so each additional message of a rank shows.
        Case("7 ranks, from rank 6", 7, {"shape": (6,), "root": 6}, network=Network(1e-6, 1e6)),
        Case("8 ranks in two groups, each from its third", 8, {"shape": (2, 3), "root": 2}),
        Case("8 ranks, from rank 4", 8, {"shape": (3, 20), "root": 4}),
        Case("6 ranks, groups of 4, 1 and 1", 6, {"shape": (3, 4), "root": -1}, APART),
        dtypes=DTYPES,
        layouts=LAYOUTS,
    ),
    "ring_reduce_scatter": RINGS,
    "ring_all_gather": RINGS,
    "ring_all_reduce": RINGS,
    "two_level_all_reduce": in_many_forms(
        Case("2 nodes of 4 ranks", 8, {"shape": (3, 7)}, network=in_nodes_of(4)),
        Case("4 nodes of 2 ranks", 8, {"shape": (500, 222)}, network=in_nodes_of(2)),
        Case("2 nodes of 4 ranks, 3 numbers", 8, {"shape": (3,)}, network=in_nodes_of(4)),
        Case("1 node of 1 rank", 1, {"shape": (2, 3)}, network=in_nodes_of(1)),
        dtypes=DTYPES,
        layouts=LAYOUTS,
        groups=False,
    ),
}

# Modules with the answers to this assignment: they cannot be imported while it is graded.
MASKED = ("course_lib.collectives",)
