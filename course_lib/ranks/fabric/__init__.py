"""The simulated network: matches what ranks send and receive, and counts the time."""
