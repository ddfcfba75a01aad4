"""The warm sandbox of the assignment that the demonstration grades."""

from collections.abc import Iterator

import pytest

from autograder.commands.demo import ASSIGNMENT
from autograder.passes.examine import masked_from
from autograder.sandbox.sandbox import Sandbox
from course_lib.checking.loading import load_module
from tests.helpers.course_folders import RELEASED, SOURCES


@pytest.fixture(scope="module")
def assignment_place() -> Iterator[Sandbox]:
    hidden = load_module(SOURCES / ASSIGNMENT / "hidden.py", RELEASED / ASSIGNMENT)
    masked = masked_from(hidden.MASKED)
    with Sandbox(masked) as place:
        yield place
