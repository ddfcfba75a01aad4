"""The course folder: where it is, and how nbgrader is configured for it."""

from __future__ import annotations

from pathlib import Path

from traitlets.config import Config
from traitlets.config.loader import PyFileConfigLoader


class CourseNotFound(LookupError):
    """No course folder at or above the place where one was looked for."""


class SourcesMissing(LookupError):
    """The folder with the sources of the assignments is not in this copy of the course."""


def find_course(start: Path | None = None) -> Path:
    """Return the nearest folder, from `start` upwards, that holds ``nbgrader_config.py``."""
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        if (folder / "nbgrader_config.py").is_file():
            return folder
    raise CourseNotFound(
        f"{start} is not inside the course: there is no nbgrader_config.py, here or above. "
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
        SourcesMissing: it lacks them.

    """
    name: str = load_config(root).CourseDirectory.source_directory
    if not (folder := root / name).is_dir():
        raise SourcesMissing(
            f"this command needs the folder {name}/ (solutions, hidden cases), which this copy of "
            "the course leaves out; lectures, assignments and checks work without it: make lab"
        )
    return folder


def data_folder(root: Path, config: Config | None = None) -> Path:
    """Return the folder of submissions, verdicts and grades: ``grading/``."""
    config = config or load_config(root)
    return root / Path(str(config.CourseDirectory.submitted_directory)).parent
