"""Release an assignment, grade six submissions with different mistakes, and write their feedback.

At the end, print a table. Changes only grading/demo.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from dataclasses import replace
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbgrader.apps.api import NbGraderAPI

from autograder.commands import must
from autograder.commands.feedback import feedback
from autograder.course import Settings, find_sources, load_config
from autograder.errors import CommandFailed
from autograder.examination.verdict import Verdict, verdict_path
from autograder.passes.examine import Exam
from autograder.passes.self_test import solved
from course_lib.checking.loading import load_module
from course_lib.checking.mutants import Solution, mutants_of
from course_lib.learner.what_counts import is_answer

ASSIGNMENT = "02_data_parallel_sgd"
_ANSWERS = (
    "5/16, 1/16, 2/16 and 8/16. No: each rank normalises with the mean and the variance of "
    "its own rows, so the loss of a row depends on the rows beside it.",
    "Each rank has the weight 1/4, because there are four ranks. With BatchNorm it is not so, "
    "because the running statistics differ.",
)
"""Answers to the written question, for a person to read."""


def demo(root: Path, on: str = "") -> list[Verdict]:
    """Run the demo in the course folder `root`; print what is done, and return the verdicts.

    Args:
        root: the course folder.
        on: ``cpu`` or ``gpu``: run the right solutions once more on such real ranks.

    Raises:
        SandboxUnavailable: there is no sandbox that has everything that grading needs.
        CommandFailed: there are no sources of the assignments, or a step failed.

    """
    source = find_sources(root) / ASSIGNMENT
    Exam.of(source).sandbox(replace(Settings.of(load_config(root)), on=on))
    folder = root / "grading" / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = load_config(root, data=folder)
    config.Examine.on = on
    api = NbGraderAPI(config=config)
    print(f"releasing {ASSIGNMENT} …", flush=True)
    must(api.generate_assignment(ASSIGNMENT), "releasing the assignment")

    submissions = make_submissions(source, folder / "release" / ASSIGNMENT)
    verdicts = []
    for number, (name, notebook) in enumerate(submissions.items(), 1):
        handed_in = folder / "submitted" / name / ASSIGNMENT
        handed_in.mkdir(parents=True)
        nbformat.write(notebook, handed_in / f"{ASSIGNMENT}.ipynb")
        print(f"grading {number} of {len(submissions)}: {name} …", flush=True)
        must(api.autograde(ASSIGNMENT, name), f"grading {name}")
        verdicts.append(Verdict.read(verdict_path(folder, ASSIGNMENT, name, ASSIGNMENT)))
    print("writing feedback …", flush=True)
    for name, reason in feedback(config, ASSIGNMENT).items():
        raise CommandFailed(f"no page could be written for {name}: {reason}")
    return verdicts


def make_submissions(source: Path, released: Path) -> dict[str, NotebookNode]:
    """Return the six submissions, by name.

    They are made from the assignment's own solution, from ``mutants.py`` and from the released
    notebook. So the demo shows what the course really does with them.
    """
    mutants = {(m.task, m.mistake): m for m in mutants_of(load_module(source / "mutants.py"))}
    solution = nbformat.read(source / f"{ASSIGNMENT}.ipynb", as_version=4)
    untouched = nbformat.read(released / f"{ASSIGNMENT}.ipynb", as_version=4)

    def with_mutants(*names: tuple[str, str], answer: str = "") -> NotebookNode:
        notebook = replace_tasks(untouched, solution, [mutants[name] for name in names])
        for cell in filter(is_answer, notebook.cells):
            cell.source = answer or cell.source
        return notebook

    return {
        "right": with_mutants(answer=_ANSWERS[0]),
        "right-differently": with_mutants(
            ("shard_bounds", "empty_ones_at_0"),
            ("average_gradients", "flat"),
            ("data_parallel_step", "averages_weights_by_rows"),
        ),
        "wrong-average": with_mutants(("average_gradients", "sum"), answer=_ANSWERS[1]),
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


def table(verdicts: list[Verdict]) -> str:
    """Return the points of each verdict; below them, why the first of them were lost."""
    lines = []
    for verdict in verdicts:
        points = f"{verdict.score:3g}/{verdict.max_score:<3g}{verdict.seconds:7.1f} s"
        lines.append(f"{verdict.student:20}{points}")
        lines += textwrap.wrap(f"    {verdict.reason}", 96, subsequent_indent="    ")
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
    print(f"\n{table(demo(root, arguments.on))}\n")
    print("Two have answered the written question, which has 3 points. Read them in formgrader:")
    print("  make formgrader GRADING=grading/demo")
    print(f"Feedback as the students would read it: {root / 'grading/demo/feedback'}")
    return 0
