"""Where the course is, in a checkout or installed from a wheel, and where its desk belongs."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from course_lib.desk.diary import find_desk

PACKAGE = Path(__file__).resolve().parents[1]
_SHARED = ("share", "sgd-to-ddp")
_FIRST = Path("lectures", "00_start_here.ipynb")


def find_course() -> Path:
    """Return the folder that holds ``lectures`` and ``assignments``.

    In a checkout it is the one that holds the package; a wheel brings the two folders along, and
    pip knows where it put them. Where there are none, it is the one beside the package all the
    same: its user is told.
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
    """Return the desk to use: the one that we stand on, else ``work`` in the checkout or here."""
    if (here := find_desk(Path.cwd())) is not None:
        return here
    return (Path.cwd() if course.parts[-2:] == _SHARED else course) / "work"
