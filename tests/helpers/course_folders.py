"""The course's folders, and marks to skip tests if a student's copy lacks instructor/."""

from pathlib import Path

import pytest

from tests.helpers import ROOT

RELEASED = ROOT / "assignments"
SOURCES = ROOT / "instructor"

needs_sources = pytest.mark.skipif(
    not SOURCES.is_dir(), reason="this copy of the course leaves out instructor/"
)


def assignments(folder: Path) -> list[Path]:
    """Return the folders of the assignments in RELEASED or SOURCES, in order."""
    return sorted(path.parent for path in folder.glob("*/checks.py"))
