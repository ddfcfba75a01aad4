"""Failures in words: what was raised, what a rank waited for, and on which line."""
