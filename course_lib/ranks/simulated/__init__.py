"""Ranks that are threads on the fabric, one at a time."""
