"""Failures in words: what is raised, what was waited for, on which line."""
