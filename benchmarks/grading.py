"""Submissions per minute, beside stock nbgrader with `mp.spawn` in its test cells.

    python benchmarks/grading.py [--rounds 2] [--class-size 12] [--stock-size 2] [--write]

Both grade the same solutions of the same assignment with the same cases and oracles. Stock nbgrader
gets those only that it can grade: one that never ends would cost it minutes, and its points.
"""

from __future__ import annotations

import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nbformat
from machine import BusyElsewhere, arguments, publish, sentence
from nbgrader.utils import is_grade, is_solution

from autograder.commands.demo import ASSIGNMENT, replace_tasks
from autograder.examination.verdict import Verdict
from autograder.passes.examine import masked_from
from autograder.sandbox.place import SandboxedPlace
from course_lib.checking.local import load_module
from course_lib.checking.mutants import mutants_of
from course_lib.ranks.processes.fork_client import ForkServer

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "instructor" / ASSIGNMENT
FILE = f"{ASSIGNMENT}.ipynb"
TARGET, SANDBOX, BOOKING = 5.0, 0.15, 0.5
WRONG = ("sum", "gathers_on_one_rank")
STARTS = 40


def run(root: Path, *command: str) -> float:
    """Run a command in a course folder; return its seconds."""
    start = time.monotonic()
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.monotonic() - start


def nbgrader(root: Path, *words: str) -> float:
    """Run nbgrader's own program."""
    return run(root, str(Path(sysconfig.get_path("scripts"), "nbgrader")), *words)


def solutions(released: Path, count: int) -> list[Any]:
    """Return what is handed in: right, and every third time with a wrong mean of gradients."""
    mutants = {m.mistake: m for m in mutants_of(load_module(SOURCE / "mutants.py"))}
    untouched, solved = (nbformat.read(path / FILE, as_version=4) for path in (released, SOURCE))
    wrong = [mutants[name] for name in WRONG if name in mutants]
    return [
        replace_tasks(untouched, solved, [wrong[n // 3 % len(wrong)]] if n % 3 == 2 else [])
        for n in range(count)
    ]


def make_course(root: Path, stock: bool, count: int) -> None:
    """Make a course folder with `count` submissions."""
    source = root / "instructor" / ASSIGNMENT
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
    config = (ROOT / "nbgrader_config.py").read_text()
    if stock:
        before, _, _ = config.partition("# Before anything of a submission is copied")
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


def fresh(root: Path) -> None:
    """Forget what was graded; the gradebook stays."""
    for name in ("graded", "verdicts", "autograded"):
        shutil.rmtree(root / "grading" / name, ignore_errors=True)


def graded(root: Path) -> list[Verdict]:
    """Return the verdicts of the class."""
    return [Verdict.read(path) for path in (root / "grading/verdicts").glob("*/*/*.json")]


def booking(root: Path) -> float:
    """Return the seconds that booking a class takes that is graded, its start included."""
    for mark in (root / "grading/graded").glob("*/*/booked"):
        mark.unlink()
    return run(root, sys.executable, "-m", "autograder", "grade", ASSIGNMENT)


def starts(fork: Callable[[Sequence[int]], Callable[[], None]]) -> float:
    """Return the median seconds from the request for a process to its first word."""
    took = []
    for _ in range(STARTS):
        pairs = [socket.socketpair() for _ in range(2)]
        start = time.monotonic()
        end = fork([theirs.fileno() for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()
        pairs[0][0].recv(64)
        took.append(time.monotonic() - start)
        end()
        for ours, _ in pairs:
            ours.close()
    return statistics.median(took)


def process_seconds() -> tuple[float, float]:
    """Return the seconds until a cell stands, and until a bare fork of such a server does."""
    run_, config = "autograder.inside.examinee:serve_rank", {"rank": 0, "world_size": 1}
    with SandboxedPlace(masked_from(load_module(SOURCE / "hidden.py").MASKED)) as place:
        place.warm()

        def in_cell(fds: Sequence[int]) -> Callable[[], None]:
            return place.cell(run_, config, fds).close

        in_cells = starts(in_cell)
    server = ForkServer()

    def bare(fds: Sequence[int]) -> Callable[[], None]:
        pid = server.fork(run_, config, fds)
        return lambda: server.kill([pid])

    try:
        bare_fork = starts(bare)
    finally:
        server.close()
    return in_cells, bare_fork


def cells_of_a_submission() -> int:
    """Return how many processes run code of one submission: its notebook, and each case's ranks."""
    checks = load_module(SOURCE / "checks.py").CHECKS
    hidden = load_module(SOURCE / "hidden.py").HIDDEN
    cases = [c for name, check in checks.items() for c in (*check.cases, *hidden.get(name, ()))]
    return 1 + sum(case.world_size for case in cases)


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = arguments(__doc__, rounds=2)
    parser.add_argument("--class-size", type=int, default=12)
    parser.add_argument("--stock-size", type=int, default=2, help="of them, graded by nbgrader")
    options = parser.parse_args()
    count = options.class_size
    ours: list[float] = []
    stock: list[float] = []
    booked: list[float] = []
    again: list[float] = []
    busy = BusyElsewhere()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        folder.chmod(0o755)
        make_course(folder / "ours", False, count)
        make_course(folder / "stock", True, options.stock_size)
        for _ in range(options.rounds):
            took = nbgrader(folder / "stock", "autograde", ASSIGNMENT, "--force")
            stock.append(took / options.stock_size)
            fresh(folder / "ours")
            command = (sys.executable, "-m", "autograder", "grade", ASSIGNMENT)
            ours.append(run(folder / "ours", *command) / count)
            again.append(run(folder / "ours", *command))
            booked.append((booking(folder / "ours") - again[-1]) / count)
        verdicts = graded(folder / "ours")
        seconds = statistics.median(verdict.seconds for verdict in verdicts)
        cell, bare = process_seconds()
        others = f"Others used {100 * busy.share():.0f} % of the machine meanwhile."
    cells, size = cells_of_a_submission(), options.stock_size
    ratios = [theirs / mine for theirs, mine in zip(stock, ours, strict=True)]
    share = cells * max(0.0, cell - bare) / seconds
    mine, theirs = statistics.median(ours), statistics.median(stock)
    markdown = f"""# Grading a class, beside stock nbgrader

{sentence("python benchmarks/grading.py --write")} {others}

| | submissions per minute | seconds each |
|---|---|---|
| `autograder grade`, one per core, booking included | {60 / mine:.1f} | {mine:.2f} |
| stock nbgrader, `mp.spawn` in each test cell | {60 / theirs:.2f} | {theirs:.1f} |

Ratio: **{statistics.median(ratios):.1f}** (target at least {TARGET:g}). A class of {count};
stock nbgrader graded {size} of them in a round. Assignment {ASSIGNMENT}.

Booking: {statistics.median(booked):.2f} s each (target at most {BOOKING:g}).

Sandbox: a cell stands after {1000 * cell:.0f} ms, a bare fork of the same kind of server after
{1000 * bare:.0f} ms. A submission has {cells} cells and takes {seconds:.2f} s in its worker:
*derived*, as if cells started one after the other, the sandbox costs **{100 * share:.0f} %** of it
(target at most {100 * SANDBOX:g} %).
"""
    series = {
        "a submission, autograder grade (s)": ours,
        "a submission, stock nbgrader with mp.spawn (s)": stock,
        "stock nbgrader / autograder grade (ratio)": ratios,
        "booking of a submission (s)": booked,
        "a cell of the sandbox stands (ms)": [1000 * cell],
        "a bare fork stands (ms)": [1000 * bare],
        "sandbox, share of a submission (ratio)": [share],
    }
    publish("grading", markdown, series, options.write)


if __name__ == "__main__":
    main()
