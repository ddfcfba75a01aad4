"""Hints that only the notebook can add to an error of a ``%%ranks`` cell."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from course_lib.ranks.explain.errors import DeadlockError, RankError, RanksError
from course_lib.ranks.explain.words import names_inside, one_or_many, spans
from course_lib.ranks.variables import GIVEN


def add_hints(error: RanksError, variables: Mapping[str, Any], chosen: Sequence[int]) -> None:
    """Add hints to an error that need the notebook's `variables`, or the ranks that ran the cell.

    `chosen` are the ranks that ran the cell.
    """
    name = error.undefined if isinstance(error, RankError) else ""
    if name in variables and not name.startswith("_"):
        error.add_detail(_missing(name, variables[name]))
    idle_ranks = [state.rank for state in error.states if state.rank not in chosen]
    if isinstance(error, DeadlockError) and idle_ranks:
        verb = one_or_many(chosen, "runs", "run")
        error.add_detail(
            f"Only {names_inside(chosen)} {verb} this cell (%%ranks {spans(chosen)}). A "
            "collective needs all ranks of its group: run the cell on all of them."
        )


def hint_after(result: Any) -> None:
    """Print what to do after a plain cell that uses a name which only the ranks have."""
    name = getattr(result.error_in_exec, "name", None)
    if isinstance(result.error_in_exec, NameError) and name in GIVEN:
        print(
            f"{name!r} is there in cells that run on the ranks: begin the cell with %%ranks.",
            file=sys.stderr,
        )


def _missing(name: str, value: Any) -> str:
    if isinstance(value, ModuleType):
        module = value.__name__
        statement = f"import {module}" + (f" as {name}" if module != name else "")
        return (
            f"{name!r} is imported in the notebook, but not on the ranks. In the cell, write: "
            f"{statement}"
        )
    return (
        f"{name!r} is a variable of the notebook; %%ranks cells have their own variables. "
        f"Send it to the ranks first: ranks.push({name}={name})"
    )
