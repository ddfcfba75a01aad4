"""``autograder regrade --one STUDENT``: explain a grade, with the inputs of its verdict."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat

from autograder.course import Folders, find_sources, load_config
from autograder.examination.case import On
from autograder.examination.submission import Submission, Taken
from autograder.examination.verdict import Verdict, checks_digest, source_digest
from autograder.passes.examine import Exam, examine_notebook
from autograder.passes.rebuild import rebuilt
from autograder.pool.book import current
from autograder.pool.class_list import NothingToGrade
from autograder.settings import Settings
from course_lib.checking import Case, Check, Observed
from course_lib.checking.run_check import Runner
from course_lib.ranks import Trace
from course_lib.ranks.explain.errors import RanksError
from course_lib.ranks.wire import Plain


class _Watched(Submission):
    """A submission whose traces are kept: case's name → the trace of its ranks, as they ran."""

    traces: dict[str, Trace]

    def runner(self, on: On | None = None, taken: Taken | None = None) -> Runner:
        """Return a runner of the cases that keeps the traces of their ranks."""
        run = super().runner(on, taken)

        def watched(check: Check, case: Case, inputs: Sequence[Plain]) -> Observed:
            name = f"{check.function}: {case.name}"
            try:
                observed = run(check, case, inputs)
            except RanksError as error:
                self._keep(name, getattr(error, "trace", None))
                raise
            assert isinstance(observed, Observed)
            self._keep(name, observed.trace)
            return observed

        return watched

    def _keep(self, name: str, trace: Trace | None) -> None:
        if trace is not None and trace.operations:
            self.traces.setdefault(name, trace)


def explain(root: Path, assignment: str, student: str) -> bool:
    """Examine a student's graded notebooks again, and print every case; book nothing.

    Draw the timeline of the first case that failed. Return whether all points are the same.

    Raises:
        NothingToGrade: the student has no verdict, or the code that it is about no longer exists.

    """
    folders = Folders.at(root)
    verdicts = current(folders, assignment, student)
    if not verdicts:
        raise NothingToGrade(f"{student} has no verdict: run autograder grade {assignment}")
    same = True
    for old in verdicts.values():
        new, traces = _examine_again(root, folders, old)
        print(_explained(old, new))
        if name := _to_draw(new, traces):
            figure = folders.data / "verdicts" / assignment / student / f"{old.notebook}.png"
            traces[name].plot(title=f"{student}, {name}").savefig(figure, dpi=150)
            print(f"Timeline of {name!r}: {figure}")
        else:
            print("No case sent a message, so there is no timeline to draw.")
        same &= [c.score for c in old.checks] == [c.score for c in new.checks]
    return same


def _examine_again(root: Path, folders: Folders, old: Verdict) -> tuple[Verdict, dict[str, Trace]]:
    source = find_sources(root) / old.assignment
    released = folders.release / old.assignment / f"{old.notebook}.ipynb"
    new = replace(
        old,
        checks=[],
        notes=[],
        limits=[],
        timings={},
        seconds=0.0,
        settings=old.settings or Settings.of(load_config(root)).__dict__,
        checks_sha256=checks_digest(source, released),
    )
    traces: dict[str, Trace] = {}

    def runs(*given: Any) -> _Watched:
        submission = _Watched(*given)
        submission.traces = traces
        return submission

    log = logging.getLogger(__name__)
    examine_notebook(_notebook(folders, old), Exam.of(source), new, log, runs)
    return new, traces


def _notebook(folders: Folders, old: Verdict) -> Any:
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
            told = "\n".join(part for part in (case["reason"], case["detail"]) if part)
            lines += [f"      {line}" for line in told.splitlines()]
    lines += [f"\nlimit reached: {limit}" for limit in new.limits]
    before = {check.name: check.score for check in old.checks}
    moved = [c for c in new.checks if before.get(c.name) != c.score]
    if old.checks_sha256 not in ("", new.checks_sha256):
        lines.append("\nThe checks have changed since the verdict was given.")
    if moved:
        lines.append("Points, in the verdict → now:")
        lines += [f"  {c.name}: {before.get(c.name, 0):g} → {c.score:g}" for c in moved]
    else:
        lines.append("\nThe points are the same as in the verdict.")
    return "\n".join(lines)


def _to_draw(new: Verdict, traces: dict[str, Trace]) -> str:
    """Return the name of the first failure with a trace, or else of the last trace."""
    failed = {c["name"] for check in new.checks for c in check.cases if not c["passed"]}
    hits = [name for name in traces if name.partition(": ")[2] in failed]
    if failed and traces and not hits:
        print("No failed case sent a message, so the last case with messages is drawn instead.")
    return (hits or list(traces)[-1:] or [""])[0]
