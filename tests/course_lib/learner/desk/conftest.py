"""A small course, and a desk to which all of it was handed out."""

import pytest

from course_lib.learner._desk import refresh
from tests.helpers.desk_files import CHECKS, LECTURE, MODULE, notebook, ran, write


@pytest.fixture
def course(tmp_path):
    """Return a course with a lecture that was run, an assignment, and a module to read."""
    root = tmp_path / "the course"
    write(root / LECTURE, ran(notebook("a = 1", "print(a)")))
    write(root / "assignments/02_topic/02_topic.ipynb", notebook("def f(): ..."))
    write(root / CHECKS, "CHECKS = 1")
    write(root / MODULE, "def sgd(): ...")
    write(root / "course_lib/secret.py", "not linked")
    write(root / "instructor/02_topic/hidden.py", "HIDDEN = 1")
    write(root / "lectures/.ipynb_checkpoints/01_topic.ipynb", "{}")
    write(root / "assignments/02_topic/__pycache__/checks.pyc", "")
    return root


@pytest.fixture
def desk(course):
    """Return a desk to which everything was handed out once."""
    assert refresh(course, course / "work") == []
    return course / "work"
