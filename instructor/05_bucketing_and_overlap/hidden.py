"""Cases that are never handed out and never enter a sandbox."""

from course_lib.checking import Case, in_many_forms

from .checks import chain, cut, waiting

SIX = [0, 1, 2, 3, 4, 5]
MIXED = {
    "sizes": [3, 1, 2, 3, 5, 2, 1, 1],
    "dtypes": ["float32", "float64", "float32", "float32", "float64"],
    "frozen": (2,),
    "same": [(0, 3), (1, 7)],
}


def with_empty(*layers):
    return {"shapes": [(i + 1, 2) if i not in layers else (0,) for i in SIX]}


HIDDEN = {
    "assign_buckets": in_many_forms(
        cut("everything at once", (24, 12), expected=[[6, 5], [4], [1], [0]], **MIXED),
        cut("cap 0", (0, 0), expected=[[6], [5], [4], [1], [0]], **MIXED),
        cut("one parameter", (100, 1), [3], [[0]]),
    ),
    "send_bucket": in_many_forms(
        Case("5 ranks", 5, waiting((3,), (2, 2))),
        Case(
            "4 ranks, in two groups, one without a gradient",
            *(4, waiting((2, 3), (), (4,), missing=[2])),
        ),
    ),
    "hook_buckets": in_many_forms(
        Case(
            "4 ranks, other orders, one left out, a frozen layer",
            4,
            chain(
                *(6, [[5, 4], [3], [1, 0]]),
                *([[(0, 1, 2, 3, 4, 5), (5, 3, 1, 0), (4, 5, 3)]], [SIX[::-1]]),
                **{"frozen": [2], "in_place": True},
            ),
        ),
        Case(
            "5 ranks, in two groups, tied, .grad is not empty",
            5,
            chain(6, [[5], [4, 3], [2, 1, 0]], [[*SIX, 5]], [SIX], before=True),
        ),
        Case(
            "5 ranks, an empty layer, one left out in every second step",
            5,
            chain(
                *(6, [[5, 4], [3, 2], [1, 0]]),
                *([SIX], [SIX[:2]], [SIX], [SIX[2:]]),
                **with_empty(1),
            ),
        ),
    ),
    "data_parallel": in_many_forms(
        Case(
            "3 ranks, three steps, no_sync, unused layers differ",
            3,
            chain(
                *(6, [[5], [4], [3, 2], [1, 0]]),
                *([[(0, 2), (1, 5)], [(0, 1, 2), (3, 4)]], [SIX], [SIX, SIX]),
                **{"in_place": True, "cap": 14, "first_cap": 4},
            ),
        ),
        Case(
            "4 ranks, in two groups, a layer only in no_sync",
            4,
            chain(
                *(6, [[5], [3], [2, 0]], [SIX, [0, 3, 5]], [SIX, SIX]),
                **{"frozen": [1, 4], "again": [3, 0], "cap": 9, "first_cap": 9},
            ),
        ),
        Case(
            "5 ranks, an odd cap, an empty layer, no_sync left early",
            5,
            chain(
                *(6, [[5], [4], [3, 2, 1, 0]], [SIX, SIX[2:]], [SIX[:2], SIX[:3]]),
                **{**with_empty(1, 2), "interrupted": True, "cap": 13, "first_cap": 1},
            ),
        ),
    ),
}

# Modules with the answers to this assignment: they cannot be imported while it is graded.
MASKED = ("course_lib.bucketing", "course_lib.ddp", "course_lib.gradient_sync")
