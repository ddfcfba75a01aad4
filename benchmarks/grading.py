"""Compare submissions per minute with stock nbgrader that uses `mp.spawn` in its test cells.

    python benchmarks/grading.py [--rounds 2] [--class-size 12] [--stock-size 2] [--write]

Both grade the same solutions of the same assignment with the same cases. Stock nbgrader
gets only solutions that it can grade. A solution that never ends would cost it minutes, and all of
the solution's points.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from machine import arguments, publish, sentence
from nbgrader.utils import is_grade, is_solution

from autograder.commands.demo import ASSIGNMENT, replace_tasks
from autograder.course import Folders, Settings, handed_out, load_config
from autograder.pool.book import book
from autograder.pool.class_list import standings
from course_lib.checking.loading import load_module
from course_lib.checking.mutants import mutants_of

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "instructor" / ASSIGNMENT
FILE = f"{ASSIGNMENT}.ipynb"
TARGET, BOOKING = 5.0, 0.5
WRONG = ("sum", "gathers_on_one_rank")


def run(root: Path, *command: str) -> float:
    """Run a command in a course folder; return its seconds."""
    start = time.monotonic()
    process = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(
            f"{' '.join(command)}:\n{process.stdout[-2000:]}{process.stderr[-2000:]}"
        )
    return time.monotonic() - start


def nbgrader(root: Path, *arguments: str) -> float:
    """Run nbgrader's own program."""
    return run(root, str(Path(sysconfig.get_path("scripts"), "nbgrader")), *arguments)


def solutions(released: Path, count: int) -> list[Any]:
    """Return the submissions: right ones, and every third with a wrong mean of gradients."""
    mutants = {m.mistake: m for m in mutants_of(load_module(SOURCE / "mutants.py"))}
    untouched, solved = (nbformat.read(path / FILE, as_version=4) for path in (released, SOURCE))
    mistakes = [mutants[name] for name in WRONG if name in mutants]
    return [
        replace_tasks(untouched, solved, [mistakes[n // 3 % len(mistakes)]] if n % 3 == 2 else [])
        for n in range(count)
    ]


def make_course(root: Path, stock: bool, count: int) -> None:
    """Make a course folder with `count` submissions."""
    source = root / "instructor" / ASSIGNMENT
    for folder in (SOURCE, handed_out(SOURCE)):
        to = root / folder.relative_to(ROOT)
        shutil.copytree(folder, to, ignore=shutil.ignore_patterns("__pycache__"))
    config = (ROOT / "nbgrader_config.py").read_text()
    if stock:
        before, mark, _ = config.partition("# Before a submission is copied")
        if not mark:
            raise RuntimeError("nbgrader_config.py has changed: find where its passes begin")
        config = f"{before}c.Execute.timeout = 3600\n"
        shutil.copy(Path(__file__).parent / "spawned_checks.py", source)
        notebook = nbformat.read(source / FILE, as_version=4)
        for cell in notebook.cells:
            if is_grade(cell) and not is_solution(cell) and cell.cell_type == "code":
                name = cell.metadata.nbgrader.grade_id
                call = f"passes({name!r}, {name}, {str(SOURCE)!r})"
                cell.source = f"from spawned_checks import passes\nassert {call}"
        nbformat.write(notebook, source / FILE)
    (root / "nbgrader_config.py").write_text(config)
    nbgrader(root, "generate_assignment", ASSIGNMENT)
    for number, handed_in in enumerate(solutions(root / "grading/release" / ASSIGNMENT, count)):
        folder = root / "grading/submitted" / f"student{number:03}" / ASSIGNMENT
        folder.mkdir(parents=True)
        nbformat.write(handed_in, folder / FILE)


def check_peer(root: Path) -> None:
    """Raise if the peer rejects right solutions, because then it did not do the same work."""
    path = root / "grading/autograded/student000" / ASSIGNMENT / FILE
    for cell in nbformat.read(path, as_version=4).cells:
        errors = [o for o in cell.get("outputs", ()) if o.output_type == "error"]
        if errors and is_grade(cell) and not is_solution(cell):
            raise RuntimeError(f"stock nbgrader: {errors[0].ename}: {errors[0].evalue}")


def fresh(root: Path) -> None:
    """Remove everything that was graded, but not the gradebook."""
    for name in ("graded", "verdicts", "autograded"):
        shutil.rmtree(root / "grading" / name, ignore_errors=True)


def booking(root: Path) -> list[float]:
    """Return the seconds that booking takes for each submission of a graded class."""
    config = load_config(root)
    folders = Folders.of(config.CourseDirectory)
    submissions = standings(config, ASSIGNMENT, Settings.of(config))
    ticks = [time.monotonic()]
    for student, problem in book(folders, config, ASSIGNMENT, submissions):
        if problem:
            raise RuntimeError(f"{student}: {problem}")
        ticks.append(time.monotonic())
    return [end - start for start, end in itertools.pairwise(ticks)]


def report(
    ours: list[float], stock: list[float], booked: list[float], options: argparse.Namespace
) -> None:
    """Print the table; with ``--write``, also write it."""
    ratios = [stock_seconds / seconds for stock_seconds, seconds in zip(stock, ours, strict=True)]
    seconds, stock_seconds = statistics.median(ours), statistics.median(stock)
    markdown = f"""# Grading a class, beside stock nbgrader

{sentence("python benchmarks/grading.py --write")}

| | submissions per minute | seconds each |
|---|---|---|
| `autograder grade`, one per core, booking included | {60 / seconds:.1f} | {seconds:.2f} |
| stock nbgrader, `mp.spawn` in each test cell | {60 / stock_seconds:.2f} | {stock_seconds:.1f} |

Ratio: **{statistics.median(ratios):.1f}** (target at least {TARGET:g}). The class had
{options.class_size} submissions; stock nbgrader graded {options.stock_size} of them in a round.
Assignment {ASSIGNMENT}.

Booking: {statistics.median(booked):.2f} s each (target at most {BOOKING:g}).
"""
    publish("grading", markdown, options.write)


def main() -> None:
    """Measure and print; with ``--write``, also write the results."""
    parser = arguments(__doc__, rounds=2)
    parser.add_argument("--class-size", type=int, default=12, help="number of submissions")
    parser.add_argument(
        "--stock-size", type=int, default=2, help="number of submissions for stock nbgrader"
    )
    options = parser.parse_args()
    count = options.class_size
    ours: list[float] = []
    stock: list[float] = []
    booked: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        folder.chmod(0o755)
        make_course(folder / "ours", False, count)
        make_course(folder / "stock", True, options.stock_size)
        for _ in range(options.rounds):
            took = nbgrader(folder / "stock", "autograde", ASSIGNMENT, "--force")
            check_peer(folder / "stock")
            stock.append(took / options.stock_size)
            fresh(folder / "ours")
            command = (sys.executable, "-m", "autograder", "grade", ASSIGNMENT)
            ours.append(run(folder / "ours", *command) / count)
            booked += booking(folder / "ours")
    report(ours, stock, booked, options)


if __name__ == "__main__":
    main()
