"""The course's folders and further pages; marks to skip tests if a copy lacks instructor/."""

import shutil

import pytest

from tests.helpers import ROOT

LEFTOVERS = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
RELEASED = ROOT / "assignments"
SOURCES = ROOT / "instructor"
FURTHER = sorted((ROOT / "lectures" / "further").glob("*.ipynb"))

needs_sources = pytest.mark.skipif(
    not SOURCES.is_dir(), reason="this copy of the course has no instructor/"
)


def assignments(folder):
    """Return the folders of the assignments in RELEASED or SOURCES, in order."""
    return sorted({path.parent for path in folder.glob("*/*.ipynb")})


def copy_assignment(name: str, root):
    """Copy what a course has of an assignment into a course folder; return the source's copy."""
    target = root / RELEASED.name / name
    shutil.copytree(RELEASED / name, target, ignore=LEFTOVERS, dirs_exist_ok=True)
    return shutil.copytree(SOURCES / name, root / SOURCES.name / name, ignore=LEFTOVERS)
