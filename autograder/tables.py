"""Write tables for a terminal, a page or a spreadsheet in which no student's text can do harm."""

from __future__ import annotations

import csv
import io
import re
import string
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from course_lib.ranks.explain.words import format_table

Row = Sequence[object]
_STARTS_A_FORMULA = "=+-@"
_FEW = 3
_PAGE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Table:
    """A table with a title.

    Attributes:
        title: its title.
        header: the titles of its columns.
        rows: the cells. A tuple of names is shortened on a terminal.

    """

    title: str
    header: Sequence[str]
    rows: Sequence[Row]

    def as_text(self) -> str:
        """Return it for a terminal."""
        return f"{self.title}\n{format_rows(self.header, self.rows) if self.rows else 'none'}"

    def as_html(self) -> str:
        """Return it for a page."""
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in self.header)
        rows = "".join(f"<tr>{''.join(map(_html_cell, row))}</tr>" for row in self.rows)
        return (
            f"<h2>{escape(self.title)}</h2>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        )


def _html_cell(cell: object) -> str:
    kind = ' class="n"' if isinstance(cell, (int, float)) else ""
    text = ", ".join(cell) if isinstance(cell, tuple) else _text(cell)
    return f"<td{kind}>{escape(printable(text))}</td>"


def web_page(title: str, text: str, tables: Iterable[Table]) -> str:
    """Return one file with a text and tables; it has no script, and a browser requests nothing."""
    body = "\n".join(table.as_html() for table in tables)
    page = string.Template(_PAGE.read_text(encoding="utf-8"))
    return page.substitute(title=escape(title), text=escape(printable(text)), tables=body)


def bar(share: float, width: int = 24) -> str:
    """Return a bar of up to `width` characters for a share of 1."""
    return "█" * round(share * width)


def printable(text: str) -> str:
    """Return text on one line, without characters that move the cursor or reverse other text."""
    return plain_text(text).replace("\n", _INSTEAD).replace("\t", _INSTEAD)


def plain_text(text: str) -> str:
    """Return text in which only line ends and tabs move the cursor, and nothing turns other text.

    Terminals' codes for colours are left out; other such characters are replaced, one by one.
    """
    return "".join(_INSTEAD if _acts(c) and c not in "\n\t" else c for c in _COLOUR.sub("", text))


_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_INSTEAD = "\N{REPLACEMENT CHARACTER}"
_JOINERS = "\u200c\u200d"  # Persian, Hindi and many emoji need them
TURNS = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Marks that change the direction of writing, and so could make a text look like another text."""


def _acts(character: str) -> bool:
    kind = unicodedata.category(character)
    return kind in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in _JOINERS


def safe_cell(value: object) -> str:
    """Return a CSV cell that a spreadsheet never reads as a formula; numbers stay numbers."""
    if isinstance(value, (int, float)):
        return _text(value)
    text = "" if value is None else str(value)
    kinds = {"Cc": " ", "Cs": "?", "Zl": " ", "Zp": " "}  # keep the text on one line and encodable
    text = "".join(kinds.get(unicodedata.category(c), c) for c in text if c not in TURNS)
    if text == "-":
        return text  # Moodle writes this if there is no value
    # Some programs read a full-width ＝ as =, and skip blanks and invisible characters before it.
    folded = unicodedata.normalize("NFKC", text)
    first = next((c for c in folded if unicodedata.category(c)[0] not in "CZ"), "")
    return f"'{text}" if first and first in _STARTS_A_FORMULA else text


def csv_text(header: Sequence[str], rows: Iterable[Row], delimiter: str = ",") -> str:
    """Return a CSV; every cell except the header's is made safe."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([safe_cell(cell) for cell in row] for row in rows)
    return text.getvalue()


def format_rows(header: Sequence[str], rows: Iterable[Row]) -> str:
    """Return a table for a terminal. Control characters are replaced."""
    return format_table([header, *([printable(_text(cell)) for cell in row] for row in rows)])


def _text(cell: object) -> str:
    if isinstance(cell, float) and abs(cell) < 1e6:
        return f"{cell:g}"
    if isinstance(cell, tuple):
        surplus = len(cell) - _FEW
        return ", ".join(cell[:_FEW]) + (f" and {surplus} more" if surplus > 0 else "")
    return "" if cell is None else str(cell)
