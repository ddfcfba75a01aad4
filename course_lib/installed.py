"""Find the course: in a checkout, or where a wheel has put it."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
SHARED = ("share", "sgd-to-ddp")
"""Where a wheel puts the course, below the environment's folder."""
_FIRST = Path("lectures", "00_start_here.ipynb")


def find_course() -> Path:
    """Return the folder that holds ``lectures`` and ``assignments``.

    In a checkout, this is the folder that holds the package. A wheel contains the two folders, and
    pip knows where it put them. If neither is found, this returns the package's parent folder; the
    caller then reports that lectures are missing.
    """
    checkout = PACKAGE.parent
    if not (checkout / _FIRST).is_file():
        try:
            files = metadata.files("sgd-to-ddp") or []
        except metadata.PackageNotFoundError:
            files = []
        for file in files:
            if file.as_posix().endswith("/".join((*SHARED, *_FIRST.parts))):
                return Path(str(file.locate())).resolve().parents[1]
    return checkout
