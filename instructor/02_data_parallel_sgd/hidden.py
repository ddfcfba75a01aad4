"""Cases that are never handed out and never enter a sandbox."""

from course_lib.checking import Case, in_many_forms

HIDDEN = {
    "shard_bounds": (
        Case(
            "every length up to 40", 1, {"questions": [(n, k) for n in range(41) for k in (5, 7)]}
        ),
        Case("a long dataset", 1, {"questions": [(60_000, 64), (1_281_167, 8)]}),
    ),
    "average_gradients": in_many_forms(
        Case("5 ranks", 5, {"shapes": [(4,), (2, 3)]}),
        Case("3 ranks, an empty parameter, in two groups", 3, {"shapes": [(0,), (4,)]}),
        Case("3 ranks, the first parameter frozen", 3, {"shapes": [(2,), (3,)], "frozen": [0]}),
    ),
    "data_parallel_step": in_many_forms(
        Case("3 ranks, 7, 2 and 1 rows", 3, {"rows": [7, 2, 1], "lr": 0.2}),
        Case("5 ranks, 1 row each, in two groups", 5, {"rows": [1, 1, 1, 1, 1]}),
    ),
}

# Modules with the answers to this assignment: they cannot be imported while it is graded.
MASKED = ("course_lib.sharding", "course_lib.replicas")
