"""Modules with the answers to this assignment: they cannot be imported while it is graded."""

MASKED = ("course_lib.sharding",)
