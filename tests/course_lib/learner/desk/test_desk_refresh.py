"""A refresh loses nothing of the student's, whatever student and course did to a file."""

import stat

import pytest

from course_lib.learner._desk import refresh
from tests.helpers.desk_files import (
    CHECKS,
    HANDED_OUT,
    LECTURE,
    MODULE,
    notebook,
    ran,
    sources,
    there,
    write,
)


def test_copies_are_handed_out_without_outputs_and_links_find_their_file(desk) -> None:
    assert there(desk) == HANDED_OUT
    assert sources(desk / LECTURE) == ["a = 1", "print(a)", ""]
    assert not stat.S_IMODE((desk / MODULE).stat().st_mode) & 0o222, "to be read, not worked in"
    assert stat.S_IMODE((desk / CHECKS).stat().st_mode) & 0o200


@pytest.mark.parametrize(
    ("on_desk", "traces"),
    [(notebook("a = 1", "mine"), "changes"), (ran(notebook("a = 1", "print(a)")), "outputs")],
)
def test_what_both_changed_stays_and_the_new_version_is_laid_beside_it_once(
    course, desk, on_desk, traces: str
) -> None:
    write(desk / LECTURE, on_desk)
    written = (desk / LECTURE).read_bytes()
    write(course / LECTURE, notebook("a = 2"))
    (note,) = refresh(course, desk)
    assert note == (
        f"{LECTURE} has your {traces}, so it stays. The new version is beside it: "
        "01_topic.new.ipynb"
    )
    beside = desk / "lectures/01_topic.new.ipynb"
    assert (desk / LECTURE).read_bytes() == written and sources(beside) == ["a = 2"]
    assert refresh(course, desk) == [] and sources(beside) == ["a = 2"]
    beside.unlink()
    assert refresh(course, desk) == [] and not beside.exists()
