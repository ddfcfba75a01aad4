"""Solutions that look alike: which parts of the code count, how alike two are, and a report."""
