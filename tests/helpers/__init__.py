"""Code that tests share. The tests themselves import nothing from one another."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The checkout."""
