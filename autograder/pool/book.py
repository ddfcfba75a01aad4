"""The second phase: one writer books the graded submissions through nbgrader. It runs no code."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbgrader.api import Gradebook, MissingEntry
from nbgrader.apps.api import NbGraderAPI
from nbgrader.utils import is_solution
from traitlets.config import Config

from autograder.course import Folders
from autograder.examination.verdict import Verdict, verdict_path
from autograder.files import write_whole
from autograder.passes.book import BOOK, EXAMINE, VET
from autograder.pool.class_list import Standing, as_booked


def booking_config(config: Config) -> Config:
    """Return the course's configuration with `Book` in place of `Examine`."""
    config = copy.deepcopy(config)
    passes = config.Autograde.autograde_preprocessors
    config.Autograde.autograde_preprocessors = [BOOK if p == EXAMINE else p for p in passes]
    config.Autograde.pre_convert_hook = VET  # it runs nothing, so it needs no sandbox
    return config


def book(
    folders: Folders,
    config: Config,
    assignment: str,
    standings: Sequence[Standing],
    tell: Callable[[str, str], None] = lambda student, failed: None,
) -> dict[str, str]:
    """Book these submissions one by one; return student → why it could not be booked.

    nbgrader's own passes make the autograded notebook, points and penalties, from the outputs that
    were written when the submission was graded.

    Args:
        folders: of the course.
        config: of the course.
        assignment: its name.
        standings: the students; all their notebooks are graded.
        tell: takes each student, and the reason if it was not booked.

    """
    failed: dict[str, str] = {}
    api = NbGraderAPI(config=booking_config(config))
    with warnings.catch_warnings():
        # This warning is nbgrader's own: SQLAlchemy flushes objects that were not added yet.
        warnings.filterwarnings("ignore", module="nbgrader.api")
        for found in standings:
            why = _book(api, folders, assignment, found)
            if why:
                failed[found.student] = why
            tell(found.student, why)
    return failed


def _book(api: NbGraderAPI, folders: Folders, assignment: str, found: Standing) -> str:
    mark = folders.graded(assignment, found.student) / "booked"
    mark.unlink(missing_ok=True)
    api.config.Book.graded = {
        name: str(path.with_suffix(".ipynb")) for name, path in found.graded.items()
    }
    told = as_booked(folders, assignment, found)  # before nbgrader reads it
    read = _read_by_hand(api.config, folders, assignment, found.student)
    outcome = api.autograde(assignment, found.student, force=True)
    if not outcome["success"]:
        said = str(outcome.get("log") or outcome.get("error") or "nbgrader gives no reason")
        return said.strip()[-1500:]
    _stay_read(api.config, folders, assignment, found.student, read)
    for name, path in found.graded.items():
        # By student and notebook: feedback and plain nbgrader autograde look for it there.
        Verdict.read(path).write(verdict_path(folders.data, assignment, found.student, name))
    write_whole(mark, json.dumps(told))
    return ""


Read = dict[tuple[str, str], tuple[float | None, str]]
"""Notebook and cell → the check's points and the student's text, which a person has read."""


def _read_by_hand(config: Config, folders: Folders, assignment: str, student: str) -> Read:
    """Return the cells of one student that have points by hand and wait for nobody."""
    with _gradebook(config) as gradebook:
        return {
            key: what
            for key, grade, what in _grades(gradebook, folders, assignment, student)
            if grade.manual_score is not None and not grade.needs_manual_grade
        }


def _stay_read(
    config: Config, folders: Folders, assignment: str, student: str, before: Read
) -> None:
    """Let points by hand stand where neither the student's text nor the check's points changed.

    nbgrader has them all read again after each autograding, the whole class after a mended check.
    """
    with _gradebook(config) as gradebook:
        for key, grade, what in _grades(gradebook, folders, assignment, student):
            if before.get(key) == what:
                grade.needs_manual_grade = False
        gradebook.db.commit()


def _grades(
    gradebook: Gradebook, folders: Folders, assignment: str, student: str
) -> Iterator[tuple[tuple[str, str], Any, tuple[float | None, str]]]:
    """Yield each grade of one student: its key in `Read`, the grade, its value in `Read`."""
    try:
        notebooks = gradebook.find_submission(assignment, student).notebooks
    except MissingEntry:
        return
    for notebook in notebooks:
        path = folders.autograded / student / assignment / f"{notebook.name}.ipynb"
        if not path.is_file():
            continue
        texts = {
            cell.metadata.nbgrader.grade_id: str(cell.source)
            for cell in nbformat.read(path, as_version=4).cells
            if is_solution(cell)
        }
        for grade in notebook.grades:
            name = grade.cell.name  # a test cell's points depend on all that the student wrote
            yield (notebook.name, name), grade, (grade.auto_score, texts.get(name, str(texts)))


def _gradebook(config: Config) -> Gradebook:
    return Gradebook(str(config.CourseDirectory.db_url), str(config.CourseDirectory.course_id))


def current(folders: Folders, assignment: str, student: str) -> dict[str, Verdict]:
    """Return the verdicts that were booked last: notebook → verdict."""
    folder: Path = verdict_path(folders.data, assignment, student, "x").parent
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found[path.stem] = Verdict.read(path)
        except ValueError:
            continue
    return found
