"""Turn code into a sequence of symbols in which names, comments and layout no longer count.

A symbol is the kind of a node of the syntax tree, with details that a copier seldom changes:
attributes (``all_reduce``), keywords, numbers, imports. Local names, strings, annotations and
docstrings are one symbol each, or none. If a cell has no syntax tree, its tokens are used.
"""

from __future__ import annotations

import ast
import builtins
import io
import keyword
import re
import tokenize
import warnings
from collections.abc import Iterator
from typing import NamedTuple

_BUILTIN = frozenset(dir(builtins))
MAX_SOURCE = 200_000
"""Largest number of characters of a cell; the rest of a longer cell is ignored."""


class Symbol(NamedTuple):
    """One step of the code: its kind, and its line in the cell, from 1."""

    text: str
    line: int


def normalise(source: str) -> list[list[Symbol]]:
    """Return the symbols of each top-level statement of a cell, so that their order won't count."""
    source = source[:MAX_SOURCE].replace("\0", "")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes in strings
            tree = ast.parse(_without_magics(source))
        return [list(_symbols(statement)) for statement in tree.body]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [list(_tokens(source))]


def _without_magics(source: str) -> str:
    """Comment out lines that only IPython understands."""
    return re.sub(r"^(\s*)[%!?]", r"\1# ", source, flags=re.MULTILINE)


def _symbols(node: ast.AST, line: int = 1) -> Iterator[Symbol]:
    """Yield the nodes' symbols in the order of the text; commuting operands are not sorted."""
    line = getattr(node, "lineno", line)
    text = _text(node)
    if text is None:
        return
    if text:
        yield Symbol(text, line)
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_comment", "ctx", "type_params"):
            continue
        children = value if isinstance(value, list) else [value]
        if field == "body" and children and _is_docstring(children[0]):
            children = children[1:]
        for child in children:
            if isinstance(child, ast.AST):
                yield from _symbols(child, line)


def _is_docstring(node: object) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _text(node: ast.AST) -> str | None:
    """Return a node's symbol: empty if only the nodes below it count, None if they don't either."""
    match node:
        case ast.Expr(value=ast.Constant(value=str())) | ast.Pass():
            return None
        case ast.Name(id=name):
            return name if name in _BUILTIN else "name"
        case ast.Attribute(attr=attr):
            return f".{attr}"
        case ast.arg():
            return "name"
        case ast.keyword(arg=arg):
            return f"{arg}="
        case ast.alias(name=name):
            return f"import {name}"
        case ast.Constant(value=value):
            return "text" if isinstance(value, (str, bytes)) else repr(value)
        case ast.Expr() | ast.Load() | ast.Store() | ast.arguments() | ast.JoinedStr():
            return ""
        case ast.AnnAssign(value=None):
            return None
        case ast.AnnAssign():
            return "Assign"
        case _:
            return type(node).__name__


def _tokens(source: str) -> Iterator[Symbol]:
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.NAME:
                known = keyword.iskeyword(token.string) or token.string in _BUILTIN
                yield Symbol(token.string if known else "name", token.start[0])
            elif token.type == tokenize.STRING:
                yield Symbol("text", token.start[0])
            elif token.type in (tokenize.OP, tokenize.NUMBER):
                yield Symbol(token.string, token.start[0])
    except (tokenize.TokenError, SyntaxError, ValueError):
        return  # the tokens before the error count
