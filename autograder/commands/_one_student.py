"""``autograder regrade --one STUDENT``: explain a grade, with the inputs of its verdict."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from autograder.course import Folders, find_sources
from autograder.examination.verdict import Verdict, checks_digest, source_digest
from autograder.passes.examine import Exam, examine_notebook
from autograder.passes.rebuild import rebuilt
from autograder.passes.tell import timeline_of
from autograder.pool.book import current
from autograder.pool.class_list import NothingToGrade

_LOG = logging.getLogger(__name__)


def explain(root: Path, assignment: str, student: str) -> bool:
    """Examine a student's graded notebooks again, and print every case; book nothing.

    Draw the timeline of the first visible case that failed. Return whether all points are the same.

    Raises:
        NothingToGrade: the student has no verdict, or the code that it is about no longer exists.

    """
    folders, sources = Folders.at(root), find_sources(root)
    verdicts = current(folders, assignment, student)
    if not verdicts:
        raise NothingToGrade(f"{student} has no verdict: run autograder grade {assignment}")
    same = True
    for old in verdicts.values():
        released = folders.release / assignment / f"{old.notebook}.ipynb"
        new = replace(
            old,
            checks=[],
            notes=[],
            limits=[],
            timings={},
            checks_sha256=checks_digest(sources / assignment, released),
        )
        examine_notebook(_notebook(folders, old), Exam.of(sources / assignment), new, _LOG)
        print(_explained(old, new))
        for check in new.checks:
            png, _ = timeline_of(check)
            if png:
                path = folders.data / "verdicts" / assignment / student / f"{old.notebook}.png"
                path.write_bytes(png)
                print(f"Timeline of {check.task}, case {check.trace['case']!r}: {path}")
                break
        same &= [c.score for c in old.checks] == [c.score for c in new.checks]
    return same


def _notebook(folders: Folders, old: Verdict) -> NotebookNode:
    """Return the notebook with the code that the verdict is about."""
    graded = folders.graded(old.assignment, old.student) / f"{old.key}.ipynb"
    submitted = folders.submitted / old.student / old.assignment / f"{old.notebook}.ipynb"
    for path in (graded, submitted):
        if path.is_file():
            found = nbformat.read(path, as_version=4) if path == graded else rebuilt(folders, path)
            code = [cell.source for cell in found.cells if cell.cell_type == "code"]
            if source_digest(code) == old.source_sha256:
                return found
    raise NothingToGrade(
        f"the code that was examined is gone: it is neither {graded} nor {submitted}. Perhaps the "
        f"student has submitted again: run autograder grade {old.assignment}"
    )


def _explained(old: Verdict, new: Verdict) -> str:
    """Describe every case of the new examination, and its differences from the old one."""
    lines = [f"{old.student}, {old.notebook}: {new.score:g} of {new.max_score:g} points"]
    for check in new.checks:
        lines.append(f"\n{check.name}: {check.score:g} of {check.max_score:g}")
        for case in check.cases:
            hidden = " (hidden)" if case["hidden"] else ""
            mark = "✓" if case["passed"] else "✗"
            lines.append(f"  {mark} {case['name']}{hidden}  {case['seconds']:.2f} s")
            why = "\n".join(part for part in (case["reason"], case["detail"]) if part)
            lines += [f"      {line}" for line in why.splitlines()]
    lines += [f"\nlimit reached: {limit}" for limit in new.limits]
    before = {check.name: check.score for check in old.checks}
    moved = [c for c in new.checks if before.get(c.name) != c.score]
    if old.checks_sha256 != new.checks_sha256:
        lines.append("\nThe checks have changed since the verdict was given.")
    if moved:
        lines.append("Points, in the verdict → now:")
        lines += [f"  {c.name}: {before.get(c.name, 0):g} → {c.score:g}" for c in moved]
    else:
        lines.append("\nThe points are the same as in the verdict.")
    return "\n".join(lines)
