"""The page about all assignments that `release` writes, ``assignments/README.md``.

It says what each assignment asks, and how it was tested. It has only counts and names, because the
wrong solutions and their reports would reveal the right ones. The counts are made from the marks in
every ``mutants.py``. The tests run each solution in each place, so the counts are correct.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat

from course_lib.checking.loading import load_module
from course_lib.checking.mutants import EVERYWHERE, mutants_of

_TRIED = {"simulated": "on simulated ranks", "cpu": "on CPU ranks", "grader": "in the sandbox"}
_OVERVIEW_HEAD = """\
# Assignments

One folder for each assignment. `make lab` copies them to your desk, where you work. Beside each
notebook lies `checks.py`, with its checks; some have longer judges in `judges.py`.

Before an assignment was handed out, its checks were tried with wrong and with right solutions that
people write: on simulated ranks, on CPU ranks, and in the grader's sandbox. They must refuse all
wrong ones, and pass all right ones.

| assignment | tasks | points | time | wrong, refused | right, passed | tried |
|---|---|---|---|---|---|---|
"""
_FOOT = """
*Tasks* are those that a check examines. *Points* are for these tasks + for questions that a person
reads. `make test-all` tries all solutions again, `make test` some of them. Made by
`python -m autograder release`.
"""


def overview(sources: Path) -> str:
    """Return the text of ``assignments/README.md`` for all assignments in `sources`."""
    rows = [_overview_row(path) for path in sorted(sources.glob("*/mutants.py"))]
    return _OVERVIEW_HEAD + "\n".join(rows) + "\n" + _FOOT


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
