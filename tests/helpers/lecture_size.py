"""How long a lecture is, in cells, words and minutes.

Minutes are derived: 130 words and 15 lines of code a minute, 2 minutes for a question with
options, 5 for a puzzle, 1 for a prediction in italics. What nobody reads in one go is not counted:
assumptions, exercises, references.
"""

import re
from typing import NamedTuple

import nbformat

from tests.helpers.notebook_rules import without_code

# What a core lecture should have at most.
CELLS, WORDS = 60, 2500
_NOT_READ = ("What we assumed", "Exercises", "Where next", "References", "Card")
_STATED = re.compile(r"\*\*Time:\*\* (?:about )?(\d+) minutes")


class Size(NamedTuple):
    """The cells and words of a lecture, its minutes by the formula, and those that it states."""

    cells: int
    words: int
    minutes: int
    stated: int
    guesses: int
    puzzles: int


def size_of(path) -> Size:
    """Return how long a notebook is."""
    words = lines = guesses = puzzles = predictions = 0
    read, cells = True, nbformat.read(path, as_version=4).cells
    for cell in cells:
        if cell.cell_type == "markdown":
            for part in re.split(r"^(?=##+ )", without_code(cell.source), flags=re.MULTILINE):
                if heading := re.match(r"##+ (.+)", part):
                    read = heading[1].strip() not in _NOT_READ
                predictions += len(re.findall(r"\*Predict:", part)) if read else 0
                text = re.sub(r"\]\([^)]*\)|^\|.*\|$", " ", part, flags=re.MULTILINE)
                words += len(re.findall(r"[^\W_][\w'’-]*", text)) if read else 0
        elif read and "hide-input" not in cell.metadata.get("tags", []):
            lines += sum(bool(line.strip()) for line in cell.source.splitlines())
            asked = len(re.findall(r"^(?:\w+ = )?ask\(", cell.source, re.MULTILINE))
            puzzles += asked * ("cases=" in cell.source)
            guesses += asked * ("cases=" not in cell.source)
    minutes = words / 130 + lines / 15 + 2 * guesses + 5 * puzzles + predictions
    stated = _STATED.search(cells[0].source)
    return Size(
        len(cells), words, round(minutes), int(stated[1]) if stated else 0, guesses, puzzles
    )
