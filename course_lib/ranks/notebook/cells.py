"""What a ``%%ranks`` cell does on a rank: run in a namespace that lasts."""

from __future__ import annotations

import ast
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks.output.displays import Bundle, render, show_figures

_namespaces: dict[int, dict[str, Any]] = {}


def run_cell(source: str, name: str, ranks: Collection[int]) -> Bundle | None:
    """Run `source` if this rank is one of `ranks`; return its last expression, rendered.

    Args:
        source: the cell's code, in which line numbers are those of the notebook.
        name: the file name that its lines carry in tracebacks.
        ranks: who runs it.

    """
    rank = dist.get_rank()
    if rank not in ranks:
        return None
    namespace = _namespaces.setdefault(rank, _fresh(rank))
    tree = ast.parse(source, name)
    last: ast.expr | None = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        last = tree.body.pop().value  # type: ignore[attr-defined]
    exec(compile(tree, name, "exec"), namespace)
    value = None
    if last is not None:
        value = eval(compile(ast.Expression(last), name, "eval"), namespace)
    show_figures()
    if value is None:
        return None
    namespace["_"] = value
    return render(value)


def _fresh(rank: int) -> dict[str, Any]:
    device = torch.device("cpu")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.device("cuda", torch.cuda.current_device())
    return {
        "__name__": "__main__",
        "__builtins__": __builtins__,
        "rank": rank,
        "world_size": dist.get_world_size(),
        "device": device,
        "dist": dist,
        "torch": torch,
    }
