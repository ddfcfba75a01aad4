"""What never enters a sandbox. The tasks draw their hidden cases from the class's secret seed."""

# Modules with the answers to this assignment: they cannot be imported while it is graded.
MASKED = ("course_lib.bucketing", "course_lib.ddp", "course_lib.gradient_sync")
