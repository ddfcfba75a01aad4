"""Grades from nbgrader's gradebook, as tables that other systems read."""
