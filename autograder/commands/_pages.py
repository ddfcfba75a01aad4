"""The page about all assignments that `release` writes, ``assignments/README.md``.

It says what each assignment asks, and how it was tested. It has only counts and names, because the
wrong solutions and their reports would reveal the right ones. The counts are made from the marks in
every ``mutants.py``. The tests run each solution in each place, so the counts are correct.
"""

from __future__ import annotations

import re
from pathlib import Path
from string import Template

import nbformat

from course_lib.checking.loading import load_module
from course_lib.checking.mutants import EVERYWHERE, mutants_of

_TRIED = {"simulated": "on simulated ranks", "cpu": "on CPU ranks", "grader": "in the sandbox"}
_PAGE = Path(__file__).with_name("overview.md")


def overview(sources: Path) -> str:
    """Return the text of ``assignments/README.md`` for all assignments in `sources`."""
    rows = [_overview_row(path) for path in sorted(sources.glob("*/mutants.py"))]
    return Template(_PAGE.read_text(encoding="utf-8")).substitute(rows="\n".join(rows))


def _overview_row(path: Path) -> str:
    name, mutants = path.parent.name, mutants_of(load_module(path))
    notebook = nbformat.read(path.parent / f"{name}.ipynb", as_version=4)
    roles = [cell.metadata.get("nbgrader", {}) for cell in notebook.cells]
    checked = [role["points"] for role in roles if role.get("grade") and not role["solution"]]
    read = [role["points"] for role in roles if role.get("grade") and role["solution"]]
    text = " ".join(notebook.cells[0].source.split())
    takes = re.search(r"\*\*It takes\*\* (?:about )?(.+?)[.:;]", text)
    if takes is None:
        raise ValueError(
            f"{name}: the first cell of the notebook does not say how long the assignment takes. "
            "Add a sentence such as '**It takes** about 2 hours.'"
        )
    refused = sum(mutant.reason is not None for mutant in mutants)
    places = [
        f"{sum(place in mutant.where for mutant in mutants)} {_TRIED[place]}"
        for place in EVERYWHERE
    ]
    return (
        f"| [{name}]({name}/{name}.ipynb) | {len(checked)} | {sum(checked):g} + {sum(read):g} "
        f"| {takes[1]} | {refused} | {len(mutants) - refused} | {', '.join(places)} |"
    )
