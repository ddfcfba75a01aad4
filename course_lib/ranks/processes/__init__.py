"""Ranks that are processes of this machine."""
