"""``course check 03_collectives``: run all cells and checks of a copy in a new process.

The result of a notebook depends on which cells were run, and in which order. This command runs
every cell that counts once, from top to bottom, as the grader does: `what_counts` is the rule of
both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from course_lib.installed import find_course
from course_lib.learner import CannotGoOn, _course, did_you_mean
from course_lib.learner._course import Task
from course_lib.learner.start import add_desk, desk_of, desk_option
from course_lib.learner.what_counts import grade_id, is_check, is_run, rebuild, role
from course_lib.limits import (
    CELL_SECONDS,
    CELLS_SECONDS,
    INTERRUPT_SECONDS,
    OTHERS,
    SOLUTIONS,
    clock_of,
)

DESCRIPTION = (
    "Run the cells and the checks of your copy of an assignment from the top, in a new process. "
    "Print the reports and count the points. Exit status: 0 if all checks pass, else 1."
)
Step = dict[str, Any]
LOOK_EVERY = 1.0
"""Seconds between two looks at the process."""
GRACE_SECONDS = 10
"""The time that a process has to end itself and its ranks."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "assignment",
        metavar="ASSIGNMENT",
        help="the assignment's name, number or topic; or the path of a notebook",
    )
    parser.add_argument(  # without a default, argparse would say that TASK is required
        "tasks", nargs="*", default=[], metavar="TASK", help="only these tasks (default: all)"
    )
    add_desk(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check the copy; return the exit status."""
    course = find_course()
    name = _course.find(course, arguments.assignment)
    given = Path(arguments.assignment)
    here = given.suffix == ".ipynb" and given.is_file()
    notebook = given if here else _course.notebook_of(desk_of(arguments, course), name)
    if not notebook.is_file():
        make = f"course start {name}{desk_option(arguments)}"
        raise CannotGoOn(f"you have no copy of {name} yet. Make one: {make}")
    tasks = _course.tasks(course, name)
    chosen = _chosen(tasks, arguments.tasks)
    status, outcomes, notes = check_notebook(course, name, notebook, chosen)
    if status:
        return status
    print(summary(name, tasks, outcomes))
    for note in notes:
        print(f"  Note: {note}.")
    decided = [outcome for outcome in outcomes.values() if not outcome.get("undecided")]
    return int(any(outcome["fraction"] < 1 for outcome in decided))


def check_notebook(
    course: Path, name: str, notebook: Path, chosen: list[Task]
) -> tuple[int, dict[str, Any], list[str]]:
    """Return the exit status of the run, the outcome of each check, and notes on the notebook.

    Raises:
        CannotGoOn: the file is not a notebook.

    """
    released = _course.read(_course.notebook_of(course, name))
    rebuilt = rebuild(released, _course.read(notebook))
    status, outcomes, late = run_steps(plan(rebuilt, chosen), notebook.resolve().parent)
    return status, outcomes, [*rebuilt.metadata.get("rebuild", ()), *late]


def _chosen(tasks: list[Task], said: list[str]) -> list[Task]:
    checked = [task for task in tasks if task.checked]
    wrong = set(said) - {task.name for task in checked}
    if wrong:
        names = [task.name for task in checked]
        message = f"no check belongs to {', '.join(sorted(wrong))}.{did_you_mean(*wrong, of=names)}"
        raise CannotGoOn(f"{message} The tasks with a check are: {', '.join(names)}")
    return [task for task in checked if not said or task.name in said]


def plan(rebuilt: NotebookNode, chosen: list[Task]) -> list[Step]:
    """Return the steps: the cells that are run, and each chosen check at its place."""
    names = {task.name for task in chosen}
    steps: list[Step] = []
    for number, cell in enumerate((c for c in rebuilt.cells if c.cell_type == "code"), 1):
        step: Step = {"source": cell.source, "number": number}
        if is_check(cell) and grade_id(cell) in names:
            steps.append({**step, "check": grade_id(cell)})
        elif is_run(cell):
            kind = SOLUTIONS if role(cell).get("solution") else OTHERS
            steps.append({**step, "kind": kind})
    return steps


def run_steps(steps: list[Step], folder: Path) -> tuple[int, dict[str, Any], list[str]]:
    """Run the steps in a new process; return its exit status, each check's outcome, and notes.

    A cell that lasts longer than its limit is interrupted. If it does not end, its process is
    ended, and a new one runs the other cells and the checks that are left.
    """
    outcomes: dict[str, Any] = {}
    left, notes = {SOLUTIONS: CELLS_SECONDS, OTHERS: CELLS_SECONDS}, list[str]()
    while True:
        # IPython's folder, in place of the user's settings. The process may be killed, so it is
        # this one that removes the folder.
        with tempfile.TemporaryDirectory(prefix="course-check-") as home:
            status, stuck = _run_once(steps, folder, home, left, outcomes, notes)
        if stuck is None:
            return status, outcomes, notes
        notes.append(f"cell {stuck} could not be interrupted, so it was left out")
        steps = [s for s in steps if s["number"] != stuck and s.get("check") not in outcomes]


def _run_once(
    steps: list[Step],
    folder: Path,
    home: str,
    left: dict[str, float],
    outcomes: dict[str, Any],
    notes: list[str],
) -> tuple[int, int | None]:
    """Run the steps until the last one, or until a cell cannot be interrupted.

    Return the exit status of their process and the number of that cell, or None. The process has
    its own session, so that this process decides how an interrupt at the terminal reaches it. It
    ends when this process ends, for any reason.
    """
    read, write = os.pipe()
    process = subprocess.Popen(
        # -P: as in the grader, no file beside the notebook can be imported.
        [sys.executable, "-P", "-m", "course_lib.learner._notebook_process"],
        stdin=subprocess.PIPE,
        pass_fds=[write],
        env={**os.environ, "MPLBACKEND": "agg", "IPYTHONDIR": home},
        start_new_session=True,
        text=True,
    )
    os.close(write)
    assert process.stdin is not None
    plan = {"steps": steps, "folder": str(folder), "results": write, "left": left}
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{json.dumps(plan)}\n")
            process.stdin.flush()
        for result in _watched(process, read):
            if "check" in result:
                outcomes[result["check"]] = result
                continue
            left[result["kind"]] -= result["seconds"]
            if result.get("is_stuck"):
                return 0, result["cell"]
            note = _late(result) if result["is_late"] else result.get("failed", "")
            notes += [note] if note and note not in notes else []  # a second process repeats it
        try:
            status = process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:  # a thread that a cell has started goes on
            status = 0
    except BaseException:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):  # with what a cell has started and left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    if status:
        end = f"with status {status}" if status > 0 else f"by signal {-status}"
        print(
            f"course check: the process that ran your cells ended {end}. Does a cell call exit, or "
            "did memory run out? `course doctor` examines this machine.",
            file=sys.stderr,
        )
        status = 2
    return status, None


def _watched(process: subprocess.Popen[str], read: int) -> Iterator[dict[str, Any]]:
    """Yield what the process tells of each step, and interrupt a cell at its time limit.

    If the cell does not end then, it is ``is_stuck`` in the last item.
    """
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def pass_on() -> None:
        with open(read) as results:
            for line in results:
                lines.put(line)
        lines.put("")

    threading.Thread(target=pass_on, daemon=True).start()
    cell, end, is_interrupted = dict[str, Any](), math.inf, False
    while True:
        rest = max(0.0, end - clock_of(process.pid))
        try:
            line = lines.get(timeout=min(rest, LOOK_EVERY))
        except queue.Empty:
            if process.poll() is not None:  # and what it has started keeps the pipe open
                return
            if clock_of(process.pid) < end:  # a process that waits for a core has more time
                continue
            if is_interrupted:
                yield {**cell, "is_stuck": True}
                return
            process.send_signal(signal.SIGINT)
            end, is_interrupted = clock_of(process.pid) + INTERRUPT_SECONDS, True
            continue
        if not line:
            return
        result = json.loads(line)
        if "check" in result or "is_late" in result:
            end = math.inf
            yield result
        else:
            cell, end, is_interrupted = result, clock_of(process.pid) + result["seconds"], False


def _late(result: dict[str, Any]) -> str:
    """Return the note on a cell that has used up its time, or the time of its kind of cells."""
    what = f"interrupted after {result['seconds']:.0f} s" if result["seconds"] else "not run"
    advice = "" if result["kind"] == SOLUTIONS else "; a cell with the tag explore is not run"
    return (
        f"cell {result['cell']} was {what}: as in the grader, a cell has {CELL_SECONDS:g} s, and "
        f"all {result['kind']} together have {CELLS_SECONDS:g} s{advice}"
    )


def summary(name: str, tasks: list[Task], outcomes: dict[str, Any]) -> str:
    """Return the points as a table."""
    width = max(len(task.name) for task in tasks)
    lines, earned, most = [name], 0.0, 0.0
    for task in tasks:
        outcome = outcomes.get(task.name)
        if outcome is not None and (undecided := outcome.get("undecided")):
            lines.append(f"  {task.name:{width}}     – of {task.points:<3g} {undecided}")
        elif outcome is not None:
            points = task.points * outcome["fraction"]
            earned, most = earned + points, most + task.points
            lines.append(f"  {task.name:{width}}  {points:4g} of {task.points:<3g} {_cut(outcome)}")
        elif not task.checked:
            lines.append(
                f"  {task.name:{width}}     – of {task.points:<3g} a person reads this answer"
            )
    lines.append(f"  {'from checks':{width}}  {earned:4g} of {most:<3g}")
    return "\n".join(line.rstrip() for line in lines)


def _cut(outcome: dict[str, Any]) -> str:
    reason = " ".join(outcome["reason"].split())
    return reason if len(reason) <= 90 else f"{reason[:89]}…"
