"""What the grader hides; the hidden cases are drawn from the class's secret seed."""

# Modules with the answers to this assignment: they cannot be imported while it is graded.
MASKED = ("course_lib.data", "course_lib.sharding", "course_lib.train")
