"""``autograder demo``: a class of six, from release to feedback, in about a minute.

The six submissions are made from the assignment's own solution, from ``mutants.py`` and from the
released notebook, so that the demo shows what the course really does with them. It keeps to
``grading/demo/``: a real class beside it is not touched.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbgrader.apps.api import NbGraderAPI
from nbgrader.utils import is_grade, is_solution

from autograder.course import find_sources, load_config
from autograder.examination.gpus import gpu_mounts
from autograder.examination.verdict import Verdict, verdict_path
from autograder.passes.examine import sandbox_of
from autograder.passes.settings import Settings
from autograder.sandbox.unavailable import SandboxUnavailable
from course_lib.checking.local import load_module
from course_lib.checking.mutants import Mutant, mutants_of

ASSIGNMENT = "02_data_parallel_sgd"
DESCRIPTION = (
    "Release an assignment, grade six submissions that differ in what is wrong with them, write "
    "their feedback, and print a table. Touches only grading/demo and grading/demo.json."
)


@dataclass(frozen=True)
class Result:
    """One line of the demo's table."""

    submission: str
    score: float
    max_score: float
    seconds: float
    reason: str


class DemoError(RuntimeError):
    """A step of the demo failed."""


def demo(root: Path, say: Callable[[str], None] = print, on: str = "") -> list[Result]:
    """Run the demo in the course folder `root`; return the table's rows.

    Args:
        root: the course folder.
        say: is told what happens.
        on: the real ranks, ``cpu`` or ``gpu``, on which what is right is run once more.

    Raises:
        SourcesMissing: this copy of the course lacks the sources of the assignments.
        SandboxUnavailable: nothing is graded without a sandbox that has all it needs.
        DemoError: a step failed.

    """
    source = find_sources(root) / ASSIGNMENT
    if on == "gpu":
        gpu_mounts()
    sandbox_of(source, replace(Settings.of(load_config(root)), on=on))
    folder = root / "grading" / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = load_config(root, data=folder)
    config.Examine.on = on
    api = NbGraderAPI(config=config)
    say(f"releasing {ASSIGNMENT} …")
    _must(api.generate_assignment(ASSIGNMENT), "releasing the assignment")

    released = folder / "release" / ASSIGNMENT
    submissions = make_submissions(source, released)
    results = []
    for number, (name, notebook) in enumerate(submissions.items(), 1):
        handed_in = folder / "submitted" / name / ASSIGNMENT
        handed_in.mkdir(parents=True)
        nbformat.write(notebook, handed_in / f"{ASSIGNMENT}.ipynb")
        say(f"grading {number} of {len(submissions)}: {name} …")
        start = time.monotonic()
        _must(api.autograde(ASSIGNMENT, name), f"grading {name}")
        seconds = time.monotonic() - start
        verdict = Verdict.read(verdict_path(folder, ASSIGNMENT, name, ASSIGNMENT))
        booked = api.get_submission(ASSIGNMENT, name)["code_score"]
        if booked != verdict.score:
            raise DemoError(f"{name}: the verdict says {verdict.score}, the gradebook {booked}")
        results.append(
            Result(name, verdict.score, verdict.max_score, round(seconds, 1), verdict.reason)
        )
    say("writing feedback …")
    _must(api.generate_feedback(ASSIGNMENT), "writing feedback")
    rows = json.dumps([asdict(result) for result in results], indent=1, ensure_ascii=False)
    (root / "grading" / "demo.json").write_text(rows + "\n")
    return results


def make_submissions(source: Path, released: Path) -> dict[str, NotebookNode]:
    """Return what the six hand in, by name."""
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
            ("data_parallel_step", "sums_then_divides"),
        ),
        "wrong-average": with_mutants(("average_gradients", "sum")),
        "deadlock": with_mutants(("average_gradients", "deadlock")),
        "crash": with_mutants(("average_gradients", "exit")),
        "untouched": untouched,
    }


def replace_tasks(
    released: NotebookNode, solution: NotebookNode, mutants: list[Mutant]
) -> NotebookNode:
    """Return the released notebook with the solution's code in it, or a mutant's where given."""
    sources = {
        cell.metadata.nbgrader.grade_id: re.sub(r" *### (BEGIN|END) SOLUTION\n?", "", cell.source)
        for cell in solution.cells
        if is_solution(cell)
    }
    sources |= {f"write_{mutant.task}": mutant.source for mutant in mutants}
    notebook: NotebookNode = nbformat.from_dict(json.loads(nbformat.writes(released)))
    for cell in notebook.cells:
        if is_solution(cell) and not is_grade(cell):
            cell.source = sources[cell.metadata.nbgrader.grade_id]
    return notebook


def _must(outcome: dict[str, object], what: str) -> None:
    if not outcome["success"]:
        raise DemoError(
            f"{what} failed: {outcome.get('error') or ''}\n{outcome.get('log') or ''}".rstrip()
        )


def table(results: list[Result], width: int | None = None) -> str:
    """Return the rows as a table that fits the terminal."""
    width = width or shutil.get_terminal_size((110, 24)).columns
    name_width = max(len(result.submission) for result in results)
    lines = [f"{'submission':{name_width}}   points  seconds  first thing that is wrong"]
    lines.append("─" * min(width, 110))
    for result in results:
        head = (
            f"{result.submission:{name_width}}  {result.score:3g}/{result.max_score:<3g} "
            f"{result.seconds:7.1f}  "
        )
        room = max(20, width - len(head))
        words = result.reason.split()
        line, rest = "", []
        for word in words:
            if len(line) + len(word) + 1 > room:
                rest.append(line)
                line = word
            else:
                line = f"{line} {word}".strip()
        rest.append(line)
        lines.append((head + rest[0]).rstrip())
        lines += [" " * len(head) + more for more in rest[1:]]
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--on",
        choices=("cpu", "gpu"),
        default="",
        help="run what is right on the grader's network once more on real ranks, on gloo or GPUs; "
        "nbgrader autograde takes it as --Examine.on=cpu (default: no real ranks)",
    )


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Run the demo for the command line; return the exit status."""
    # nbgrader's own: it lets SQLAlchemy flush objects that it has not added yet.
    warnings.filterwarnings("ignore", module="nbgrader.api")
    try:
        results = demo(root, say=lambda line: print(line, flush=True), on=arguments.on)
    except (DemoError, SandboxUnavailable) as error:
        print(f"autograder demo: {error}", file=sys.stderr)
        return 1
    print(f"\n{table(results)}\n")
    print("Task 4 waits for a person: 3 points, graded by hand in formgrader, with")
    print("  make formgrader GRADING=grading/demo")
    print(f"Feedback, as the students would read it: {root / 'grading/demo/feedback'}")
    return 0
