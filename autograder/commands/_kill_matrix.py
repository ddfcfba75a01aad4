"""The kill matrix: which wrong solutions the checks find, in which place, and with which words.

It is the page ``instructor/kill_matrix.md``, made from the marks in every ``mutants.py``. The tests
run each wrong solution in each place, so the table is correct.
"""

from __future__ import annotations

from pathlib import Path

from course_lib.checking.loading import load_module
from course_lib.checking.mutants import EVERYWHERE, Solution, mutants_of

_HEAD = """\
# The kill matrix

These tables have wrong solutions that people write, also lazy ones, and right ones that differ from
ours. ✗: the check refuses the solution there, with these words; ✓: the solution passes there;
empty: not tried there. `tests/test_assignments.py` and `tests/autograder/examination/` run all.

Made by `python -m autograder release`.

"""
_PLACES = {"simulated": "simulated", "cpu": "CPU", "grader": "grader"}


def kill_matrix(sources: Path) -> str:
    """Return the page: the tables of all assignments in `sources`, each under a heading."""
    parts = [_HEAD]
    for path in sorted(sources.glob("*/mutants.py")):
        mutants = mutants_of(load_module(path))
        wrong = sum(mutant.reason is not None for mutant in mutants)
        parts += [
            f"## {path.parent.name}: {wrong} wrong, {len(mutants) - wrong} right\n",
            f"| task | solution | the report says | {' | '.join(_PLACES.values())} |",
            "|---|---|---|" + ":-:|" * len(_PLACES),
            *_rows(mutants),
            "",
        ]
    return "\n".join(parts).rstrip() + "\n"


def _rows(mutants: list[Solution]) -> list[str]:
    rows, last = [], ""
    for mutant in sorted(mutants, key=lambda m: (_order(mutants, m.task), m.reason is not None)):
        task = "" if mutant.task == last else f"`{mutant.task}`"
        last = mutant.task
        solution = mutant.mistake.replace("_", " ")
        if mutant.reason is None:
            says, found = "right", ["✓"] * len(EVERYWHERE)
        else:
            says = "… " + mutant.reason.replace("|", "\\|") + " …"
            found = ["✗" if place in mutant.where else "" for place in EVERYWHERE]
        rows.append(f"| {task} | {solution} | {says} | {' | '.join(found)} |")
    return rows


def _order(mutants: list[Solution], task: str) -> int:
    return [mutant.task for mutant in mutants].index(task)
