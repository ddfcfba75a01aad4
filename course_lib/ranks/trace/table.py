"""A table that is text, and that a notebook shows as an HTML table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from course_lib.ranks.explain.words import format_table


class Table(str):
    """Rows as columns of text: a ``str``, which can be printed and searched as usual.

    As the value of a cell it is an HTML table, whose cells wrap with the width of the window.
    """

    _rows: Sequence[Sequence[str]]

    def __new__(cls, rows: Sequence[Sequence[str]]) -> Table:
        """Make a table of `rows`. The first one is its head."""
        table = super().__new__(cls, format_table(rows))
        table._rows = rows
        return table

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))  # otherwise IPython shows \n for the end of a line

    def _repr_html_(self) -> str:
        head, *body = self._rows
        lines = [_line("th", head), *(_line("td", row) for row in body)]
        # With either class, a dollar sign does not begin a formula.
        return f'<table class="tex2jax_ignore mathjax_ignore">{"".join(lines)}</table>'


def _line(tag: str, cells: Sequence[str]) -> str:
    style = "text-align: left; white-space: normal"
    cells_html = "".join(f'<{tag} style="{style}">{escape(cell)}</{tag}>' for cell in cells)
    return f"<tr>{cells_html}</tr>"
