"""The time that the grader gives to a notebook's cells; ``course check`` warns of more."""

CELL_SECONDS = 30.0
"""Of one cell."""
CELLS_SECONDS = 60.0
"""Of all solutions and checks together, and again of all other cells together."""
