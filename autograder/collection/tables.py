"""Write tables for people and for spreadsheets so that no student's name can run code there."""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Iterable, Sequence

from autograder.foreign_text import no_formula, printable


def safe_cell(value: object) -> str:
    """Return a CSV cell that a spreadsheet never reads as a formula; numbers stay numbers."""
    if isinstance(value, (int, float)):
        return f"{value:g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)
    text = "" if value is None else str(value)
    kinds = {"Cc": " ", "Cs": "?", "Zl": " ", "Zp": " "}  # keep the text on one line and encodable
    text = "".join(kinds.get(unicodedata.category(c), c) for c in text)
    if text == "-":
        return text  # Moodle writes this if there is no value
    return no_formula(text)


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a CSV; every cell except the header's is made safe."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([safe_cell(cell) for cell in row] for row in rows)
    return text.getvalue()


def format_rows(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table for a terminal. A 中 is two columns wide. Control characters are replaced."""
    lines = [list(header), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(_width(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(c + " " * (w - _width(c)) for c, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _text(cell: object) -> str:
    return "" if cell is None else printable(str(cell))


def _width(text: str) -> int:
    return sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in text)
