"""Code that tests share. The tests themselves import nothing from one another."""

from pathlib import Path

# The checkout.
ROOT = Path(__file__).parents[2]
