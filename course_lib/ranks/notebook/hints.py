"""Hints that only the notebook can add to an error of a ``%%ranks`` cell."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from course_lib.ranks.explain.errors import RankError, RanksError
from course_lib.ranks.variables import GIVEN


def add_hint(error: RanksError, variables: Mapping[str, Any]) -> None:
    """Say how a variable of the notebook gets to the ranks, if the error is that they lack it."""
    name = error.undefined if isinstance(error, RankError) else ""
    if name in variables and not name.startswith("_"):
        error.add_detail(
            f"{name!r} is a name of the notebook; %%ranks cells have their own. Import it in the "
            f"cell, or send it to the ranks first: ranks.push({name}={name})"
        )


def hint_after(result: Any) -> None:
    """Print what to do after a plain cell that uses a name which only the ranks have."""
    name = getattr(result.error_in_exec, "name", None)
    if isinstance(result.error_in_exec, NameError) and name in GIVEN:
        print(
            f"{name!r} is there in cells that run on the ranks: begin the cell with %%ranks.",
            file=sys.stderr,
        )
