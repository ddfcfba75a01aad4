"""What students handed in, wherever it lies: read, vetted, and put where nbgrader looks for it."""
