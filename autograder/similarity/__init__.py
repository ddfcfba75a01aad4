"""Find solutions that look alike: normalise the code, compare all pairs, and write a report."""
