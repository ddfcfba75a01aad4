"""Where student code runs: bubblewrap, and what can be seen from there."""
