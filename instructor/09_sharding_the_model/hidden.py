"""Modules with the answers to this assignment: they cannot be imported while it is graded."""

MASKED = (
    *("course_lib.sharded_optimizer", "course_lib.fully_sharded", "course_lib.tensor_parallel"),
    "course_lib.pipeline_parallel",
)
