"""Run a ``%%ranks`` cell on a rank, in a namespace that lasts from cell to cell."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Collection
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks.notebook.rank_shell import RankShell
from course_lib.ranks.output.displays import Bundle, render, show_figures
from course_lib.ranks.variables import GIVEN, Namespace, namespace


@dataclass(frozen=True)
class Cell:
    """One ``%%ranks`` cell, in the form in which it is sent to the ranks."""

    source: str
    """Plain Python (IPython has rewritten ``!`` and ``%``), with the notebook's line numbers."""
    name: str
    """The file name that its lines have in tracebacks."""
    ranks: Collection[int]
    """The ranks that run it."""
    owner: str
    """The owner of the variables that it sees: see `variables`."""


def compile_cell(tree: ast.Module | ast.Expression, name: str) -> CodeType:
    """Return the code of a cell, which may use ``await`` at the top level."""
    mode = "exec" if isinstance(tree, ast.Module) else "eval"
    code: CodeType = compile(tree, name, mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return code


def run_cell(cell: Cell) -> Bundle | None:
    """Run `cell` if this rank is one of its ranks; return its last value, rendered."""
    if dist.get_rank() not in cell.ranks:
        return None
    variables = namespace(cell.owner)
    if "get_ipython" not in variables:
        own_shell = RankShell(variables)
        variables.update(__name__="__main__", get_ipython=lambda: own_shell)
    variables.update(start_values := _given())
    shell: RankShell = variables["get_ipython"]()
    try:
        value = _execute(cell.source, cell.name, variables, shell)
    finally:
        _tell_about_bound(start_values, variables)
    show_figures()
    if value is None:
        return None
    variables["_"] = value
    return render(value)


def _execute(source: str, name: str, variables: Namespace, shell: RankShell) -> Any:
    """Run code and return the value of its last expression, unless a semicolon ends it."""

    def run(tree: ast.Module | ast.Expression) -> Any:
        code = compile_cell(tree, name)
        value = eval(code, variables)
        return shell.wait_for(value) if code.co_flags & inspect.CO_COROUTINE else value

    tree = ast.parse(source, name)
    last: ast.expr | None = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        last = tree.body.pop().value  # type: ignore[attr-defined]
    run(tree)
    return None if last is None else run(ast.Expression(last))


def _given() -> Namespace:
    """Return the variables that every cell starts with."""
    device = torch.device("cpu")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.device("cuda", torch.cuda.current_device())
    values = dist.get_rank(), dist.get_world_size(), device, dist, torch
    return dict(zip(GIVEN, values, strict=True))


def _tell_about_bound(start_values: Namespace, variables: Namespace) -> None:
    """Print which of the given variables a cell has changed: the next cell finds them as before."""
    now = {name: variables.get(name, value) for name, value in start_values.items()}
    bound = [n for n, v in start_values.items() if type(now[n]) is not type(v) or now[n] != v]
    if bound:
        print(
            f"This cell has changed {' and '.join(bound)}. In the next cell, each rank "
            "has its own again: use other names.",
            file=sys.stderr,
        )
