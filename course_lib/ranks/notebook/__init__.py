"""Ranks in a notebook: the magics, and the kernel that loads them."""
