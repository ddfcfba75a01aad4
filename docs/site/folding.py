"""Which code only draws, and which only prepares: the site folds it, and the PDF leaves it out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

DRAWN = 0.6
"""Part of a cell's lines that speak of a drawing, from which on it only draws."""
_DRAWING = re.compile(
    r"ax\w*|axes|fig\w*|plt|alt|panels?|bars?|show|explore|tip|draw\w*|label_ends"
)


def only_draws(cell: dict[str, Any]) -> bool:
    """Tell whether a code cell has a figure, and most of its lines speak of drawing it.

    A function that is given to ``explore`` belongs to its drawing, as the alternative text does.
    """
    if not any(_is_figure(output) for output in cell["outputs"]):
        return False
    tree = _parsed(cell["source"])
    drawing = drawn = 0
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    explored = {
        name for call in calls if getattr(call.func, "id", "") == "explore" for name in _names(call)
    }
    for statement, inside in _leaves(tree.body):
        lines = (statement.end_lineno or 0) - statement.lineno + 1
        drawing += lines
        if inside in explored or any(map(_DRAWING.fullmatch, _names(statement))):
            drawn += lines
    return drawn >= DRAWN * drawing > 0


def only_prepares(cell: dict[str, Any]) -> bool:
    """Tell whether a code cell imports, or sets a style, and has no result."""
    body = _parsed(cell["source"]).body
    imports = (ast.Import, ast.ImportFrom)
    calls = all(isinstance(each, imports) or _is_call(each) for each in body)
    return not cell["outputs"] and calls and any(isinstance(each, imports) for each in body)


def _is_figure(output: dict[str, Any]) -> bool:
    return "image/png" in output.get("data", {})


def _is_call(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError:  # a magic, such as %%ranks
        return ast.Module([], [])


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _leaves(body: list[ast.stmt], inside: str = "") -> Iterator[tuple[ast.stmt, str]]:
    """Yield statements that hold no other, each with the function it stands in."""
    for statement in body:
        within = [each for part in ("body", "orelse") for each in getattr(statement, part, [])]
        if within:
            yield from _leaves(within, inside or getattr(statement, "name", ""))
        else:
            yield statement, inside
