"""How long each lecture is, in cells, words and minutes: ``python -m tests.helpers.lecture_size``.

Minutes are derived: 130 words and 15 lines of code a minute, 2 minutes for a question with
options, 5 for a puzzle, 1 for a prediction in italics. What nobody reads in one go is not counted:
assumptions, exercises, references.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import nbformat

from tests.helpers import ROOT
from tests.helpers.notebook_rules import without_code

CELLS, WORDS = 60, 2500
"""What a core lecture should have at most."""
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


def size_of(path: Path) -> Size:
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


def main() -> None:
    """Print the table of all lectures."""
    print(f"{'':40}{'cells':>7}{'words':>7}{'minutes':>9}{'stated':>8}{'guess':>7}{'puzzle':>8}")
    folder = ROOT / "lectures"
    for path in [*sorted(folder.glob("*.ipynb")), *sorted(folder.glob("further/*.ipynb"))]:
        cells, words, minutes, stated, guesses, puzzles = size_of(path)
        name = str(path.relative_to(folder).with_suffix(""))
        print(f"{name:40}{cells:7}{words:7}{minutes:9}{stated:8}{guesses:7}{puzzles:8}")


if __name__ == "__main__":
    main()
