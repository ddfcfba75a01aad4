"""The course folder: where it is, how nbgrader is configured for it, and how it examines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traitlets.config import Config
from traitlets.config.loader import PyFileConfigLoader

from autograder.errors import CommandFailed
from course_lib.limits import CASE_SECONDS, CELL_SECONDS, CELLS_SECONDS

_PATTERNS = "?*[%$"
"""Characters that a path must not have: nbgrader, SQLAlchemy and traitlets would interpret them."""


def find_course(start: Path | None = None) -> Path:
    """Return the nearest folder, from `start` upwards, that contains ``nbgrader_config.py``."""
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        if (folder / "nbgrader_config.py").is_file():
            if letters := [letter for letter in _PATTERNS if letter in str(folder)]:
                raise CommandFailed(
                    f"nbgrader cannot work in {folder}: the path contains "
                    f"{' and '.join(map(repr, letters))}. Rename the folder with this in its name, "
                    "or move the course."
                )
            return folder
    raise CommandFailed(
        f"{start} is not inside the course: there is no nbgrader_config.py in it or above it. "
        "Change to the folder that you cloned."
    )


def load_config(root: Path, data: Path | None = None) -> Config:
    """Return the configuration of nbgrader_config.py.

    Args:
        root: the course folder.
        data: keep release, submissions, grades and gradebook here instead of in ``grading/``.

    """
    config = PyFileConfigLoader("nbgrader_config.py", path=str(root)).load_config()
    if data is not None:
        for step in ("release", "submitted", "autograded", "feedback", "solution"):
            config.CourseDirectory[f"{step}_directory"] = str(data / step)
        config.CourseDirectory.db_url = f"sqlite:///{data / 'gradebook.db'}"
    return config


def find_sources(root: Path) -> Path:
    """Return the folder of the assignments' sources, which a student's copy may lack.

    Raises:
        CommandFailed: this copy of the course has no such folder.

    """
    name: str = load_config(root).CourseDirectory.source_directory
    if not (folder := root / name).is_dir():
        raise CommandFailed(
            f"this command needs the folder {name}/ (solutions, hidden cases), which this copy of "
            "the course does not have. Lectures, assignments and checks work without this "
            "folder: open them with make lab"
        )
    return folder


def handed_out(source: Path) -> Path:
    """Return the folder that students get, including the checks: ``assignments/NN_name``.

    Args:
        source: the assignment's folder under ``instructor/``, which has the rest.

    """
    return source.parents[1] / "assignments" / source.name


@dataclass(frozen=True)
class Folders:
    """The folders of the course, according to its configuration; all paths are absolute.

    Attributes:
        source: the assignments as instructors write them.
        release: the assignments as students get them.
        submitted: the submissions, as STUDENT/ASSIGNMENT/NOTEBOOK.ipynb.
        autograded: nbgrader's graded copies of the submissions.
        data: the folder of the gradebook and of all other files of the grader: ``grading/``.

    """

    source: Path
    release: Path
    submitted: Path
    autograded: Path
    data: Path

    @classmethod
    def of(cls, coursedir: Any) -> Folders:
        """Return the folders of nbgrader's ``CourseDirectory``, or of its part of a `Config`."""
        root = Path(coursedir.root)
        names = ("source", "release", "submitted", "autograded")
        paths = {name: root / getattr(coursedir, f"{name}_directory") for name in names}
        return cls(**paths, data=paths["autograded"].parent)

    @classmethod
    def at(cls, root: Path) -> Folders:
        """Return the folders of the course in `root`."""
        return cls.of(load_config(root).CourseDirectory)

    def graded(self, assignment: str, student: str = "") -> Path:
        """Return the folder of the graded notebooks and of the verdicts, named by their content."""
        return self.data / "graded" / assignment / student

    def submitters(self, assignment: str) -> list[str]:
        """Return the students who submitted something, in order."""
        return sorted(p.parent.name for p in self.submitted.glob(f"*/{assignment}") if p.is_dir())

    def notebooks(self, assignment: str) -> list[str]:
        """Return the names of the notebooks that students were given, without ``.ipynb``."""
        return sorted(path.stem for path in (self.release / assignment).glob("*.ipynb"))


@dataclass(frozen=True)
class Settings:
    """How a submission is examined; part of every verdict.

    Attributes:
        cell_seconds: time limit of one code cell.
        case_seconds: time limit of one case, if its check sets no limit.
        submission_seconds: time limit for the solutions and checks of one submission, and again for
            its other cells. Time spent waiting for a core counts for no limit, but at least a tenth
            of the wall-clock time always counts.
        memory_gib: what a submission's processes may hold together.
        on: ``cpu`` or ``gpu``: run passing solutions again on such ranks; an option of `Examine`.
        hidden: whether hidden cases are examined, too; an option of `Examine`.

    """

    cell_seconds: float = CELL_SECONDS
    case_seconds: float = CASE_SECONDS
    submission_seconds: float = CELLS_SECONDS
    memory_gib: float = 3.0
    on: str = ""
    hidden: bool = True

    @classmethod
    def of(cls, config: Config) -> Settings:
        """Return the settings with the configuration's options of `Examine`."""
        options = config.Examine
        return cls(**{name: options[name] for name in ("on", "hidden") if name in options})
