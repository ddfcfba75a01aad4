"""What stays hidden: the hidden cases are the same draws with the class's secret seed."""

# Modules with the answers to this assignment: they cannot be imported while it is graded.
MASKED = ("course_lib.asynchronous", "course_lib.local_sgd")
