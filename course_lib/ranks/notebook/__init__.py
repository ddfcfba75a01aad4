"""Ranks in a notebook: the magics, and the kernel that has them loaded."""
