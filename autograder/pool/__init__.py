"""Grade a class: many processes examine the submissions, and one process books the points."""
