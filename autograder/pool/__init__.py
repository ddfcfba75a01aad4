"""Grade a class: many processes examine, one process books."""
