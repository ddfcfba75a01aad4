"""``autograder demo``: a class of six, from release to feedback, in about a minute.

The six submissions are made from the assignment's own solution, from ``mutants.py`` and from the
released notebook. So the demo shows what the course really does with them. As before every class,
solutions with known points are graded first, and a machine that grades them wrongly grades nobody.
The demo writes only to ``grading/demo/``, so it does not change a real class.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbgrader.apps.api import NbGraderAPI

from autograder.commands.feedback import feedback
from autograder.course import Settings, find_sources, load_config
from autograder.errors import CommandFailed
from autograder.examination.gpus import gpu_access
from autograder.examination.verdict import Verdict, verdict_path
from autograder.passes.examine import Exam
from autograder.passes.self_test import solved
from course_lib.checking.loading import load_module
from course_lib.checking.mutants import Solution, mutants_of

ASSIGNMENT = "02_data_parallel_sgd"
DESCRIPTION = (
    "Release an assignment, grade six submissions with different mistakes, write their "
    "feedback, and print a table. Changes only grading/demo."
)


@dataclass(frozen=True)
class Result:
    """One line of the demo's table."""

    submission: str
    score: float
    max_score: float
    seconds: float
    reason: str


def demo(root: Path, say: Callable[[str], None] = print, on: str = "") -> list[Result]:
    """Run the demo in the course folder `root`; return the table's rows.

    Args:
        root: the course folder.
        say: called with each line of progress.
        on: ``cpu`` or ``gpu``: run the right solutions once more on such real ranks.

    Raises:
        SourcesMissing: this copy of the course lacks the sources of the assignments.
        SandboxUnavailable: there is no sandbox that has everything that grading needs.
        CommandFailed: a step failed.

    """
    source = find_sources(root) / ASSIGNMENT
    if on == "gpu":
        gpu_access()
    Exam.of(source).sandbox(replace(Settings.of(load_config(root)), on=on))
    folder = root / "grading" / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = load_config(root, data=folder)
    config.Examine.on = on
    api = NbGraderAPI(config=config)
    say(f"releasing {ASSIGNMENT} …")
    must(api.generate_assignment(ASSIGNMENT), "releasing the assignment")

    released = folder / "release" / ASSIGNMENT
    submissions = make_submissions(source, released)
    results = []
    for number, (name, notebook) in enumerate(submissions.items(), 1):
        handed_in = folder / "submitted" / name / ASSIGNMENT
        handed_in.mkdir(parents=True)
        nbformat.write(notebook, handed_in / f"{ASSIGNMENT}.ipynb")
        say(f"grading {number} of {len(submissions)}: {name} …")
        start = time.monotonic()
        must(api.autograde(ASSIGNMENT, name), f"grading {name}")
        seconds = time.monotonic() - start
        verdict = Verdict.read(verdict_path(folder, ASSIGNMENT, name, ASSIGNMENT))
        results.append(
            Result(name, verdict.score, verdict.max_score, round(seconds, 1), verdict.reason)
        )
    say("writing feedback …")
    for name, problem in feedback(config, ASSIGNMENT).items():
        raise CommandFailed(
            f"no page could be written for {name}: {problem.reason}; {problem.advice}"
        )
    return results


def make_submissions(source: Path, released: Path) -> dict[str, NotebookNode]:
    """Return the six submissions, by name."""
    mutants = {(m.task, m.mistake): m for m in mutants_of(load_module(source / "mutants.py"))}
    solution = nbformat.read(source / f"{ASSIGNMENT}.ipynb", as_version=4)
    untouched = nbformat.read(released / f"{ASSIGNMENT}.ipynb", as_version=4)

    def with_mutants(*names: tuple[str, str]) -> NotebookNode:
        return replace_tasks(untouched, solution, [mutants[name] for name in names])

    return {
        "right": with_mutants(),
        "right-differently": with_mutants(
            ("shard_bounds", "by_rounding_up"),
            ("average_gradients", "flat"),
            ("data_parallel_step", "averages_weights_by_rows"),
        ),
        "wrong-average": with_mutants(("average_gradients", "sum")),
        "deadlock": with_mutants(("average_gradients", "deadlock")),
        "crash": with_mutants(("average_gradients", "exit")),
        "untouched": untouched,
    }


def replace_tasks(
    released: NotebookNode, solution: NotebookNode, mutants: list[Solution]
) -> NotebookNode:
    """Return the released notebook with the solution's code, or a mutant's code if given."""
    instead = {f"write_{mutant.task}": mutant.source for mutant in mutants}
    return solved(released, solution, instead)


def must(outcome: dict[str, object], step: str) -> None:
    """Raise `CommandFailed` with nbgrader's words, if nbgrader could not do this."""
    if not outcome["success"]:
        raise CommandFailed(
            f"{step} failed: {outcome.get('error') or ''}\n{outcome.get('log') or ''}".rstrip()
        )


def table(results: list[Result], width: int | None = None) -> str:
    """Return the rows as a table that fits the terminal."""
    width = width or shutil.get_terminal_size((110, 24)).columns
    name_width = max(len(result.submission) for result in results)
    lines = [f"{'submission':{name_width}}   points  seconds  first mistake"]
    lines.append("─" * min(width, 110))
    for result in results:
        head = (
            f"{result.submission:{name_width}}  {result.score:3g}/{result.max_score:<3g} "
            f"{result.seconds:7.1f}  "
        )
        room, below = max(width, len(head) + 20), " " * len(head)
        line = textwrap.fill(result.reason, room, initial_indent=head, subsequent_indent=below)
        lines.append(line or head.rstrip())
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--on",
        choices=("cpu", "gpu"),
        default="",
        help="if a solution passes on the simulated network, run it again on real ranks: cpu "
        "(gloo) or gpu (default: no second run). With nbgrader autograde, use --Examine.on=cpu",
    )


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Run the demo for the command line; return the exit status."""
    results = demo(root, say=lambda line: print(line, flush=True), on=arguments.on)
    print(f"\n{table(results)}\n")
    print("The written question is graded by hand, in formgrader; it has 3 points. Start it with")
    print("  make formgrader GRADING=grading/demo")
    print(f"Feedback as the students would read it: {root / 'grading/demo/feedback'}")
    return 0
