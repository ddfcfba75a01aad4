"""A class at once: many processes examine, one books."""
