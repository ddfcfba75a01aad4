"""Submissions to one assignment: right, wrong, deadlocked, hostile, damaged, late, empty."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
import psutil
from nbgrader.api import Gradebook
from nbgrader.apps.api import NbGraderAPI

from autograder.commands.demo import ASSIGNMENT, replace_tasks
from autograder.course import handed_out, load_config
from course_lib.checking.loading import load_module
from course_lib.checking.mutants import mutants_of
from tests.helpers.course_folders import ROOT, SOURCES, copy_assignment

FILE = f"{ASSIGNMENT}.ipynb"
# The points of each task. The class's copy of the assignment has no others.
TASKS = {"shard_bounds": 2.0, "average_gradients": 3.0}
DUE = "2030-01-15 12:00:00"
OBSERVED = "observed.json"
CONFIG = """
c.LateSubmissionPlugin.penalty_method = "zero"
"""
LESS = """
from dataclasses import replace
def one_of(hidden):
    return lambda secret: hidden(secret)[:1]
def less(check):
    several = [case for case in check.cases if case.world_size > 1] or list(check.cases)
    return replace(check, cases=tuple(several[:1]), hidden=one_of(check.hidden))
CHECKS = {name: less(CHECKS[name]) for name in TASKS}
"""


@dataclass(frozen=True)
class Member:
    """One of the class.

    Attributes:
        files: name → content of the files that they submitted.
        full: the tasks that earn all of their points; the others earn less.
        graded: whether there is anything to grade.

    """

    files: dict[str, str]
    full: frozenset[str] = frozenset(TASKS)
    graded: bool = True


def once(tmp_path_factory, name, build):
    """Return a folder that `build` has filled: once for all parallel workers."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, mark = shared / name, shared / f"{name}.done"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not mark.exists():
            shutil.rmtree(folder, ignore_errors=True)  # what a worker left that failed
            folder.mkdir()
            build(folder)
            mark.touch()
    return folder


def leave_little(source: Path, tasks) -> None:
    """Leave these tasks in an assignment's folder, with a visible and a hidden case each."""
    checks = handed_out(source) / "checks.py"
    checks.write_text(f"{checks.read_text()}\nTASKS = {list(tasks)}\n{LESS}")
    notebook = nbformat.read(source / FILE, as_version=4)
    parts = [[]]  # each begins with the heading of a task
    for cell in notebook.cells:
        if cell.source.startswith("## Task"):
            parts.append([])
        parts[-1].append(cell)
    left_out = (find_grades(part) - set(tasks) for part in parts)
    chosen = [part for part, out in zip(parts, left_out, strict=True) if not out]
    notebook.cells = [cell for part in chosen for cell in part]
    nbformat.write(notebook, source / FILE)


def find_grades(cells) -> set[str]:
    """Return the names of the cells that a program grades."""
    roles = [cell.metadata.get("nbgrader", {}) for cell in cells if cell.cell_type == "code"]
    return {role["grade_id"] for role in roles if role.get("grade")}


def course_of(root: Path) -> Path:
    """Make a course folder in which two tasks of the assignment are released, with few cases."""
    source = copy_assignment(ASSIGNMENT, root)
    config = (ROOT / "nbgrader_config.py").read_text()
    (root / "nbgrader_config.py").write_text(config + CONFIG)
    leave_little(source, TASKS)
    config = load_config(root)
    assert NbGraderAPI(config=config).generate_assignment(ASSIGNMENT)["success"]
    shutil.copy(root / "grading/release" / ASSIGNMENT / FILE, handed_out(source))
    with Gradebook(config.CourseDirectory.db_url, config.CourseDirectory.course_id) as gradebook:
        gradebook.update_or_create_assignment(ASSIGNMENT, duedate=DUE)
    return root


def notebook_of(root: Path, *mutants: tuple[str, str]):
    """Return the released notebook with the right solutions in it, but for the mutants."""
    source = root / SOURCES.name / ASSIGNMENT
    solutions = {(m.task, m.mistake): m for m in mutants_of(load_module(source / "mutants.py"))}
    return replace_tasks(
        nbformat.read(root / "grading/release" / ASSIGNMENT / FILE, as_version=4),
        nbformat.read(source / FILE, as_version=4),
        [solutions[name] for name in mutants],
    )


def small_class(root: Path) -> dict[str, Member]:
    """Return ten: of each kind one."""
    right = notebook_of(root)
    text = nbformat.writes(right)
    hostile = nbformat.reads(text, as_version=4)
    hostile.cells.insert(1, nbformat.v4.new_code_cell("import os, signal\nos.kill(-1, 9)"))
    damaged = text.replace('"nbformat": 4', f'"n": {"9" * 9000}, "nbformat": 4')
    released = (root / "grading/release" / ASSIGNMENT / FILE).read_text()

    def mutant(task: str, mistake: str) -> Member:
        notebook = notebook_of(root, (task, mistake))
        return Member({FILE: nbformat.writes(notebook)}, frozenset(TASKS) - {task})

    return {
        "right": Member({FILE: text}),
        "sum": mutant("average_gradients", "sum"),
        "deadlock": mutant("average_gradients", "deadlock"),
        "crash": mutant("average_gradients", "exit"),
        "hostile": Member({FILE: nbformat.writes(hostile)}),
        "damaged": Member({FILE: damaged}),
        "late": Member({FILE: text, "timestamp.txt": "2030-01-17 12:00:00 UTC"}),
        "empty-file": Member({FILE: ""}, frozenset()),
        "nothing": Member({"notes.txt": ""}, graded=False),
        "untouched": Member({FILE: released}, frozenset()),
    }


def hand_in(root: Path, members: dict[str, Member]) -> None:
    """Put their submissions where nbgrader collects them."""
    for name, member in members.items():
        folder = root / "grading/submitted" / name / ASSIGNMENT
        folder.mkdir(parents=True)
        for file, text in member.files.items():
            (folder / file).write_text(text)


def booked(root: Path) -> dict[str, dict[str, float]]:
    """Return what the gradebook has: student → task → points, and ``penalty``."""
    config = load_config(root)
    gradebook_points = {}
    with Gradebook(config.CourseDirectory.db_url, config.CourseDirectory.course_id) as gradebook:
        for submission in gradebook.assignment_submissions(ASSIGNMENT):
            grades = [grade for notebook in submission.notebooks for grade in notebook.grades]
            points = {g.cell.name: g.auto_score for g in grades if g.cell.name in TASKS}
            gradebook_points[submission.student.id] = {
                **points,
                "penalty": sum(n.late_submission_penalty or 0 for n in submission.notebooks),
            }
    return gradebook_points


@dataclass
class Course:
    """A course folder with a class, and observations while it was graded."""

    root: Path
    members: dict[str, Member]
    output: str = ""
    status: int = 0
    before: dict[str, int] = field(default_factory=dict)

    @classmethod
    def observed(cls, root: Path) -> Course:
        """Return what `graded_with_failures` left in this folder, or in the one it copies."""
        return cls(root, small_class(root), **json.loads((root / OBSERVED).read_text()))

    @property
    def graded(self) -> Path:
        return self.root / "grading" / "graded" / ASSIGNMENT

    def verdicts(self) -> dict[str, list[Path]]:
        paths_by_student = {
            name: sorted((self.graded / name).glob("*.json")) for name in self.members
        }
        return {name: paths for name, paths in paths_by_student.items() if paths}

    def times(self) -> dict[str, int]:
        return {name: paths[0].stat().st_mtime_ns for name, paths in self.verdicts().items()}


def graded_with_failures(root: Path) -> None:
    """Grade the ten of `small_class`, and leave in OBSERVED what was seen on the way.

    Four are graded when the command is killed before it books them; then another one goes on.
    """
    course = Course(root, small_class(root))
    first = ("right", "sum", "deadlock", "late")
    hand_in(root, {name: course.members[name] for name in first})
    grade = [sys.executable, "-m", "autograder", "grade", ASSIGNMENT, "--jobs", "1"]
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    options |= {"args": [*grade, "--course", str(root)], "text": True}
    process = psutil.Popen(**options)
    while len(course.verdicts()) < len(first):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    below = process.children(recursive=True)
    process.kill()  # as when power is lost
    process.communicate()
    assert not psutil.wait_procs(below, timeout=300)[1], "processes outlived the command"
    before = course.times()
    assert not booked(root)
    hand_in(root, {n: member for n, member in course.members.items() if n not in first})
    second = subprocess.run(**options)
    observed = {"output": second.stdout, "status": second.returncode, "before": before}
    (root / OBSERVED).write_text(json.dumps(observed))


def unexpected(members: dict[str, Member], booked_points: dict[str, dict[str, float]]) -> list[str]:
    """Return one line for each deviation from the expected state."""
    deviations = []
    for name, member in members.items():
        if not member.graded:
            deviations += [f"{name} is booked"] * (name in booked_points)
            continue
        points = booked_points.get(name, {})
        for task, worth in TASKS.items():
            if (points.get(task) == worth) != (task in member.full):
                deviations.append(f"{name}: {task} has {points.get(task)} of {worth}")
    return deviations
