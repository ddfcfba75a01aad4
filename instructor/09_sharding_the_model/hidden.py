"""Cases that are never handed out and never enter a sandbox."""

from course_lib.checking import Case, in_many_forms

from .checks import layer, training
from .judges import NEAR

LAYERS = (
    Case("3 ranks, 10 inputs, 8 outputs", 3, layer(8, 10, 5)),
    Case("5 ranks, in two groups", 5, layer(7, 4, 1, 3, before=True)),
    Case("4 ranks, no bias", 4, layer(3, 3, 2, 1, 2, bias=False)),
)

HIDDEN = {
    "column_parallel": in_many_forms(*LAYERS),
    "row_parallel": in_many_forms(*LAYERS),
    "sharded_optimizer": in_many_forms(
        Case(
            "3 ranks, everything at once",
            *(
                3,
                training("adamw", (3, 5), (5,), (2, 2), (), (7,), steps=4, halved=True)
                | {"frozen": [2], "again": [4, 0, 2], "unused": [1]},
            ),
        ),
        Case("5 ranks, in two groups", 5, training("momentum", (11,), (2, 3), steps=3)),
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
