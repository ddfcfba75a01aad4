"""Grade the one submission in Gradescope's container, and write ``results.json`` for it.

    python -m autograder.commands._gradescope_run 02_data_parallel_sgd --points after_published

The script ``run_autograder``, which `autograder.commands.gradescope` writes, calls this. The
submission is graded like a class of one: with the same sandbox, canaries and messages.

If the machine fails, there is no ``results.json``. Then Gradescope tells the student that the
autograder failed to execute correctly. It counts this as an error of the autograder, not as a zero.
Only instructors see what this program prints.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbgrader.utils import is_grade, is_solution, is_task

from autograder.collection.collecting import notebooks_of
from autograder.collection.formats import HandIn
from autograder.collection.listing import list_source
from autograder.collection.vetting import Vetted, vet_hand_in
from autograder.course import Folders, find_course, load_config
from autograder.examination.verdict import Verdict
from autograder.exporting.gradescope import DEFAULT, WHEN, Task, results
from autograder.files import write_whole
from autograder.pool import phases
from autograder.sandbox.unavailable import SandboxUnavailable
from autograder.settings import Settings

HOME = "/autograder"
"""Gradescope's folder; the environment variable AUTOGRADER can name a different one."""
NO_SANDBOX = """\
This container does not allow the sandbox that student code needs, so nothing is graded here.
Nobody gets a zero: Gradescope shows an error of the autograder. Grade on a machine of your own:
choose Export Submissions in Gradescope, and give the zip to autograder collect. See "Gradescope"
in docs/instructors_guide.md."""


class Ungraded(RuntimeError):
    """The machine or a check failed; the message says how."""


def grade(home: Path, assignment: str, when: str) -> dict[str, Any]:
    """Grade the submission in ``home/submission``; return the document for Gradescope.

    Args:
        home: the folder that has ``source``, ``submission`` and ``submission_metadata.json``.
        assignment: its name.
        when: when students see points, one of `WHEN`.

    Raises:
        Ungraded: the machine or a check failed, so there are no points.
        SandboxUnavailable: there is no sandbox.

    """
    root = find_course(home / "source" / "course")
    config = load_config(root)
    folders = Folders.of(root, config)
    hand_in = HandIn("student", files={e.path: e for e in list_source(home / "submission")})
    vetted = vet_hand_in(hand_in, notebooks_of(root, config, assignment), own_stamp=False)
    expected = {f"{name}.ipynb" for name in folders.notebooks(assignment)}
    if not expected & set(vetted.files):
        return _document(folders, assignment, when, {}, _on_files(vetted, expected))
    student = _student(home)
    place = folders.submitted / student / assignment
    shutil.rmtree(place, ignore_errors=True)
    for path, data in vetted.files.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(data)
    outcomes = phases.grade_class(root, assignment, [student], Settings.of(config), jobs=1)
    phases.report(outcomes)
    if any(outcome.failed for outcome in outcomes):
        raise Ungraded(
            "not everything was graded, so no results.json was written: the reasons are above"
        )
    graded = {Path(outcome.path).stem: Path(outcome.verdict) for outcome in outcomes}
    return _document(folders, assignment, when, graded, _on_files(vetted, expected))


def _student(home: Path) -> str:
    """Return Gradescope's number of the student, the same for each of their submissions.

    The inputs of a submission are drawn from this name, see `autograder.examination.seed`.
    """
    try:
        told = json.loads((home / "submission_metadata.json").read_text(encoding="utf-8"))
        return str(int(told["users"][0]["id"]))
    except (OSError, ValueError, TypeError, LookupError):
        return "student"


def _on_files(vetted: Vetted, expected: set[str]) -> list[str]:
    """Return sentences on the submitted files."""
    told = [f"{note[:1].upper()}{note[1:]}." for note in vetted.notes]
    told += [f"{path!r} was ignored, because it {why}." for path, why in vetted.refused]
    if extra := sorted(set(vetted.files) - expected):
        told.append(f"Only {', '.join(sorted(expected))} is graded, not {', '.join(extra)}.")
    return told


def _document(
    folders: Folders, assignment: str, when: str, graded: Mapping[str, Path], about: list[str]
) -> dict[str, Any]:
    """Return the document on the `graded` notebooks; the assignment's others have no points."""
    tasks, by_hand, seconds = [], [], 0.0
    for name in folders.notebooks(assignment):
        path = folders.release / assignment / f"{name}.ipynb"
        nb, checks = nbformat.read(path, as_version=4), {}
        if name in graded:
            verdict = Verdict.read(graded[name])
            nb = nbformat.read(graded[name].with_suffix(".ipynb"), as_version=4)
            checks = {check.task: check for check in verdict.checks}
            seconds += verdict.seconds
            # Notes that begin with the assignment's name are for the author of a check.
            about += [note for note in verdict.notes if not note.startswith(f"{assignment}/")]
            about += [f"limit reached: {limit}" for limit in verdict.limits]
            _tell_instructor(verdict)
        for cell in filter(lambda c: is_grade(c) or is_task(c), nb.cells):
            task, points = cell.metadata.nbgrader.grade_id, float(cell.metadata.nbgrader.points)
            if is_solution(cell) or is_task(cell):
                by_hand.append(f"{task} ({points:g} points)")
            elif task in checks:
                tasks.append(Task(task, points, cell.outputs[0].text, checks[task]))
            else:
                tasks.append(Task(task, points, f"There is no {name}.ipynb in the submission."))
    if by_hand:
        answers = ", ".join(by_hand)
        about.append(f"A person grades these answers, so their points are not included: {answers}.")
    return results(tasks, when=when, about=about, seconds=seconds)


def _tell_instructor(verdict: Verdict) -> None:
    """Print what students do not see, such as the seed, which draws the same inputs again."""
    print(f"{verdict.score:g} of {verdict.max_score:g} points, seed {verdict.seed}")
    for check in verdict.checks:
        print(f"  {check.task}: {check.score:g} of {check.max_score:g}")
        for case in check.cases:
            if not case["passed"]:
                hidden = "hidden, " * case["hidden"]
                print(f"    ✗ {hidden}{case['name']}: {' '.join(case['reason'].split())}")


def main() -> int:
    """Grade, and write ``results.json``; return the exit status."""
    parser = argparse.ArgumentParser(prog="run_autograder", description=__doc__)
    parser.add_argument("assignment", help="the assignment's name")
    parser.add_argument("--points", choices=WHEN, default=DEFAULT, help="when students see points")
    arguments = parser.parse_args()
    home = Path(os.environ.get("AUTOGRADER", HOME))
    try:
        document = grade(home, arguments.assignment, arguments.points)
    except SandboxUnavailable as error:
        print(f"run_autograder: {error}\n{NO_SANDBOX}")
        return 1
    except (Ungraded, *phases.ERRORS) as error:
        print(f"run_autograder: {error}")
        return 1
    write_whole(home / "results" / "results.json", json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
