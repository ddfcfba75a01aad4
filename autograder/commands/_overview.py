"""The overview in ``assignments/README.md``: what each assignment asks, and how it was tested.

The overview has only counts and names, because the wrong solutions and their reports would reveal
the right ones. Those are in the kill matrix, ``instructor/kill_matrix.md``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from course_lib.checking.loading import load_module
from course_lib.checking.mutants import EVERYWHERE, Solution, mutants_of

_PLACES = {"simulated": "on simulated ranks", "cpu": "on CPU ranks", "grader": "in the sandbox"}
_HEAD = """\
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
    rows = []
    for path in sorted(sources.glob("*/mutants.py")):
        name = path.parent.name
        notebook = nbformat.read(path.parent / f"{name}.ipynb", as_version=4)
        rows.append(_row(name, notebook, mutants_of(load_module(path))))
    return _HEAD + "\n".join(rows) + "\n" + _FOOT


def _row(name: str, notebook: NotebookNode, mutants: Sequence[Solution]) -> str:
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
    wrong = [mutant for mutant in mutants if mutant.reason is not None]
    places = [
        f"{sum(place in mutant.where for mutant in mutants)} {_PLACES[place]}"
        for place in EVERYWHERE
    ]
    return (
        f"| [{name}]({name}/{name}.ipynb) | {len(checked)} | {sum(checked):g} + {sum(read):g} "
        f"| {takes[1]} | {len(wrong)} | {len(mutants) - len(wrong)} | {', '.join(places)} |"
    )
