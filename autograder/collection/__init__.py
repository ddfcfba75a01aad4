"""Submissions from any source: read, vetted, and put where nbgrader looks for them."""
