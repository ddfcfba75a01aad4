"""The second phase: one process books the graded submissions through nbgrader. It runs no code.

The first phase has written a graded notebook and a verdict for each submission. nbgrader's own
passes book them, and the pass `Book` takes the place of Examine.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbconvert.exporters.exporter import ResourcesDict
from nbformat import NotebookNode
from nbgrader.api import Gradebook, MissingEntry
from nbgrader.apps.api import NbGraderAPI
from nbgrader.preprocessors import NbGraderPreprocessor
from nbgrader.utils import is_solution
from traitlets import Dict, Unicode
from traitlets.config import Config

from autograder.course import Folders
from autograder.examination.verdict import Verdict, verdict_path
from autograder.files import write_whole
from autograder.gradebook import opened
from autograder.pool.class_list import Standing, as_booked
from course_lib.learner.what_counts import grade_id

EXAMINE = "autograder.passes.autograde.Examine"
BOOK = "autograder.pool.book.Book"
VET = "autograder.collection.repair.vet"


class NotAsGraded(ValueError):
    """The notebook to book is not the one that was graded."""


class Book(NbGraderPreprocessor):
    """Puts the outputs of the graded notebook into the one that nbgrader is about to save."""

    graded = Dict(
        value_trait=Unicode(), key_trait=Unicode(), help="Notebook → its graded version's path."
    ).tag(config=True)

    def preprocess(
        self, nb: NotebookNode, resources: ResourcesDict
    ) -> tuple[NotebookNode, ResourcesDict]:
        """Copy outputs cell by cell.

        Raises:
            NotAsGraded: the notebook's code is not the code that was graded.

        """
        name = resources["nbgrader"]["notebook"]
        if name not in self.graded:
            raise NotAsGraded(f"{name} was not graded")
        graded = nbformat.read(Path(self.graded[name]), as_version=4)
        cells, graded_cells = ([c for c in n.cells if c.cell_type == "code"] for n in (nb, graded))
        if [cell.source for cell in cells] != [cell.source for cell in graded_cells]:
            raise NotAsGraded(
                "the code differs from the code that was graded. If the assignment was released "
                "again since, run nbgrader generate_assignment to update the gradebook; then grade "
                "again"
            )
        for to, cell in zip(cells, graded_cells, strict=True):
            to.outputs, to.execution_count = cell.outputs, cell.execution_count
        return nb, resources


def booking_config(config: Config) -> Config:
    """Return the course's configuration with `Book` in place of `Examine`."""
    config = copy.deepcopy(config)
    passes = config.Autograde.autograde_preprocessors
    config.Autograde.autograde_preprocessors = [BOOK if p == EXAMINE else p for p in passes]
    config.Autograde.pre_convert_hook = VET  # booking runs no student code, so it needs no sandbox
    return config


def book(
    folders: Folders, config: Config, assignment: str, standings: Sequence[Standing]
) -> Iterator[tuple[str, str]]:
    """Book these submissions one by one; yield each student, and why it could not be booked.

    nbgrader's own passes make the autograded notebook, the points and the penalties from the
    outputs that were written when the submission was graded.

    Args:
        folders: the course's folders.
        config: the course's configuration.
        assignment: its name.
        standings: the students; all their notebooks are graded.

    """
    api = NbGraderAPI(config=booking_config(config))
    for standing in standings:
        yield standing.student, _book(api, folders, assignment, standing)


def _book(api: NbGraderAPI, folders: Folders, assignment: str, standing: Standing) -> str:
    mark = folders.graded(assignment, standing.student) / "booked"
    mark.unlink(missing_ok=True)
    verdicts = standing.graded
    api.config.Book.graded = {
        name: str(verdicts[name].kept_in(folders).with_suffix(".ipynb")) for name in verdicts
    }
    identity = as_booked(folders, assignment, standing)  # before nbgrader reads it
    read = _read_by_hand(api.config, folders, assignment, standing.student)
    outcome = api.autograde(assignment, standing.student, force=True)
    if not outcome["success"]:
        message = str(outcome.get("log") or outcome.get("error") or "nbgrader gives no reason")
        return message.strip()[-1500:]
    _stay_read(api.config, folders, assignment, standing.student, read)
    for name, verdict in verdicts.items():
        # Also store it by student and notebook: feedback and nbgrader autograde look for it there.
        verdict.write(verdict_path(folders.data, assignment, standing.student, name))
    write_whole(mark, identity)
    return ""


Read = dict[tuple[str, str], tuple[float | None, str]]
"""(Notebook, cell) → the check's points and the student's text when a person graded the cell."""


def _read_by_hand(config: Config, folders: Folders, assignment: str, student: str) -> Read:
    """Return the cells of one student that have points by hand and need no further grading."""
    with opened(config) as gradebook:
        return {
            key: state
            for key, grade, state in _grades(gradebook, folders, assignment, student)
            if grade.manual_score is not None and not grade.needs_manual_grade
        }


def _stay_read(
    config: Config, folders: Folders, assignment: str, student: str, before: Read
) -> None:
    """Keep points by hand if neither the student's text nor the check's points have changed.

    Otherwise nbgrader wants a person to grade all these cells again after each autograding, and
    those of the whole class after a check was fixed.
    """
    with opened(config) as gradebook:
        for key, grade, state in _grades(gradebook, folders, assignment, student):
            if before.get(key) == state:
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
            grade_id(cell): str(cell.source)
            for cell in nbformat.read(path, as_version=4).cells
            if is_solution(cell)
        }
        for grade in notebook.grades:
            name = grade.cell.name  # a test cell's points depend on all of the student's text
            yield (notebook.name, name), grade, (grade.auto_score, texts.get(name, str(texts)))


def current(folders: Folders, assignment: str, student: str) -> dict[str, Verdict]:
    """Return the verdicts that were booked last: notebook → verdict."""
    folder: Path = verdict_path(folders.data, assignment, student, "x").parent
    verdicts = {}
    for path in sorted(folder.glob("*.json")):
        try:
            verdicts[path.stem] = Verdict.read(path)
        except ValueError:
            continue
    return verdicts
