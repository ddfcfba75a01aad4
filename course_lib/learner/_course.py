"""Find the course's assignments, and their tasks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import nbformat

from course_lib.learner import CannotGoOn, did_you_mean
from course_lib.learner.what_counts import is_check, role


@dataclass(frozen=True)
class Task:
    """A task or question with points.

    Attributes:
        name: the name of its check, or of the question.
        points: the most that it can give.
        checked: True if a check gives the points, False if a person reads the answer.

    """

    name: str
    points: float
    checked: bool


def names(course: Path) -> list[str]:
    """Return the names of all assignments, in order."""
    return sorted(path.parent.name for path in (course / "assignments").glob("*/checks.py"))


def find(course: Path, query: str) -> str:
    """Return the assignment that `query` means: its name, number, topic, or part of it.

    Raises:
        CannotGoOn: `query` fits no assignment, or more than one.

    """
    every_name = names(course)
    if "lectures" in Path(query).parts:
        raise CannotGoOn(
            f"{query} is a lecture, which gives no points. Give the name of an assignment"
        )
    query = Path(query).name.removesuffix(".ipynb").lower()
    if query.isdigit():
        query = f"{int(query):02}"
    matches = [name for name in every_name if query == name] or [
        name for name in every_name if query in name
    ]
    if len(matches) == 1 and query:
        return matches[0]
    problem = "fits more than one assignment" if matches and query else "is no assignment"
    similar = "" if matches else did_you_mean(query, every_name)
    raise CannotGoOn(f"{query!r} {problem}.{similar} There are: {', '.join(matches or every_name)}")


def notebook_of(folder: Path, name: str) -> Path:
    """Return the path of an assignment's notebook, in the course or on a desk."""
    return folder / "assignments" / name / f"{name}.ipynb"


def read(notebook: Path) -> nbformat.NotebookNode:
    """Return a notebook in nbformat's newest format.

    Raises:
        CannotGoOn: the file cannot be read, or is not a notebook; the message names it.

    """
    try:
        content = notebook.read_bytes()
    except OSError as error:
        raise CannotGoOn(f"{notebook} cannot be read: {error.strerror}") from error
    try:
        notebook_node: nbformat.NotebookNode = nbformat.reads(
            content.decode("utf-8-sig"), as_version=4
        )
        return notebook_node
    except Exception as error:  # nbformat raises errors of any type on a damaged file
        raise CannotGoOn(
            f"{notebook} is not a valid notebook any more: rename it, then run `course start` to "
            "get a good copy"
        ) from error


def tasks(course: Path, name: str) -> list[Task]:
    """Return the tasks and questions of an assignment, in order."""
    return [
        Task(role(cell)["grade_id"], float(role(cell)["points"]), is_check(cell))
        for cell in read(notebook_of(course, name)).cells
        if role(cell).get("grade")
    ]
