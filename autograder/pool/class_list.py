"""Find the state of a class: what is submitted, what is graded, and what is booked.

Each call reads the state from the files and the gradebook.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbgrader.api import MissingEntry

from autograder import gradebook
from autograder.course import Folders, Settings
from autograder.errors import CommandFailed
from autograder.examination.verdict import Verdict, points_of
from autograder.passes.examine import blank_verdict, rebuilt


@dataclass
class Standing:
    """The state of one student's submission of one assignment.

    Attributes:
        student: the student's id.
        notebooks: the submitted notebooks that were also released.
        graded: notebook → the verdict on exactly this code, by these checks.
        outdated: whether there are verdicts, but on different code or by different checks.
        failed: why the last attempt gave no verdict, or an empty string.
        booked: whether the gradebook has exactly these points, for exactly these files.
        points: whether the gradebook has any points of the student, perhaps older ones.
        by_hand: whether a person must still grade a part of it.

    """

    student: str
    notebooks: list[Path]
    graded: dict[str, Verdict] = field(default_factory=dict)
    outdated: bool = False
    failed: str = ""
    booked: bool = False
    points: bool = False
    by_hand: bool = False

    @property
    def complete(self) -> bool:
        """Whether all submitted notebooks are graded."""
        return bool(self.notebooks) and len(self.graded) == len(self.notebooks)


def assignments(folders: Folders) -> list[str]:
    """Return the assignments that somebody has submitted, or that were released."""
    names = {path.name for path in folders.submitted.glob("*/*") if path.is_dir()}
    names |= {path.parent.name for path in folders.release.glob("*/*.ipynb")}
    return sorted(names)


def students(folders: Folders, assignment: str, only: Iterable[str] = ()) -> list[str]:
    """Return the students who submitted something, in order.

    Raises:
        CommandFailed: nobody submitted anything, or one of `only` did not.

    """
    submitters = folders.submitters(assignment)
    if not submitters:
        names = ", ".join(assignments(folders)) or "none"
        raise CommandFailed(
            f"{folders.submitted} has no submission of {assignment}. Assignments there: {names}. "
            "Put submissions there with nbgrader collect or autograder collect."
        )
    if absent := sorted(set(only) - set(submitters)):
        raise CommandFailed(
            f"{absent[0]} submitted nothing: there is no {folders.submitted / absent[0]}"
        )
    return [student for student in submitters if student in only or not only]


def handed_in(folders: Folders, assignment: str, student: str) -> list[Path]:
    """Return the submitted notebooks that were also released.

    Raises:
        CommandFailed: the assignment was not released.

    """
    names = folders.notebooks(assignment)
    if not names:
        raise CommandFailed(
            f"{assignment} was not released: run nbgrader generate_assignment {assignment}"
        )
    paths = (folders.submitted / student / assignment / f"{name}.ipynb" for name in names)
    return [path for path in paths if path.is_symlink() or path.is_file()]


def _standing(
    folders: Folders, assignment: str, student: str, settings: Settings, entry: Entry | None
) -> Standing:
    """Return the state of one student's submission, without running or changing anything."""
    standing = Standing(student, handed_in(folders, assignment, student))
    folder = folders.graded(assignment, student)
    autograded = folders.autograded / student / assignment
    for path in standing.notebooks:
        if verdict := verdict_on(folders, path, settings):
            standing.graded[path.stem] = verdict
    standing.outdated = not standing.complete and any(folder.glob("*.json"))
    if not standing.complete:
        with contextlib.suppress(OSError):
            standing.failed = (folder / "failed.txt").read_text(encoding="utf-8").strip()
    if entry is None:
        return standing
    mark = ""
    with contextlib.suppress(OSError):  # it is not booked, or being booked now
        mark = (folder / "booked").read_text(encoding="utf-8")
    points, standing.by_hand = entry
    standing.points = True
    standing.booked = (
        standing.complete
        and points_of(standing.graded.values()).items() <= points.items()
        and mark == as_booked(folders, assignment, standing)
        and all((autograded / path.name).is_file() for path in standing.notebooks)
    )
    return standing


def standings(
    config: Any, assignment: str, settings: Settings, only: Iterable[str] = ()
) -> list[Standing]:
    """Return the state of each student who submitted something, or of `only` these.

    Raises:
        CommandFailed: nobody submitted anything, or the assignment was not released.

    """
    folders, entries = Folders.of(config.CourseDirectory), _entries(config, assignment)
    return [
        _standing(folders, assignment, student, settings, entries.get(student))
        for student in students(folders, assignment, only)
    ]


def as_booked(folders: Folders, assignment: str, standing: Standing) -> str:
    """Return what identifies a booking: the verdicts' keys, and a digest of the submission."""
    folder = folders.submitted / standing.student / assignment
    content = hashlib.sha256()
    for path in (*standing.notebooks, folder / "timestamp.txt"):
        content.update(path.read_bytes() if path.is_file() else b"")
    keys = [standing.graded[name].key for name in sorted(standing.graded)]
    return " ".join([*keys, content.hexdigest()])


def verdict_on(folders: Folders, path: Path, settings: Settings) -> Verdict | None:
    """Return the verdict on exactly this code, by these checks; None if there is none."""
    try:
        file = blank_verdict(rebuilt(folders, path), folders, path, settings).kept_in(folders)
        # Over a network, only a listing is sure to show what another machine has just written.
        if {file.name, file.with_suffix(".ipynb").name} <= set(os.listdir(file.parent)):
            return Verdict.read(file)
    except Exception:  # the notebook is damaged and not vetted yet, or the file is no verdict
        return None
    return None


Entry = tuple[dict[str, float | None], bool]
"""A student in the gradebook: cell → points, and whether a person must still grade a part."""


def _entries(config: Any, assignment: str) -> dict[str, Entry]:
    """Return student → the gradebook's entry on one assignment; empty if there is none."""
    if not gradebook.exists(config):
        return {}
    entries = {}
    with gradebook.opened(config) as book:
        try:
            submissions = book.assignment_submissions(assignment)
        except MissingEntry:
            return {}
        for submission in submissions:
            grades = [g for notebook in submission.notebooks for g in notebook.grades]
            points = {grade.cell.name: grade.auto_score for grade in grades}
            entries[submission.student.id] = points, any(g.needs_manual_grade for g in grades)
    return entries
