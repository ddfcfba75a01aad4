"""``autograder replay``: examine a submission again with its verdict's inputs; draw a timeline."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat

from autograder.course import Folders, find_sources, load_config
from autograder.examination.check import AuthorError
from autograder.examination.node import On
from autograder.examination.submission import Submission
from autograder.examination.verdict import Verdict, checks_digest, source_digest
from autograder.passes.examine import Exam, examine_notebook
from autograder.pool.one import rebuilt
from autograder.sandbox.place import MachineFailure
from autograder.sandbox.unavailable import SandboxUnavailable
from autograder.settings import Settings
from course_lib.checking import Case, Check, Observed
from course_lib.checking.on_ranks.wire import Plain
from course_lib.checking.run_check import Runner
from course_lib.ranks import Trace
from course_lib.ranks.explain.errors import RanksError

DESCRIPTION = (
    "Examine a submission again with the inputs of its verdict. The command prints every case, "
    "also hidden ones in full, so its output is for instructors only. It draws the timeline of the "
    "first case that failed, or of --case, as a PNG. It books nothing."
)


class ReplayError(RuntimeError):
    """A verdict cannot be replayed; the message says why."""


class Watched(Submission):
    """A submission whose traces are kept.

    Attributes:
        traces: case's name → the trace of its ranks, in the order in which the cases ran.

    """

    traces: dict[str, Trace]

    def runner(self, on: On | None = None) -> Runner:
        """Return a runner of the cases that keeps the traces of their ranks."""
        run = super().runner(on)

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


def replay(root: Path, path: Path) -> tuple[Verdict, Verdict, dict[str, Trace]]:
    """Return the verdict at `path`, the new examination's verdict, and the traces of its cases.

    Raises:
        ReplayError: the code that the verdict is about no longer exists.

    """
    old = Verdict.read(path)
    folders = Folders.of(root, load_config(root))
    source = find_sources(root) / old.assignment
    notebook = _notebook(folders, old, path)
    new = replace(
        *(old,),
        **{"checks": [], "notes": [], "limits": [], "timings": {}, "seconds": 0.0},
        settings=old.settings or Settings.of(load_config(root)).__dict__,
        checks_sha256=checks_digest(
            source, folders.release / old.assignment / f"{old.notebook}.ipynb"
        ),
    )
    traces: dict[str, Trace] = {}

    def runs(*given: object) -> Watched:
        submission = Watched(*given)  # type: ignore[arg-type]
        submission.traces = traces
        return submission

    examine_notebook(notebook, Exam.of(source), new, logging.getLogger(__name__), runs)
    return old, new, traces


def _notebook(folders: Folders, old: Verdict, path: Path) -> Any:
    """Return the notebook with the code that the verdict is about."""
    graded = folders.graded(old.assignment, old.student) / f"{old.key}.ipynb"
    for candidate in (path.with_suffix(".ipynb"), graded):
        if candidate.is_file():
            notebook = nbformat.read(candidate, as_version=4)
            if _digest(notebook) == old.source_sha256:
                return notebook
    submitted = folders.submitted / old.student / old.assignment / f"{old.notebook}.ipynb"
    if (
        submitted.is_file()
        and _digest(notebook := rebuilt(folders, submitted)) == old.source_sha256
    ):
        return notebook
    raise ReplayError(
        f"the code that was examined is gone: it is neither beside {path} nor at {submitted}. "
        "Perhaps the student has submitted again, or somebody moved the code"
    )


def _digest(notebook: nbformat.NotebookNode) -> str:
    return source_digest([cell.source for cell in notebook.cells if cell.cell_type == "code"])


def explained(old: Verdict, new: Verdict) -> str:
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


def chosen(new: Verdict, traces: dict[str, Trace], case: str) -> str:
    """Return the name of the trace to draw: `case`, or else the first failure, or else the last.

    Raises:
        ReplayError: there is no trace of `case`.

    """
    if case:
        found = [name for name in traces if case in name]
        if not traces:
            raise ReplayError("no case sent a message, so there is nothing to draw: omit --case")
        if not found:
            raise ReplayError(
                f"no case that sent messages has {case!r} in its name; choose from: "
                f"{'; '.join(traces)}"
            )
        return found[0]
    failed = {c["name"] for check in new.checks for c in check.cases if not c["passed"]}
    hits = [name for name in traces if name.partition(": ")[2] in failed]
    if failed and traces and not hits:
        print("No failed case sent a message, so the last case with messages is drawn instead.")
    return (hits or list(traces)[-1:] or [""])[0]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "verdict", type=Path, help="a verdict: a file below grading/verdicts or grading/graded"
    )
    parser.add_argument("--case", default="", help="the case to draw: its name, or a part of it")
    parser.add_argument(
        "--figure",
        type=Path,
        help="draw the timeline of the case's messages to this PNG file (default: in the verdict's "
        "folder)",
    )


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Replay for the command line; return the exit status: 1 if the points differ now."""
    path: Path = arguments.verdict
    try:
        if not path.is_file():
            raise ReplayError(f"there is no {path}")
        old, new, traces = replay(root, path)
        print(explained(old, new))
        if name := chosen(new, traces, arguments.case):
            figure = arguments.figure or path.with_suffix(".png")
            traces[name].plot(title=f"{old.student}, {name}").savefig(figure, dpi=150)
            print(f"Timeline of {name!r}: {figure}")
        else:
            print("No case sent a message, so there is no timeline to draw.")
    except (
        *(ReplayError, ValueError, OSError, SandboxUnavailable, MachineFailure, AuthorError),
    ) as error:
        print(f"autograder replay: {error}", file=sys.stderr)
        return 2
    return int([c.score for c in old.checks] != [c.score for c in new.checks])
