"""Cases that are never handed out and never enter a sandbox."""

from course_lib.checking import Case, in_many_forms

from .judges import NEAR

LAYERS = (
    Case("3 ranks, 10 inputs, 8 outputs", 3, {"out": 8, "in": 10, "rows": (5,), "bias": True}),
    Case(
        "5 ranks, in two groups",
        5,
        {"out": 7, "in": 4, "rows": (1, 3), "bias": True, "before": True},
    ),
    Case("4 ranks, no bias", 4, {"out": 3, "in": 3, "rows": (2, 1, 2), "bias": False}),
)

HIDDEN = {
    "column_parallel": in_many_forms(*LAYERS),
    "row_parallel": in_many_forms(*LAYERS),
    "sharded_optimizer": in_many_forms(
        Case(
            "3 ranks, everything at once",
            3,
            {
                "optimizer": "adamw",
                "shapes": [(3, 5), (5,), (2, 2), (), (7,)],
                "steps": 4,
                "frozen": [2],
                "again": [4, 0, 2],
                "unused": [1],
                "halved": True,
            },
        ),
        Case(
            "5 ranks, in two groups",
            *(5, {"optimizer": "momentum", "shapes": [(11,), (2, 3)], "steps": 3, "frozen": []}),
        ),
        dtypes=("float64", "float32"),
    ),
    "pipeline_schedule": in_many_forms(
        *(
            Case(f"{p} stages, {bubble}", p, {"bubble": bubble}, network=NEAR)
            for p, bubble in ((5, 0.41), (4, 0.75), (6, 0.4), (4, 0.1))
        ),
        dtypes=("float32", "float64"),
        groups=False,
    ),
}

# Modules with the answers to this assignment: they cannot be imported while it is graded.
MASKED = (
    *("course_lib.sharded_optimizer", "course_lib.fully_sharded", "course_lib.tensor_parallel"),
    "course_lib.pipeline_parallel",
)
