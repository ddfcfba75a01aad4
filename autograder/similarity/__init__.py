"""Solutions that look alike: what of the code counts, how alike two are, a report to look at."""
