"""Find the course, in a checkout or installed from a wheel, and the place of its desk."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from course_lib.desk.diary import find_desk

PACKAGE = Path(__file__).resolve().parents[1]
_SHARED = ("share", "sgd-to-ddp")
_FIRST = Path("lectures", "00_start_here.ipynb")


def find_course() -> Path:
    """Return the folder that holds ``lectures`` and ``assignments``.

    In a checkout, this is the folder that holds the package. A wheel contains the two folders, and
    pip knows where it put them. If they are nowhere, this returns the folder beside the package;
    the caller then reports that lectures are missing.
    """
    checkout = PACKAGE.parent
    if not (checkout / _FIRST).is_file():
        try:
            files = metadata.files("sgd-to-ddp") or []
        except metadata.PackageNotFoundError:
            files = []
        for file in files:
            if file.as_posix().endswith("/".join((*_SHARED, *_FIRST.parts))):
                return Path(str(file.locate())).resolve().parents[1]
    return checkout


def default_desk(course: Path) -> Path:
    """Return the desk that we are in; else ``work`` in the checkout, or in this folder."""
    if (here := find_desk(Path.cwd())) is not None:
        return here
    return (Path.cwd() if course.parts[-2:] == _SHARED else course) / "work"
