"""Silent bugs are found and named, and right programs raise no alarm.

`docs/silent_bugs.md` lists the bugs, and what is said of them on 4 simulated ranks.
"""

import functools
from functools import partial

import pytest

from course_lib.compare import compare, trusted_run
from tests.course_lib.compare.museum import BUGS, RIGHT
from tests.helpers import ROOT
from tests.helpers.carriers import ranks_on

pytestmark = pytest.mark.usefixtures("ddp_is_imported")

PAGE = ROOT / "docs" / "silent_bugs.md"


@functools.cache
def trusted_of(name: str):
    (bug,) = [bug for bug in BUGS if bug.name == name]
    return trusted_run(bug.right)


CASES = [
    pytest.param(bug, world_size, on, id=f"{bug.name}-{world_size}-{on}")
    for bug in BUGS
    for world_size in (2, 4)
    for on in ("simulated", "cpu")
]
PROGRAMS = [
    pytest.param(program, world_size, id=f"{program.step.__name__}-{world_size}")
    for program in RIGHT
    for world_size in (1, 2, 3, 4)
]


@pytest.mark.parametrize(("bug", "world_size", "on"), CASES)
def test_a_silent_bug_is_found_and_named(bug, world_size: int, on: str) -> None:
    records = ranks_on(on, world_size).run(bug.step)
    report = compare(trusted_of(bug.name), records, bug.shards)
    assert report.first is not None
    assert (report.first.key.kind, report.first.label) == (bug.kind, bug.label), report


@pytest.mark.parametrize(("program", "world_size"), PROGRAMS)
def test_a_right_program_raises_no_alarm(program, world_size: int) -> None:
    seed = world_size
    trusted = trusted_run(partial(program.right, seed=seed), dtype=program.rounded_to)
    report = compare(trusted, ranks_on(program.on, world_size).run(program.step, seed))
    assert report.first is None, report
    assert all(name.startswith("the output of") for name in report.left_out), report
    assert report.compared > 10


def test_the_page_lists_all_bugs() -> None:
    text = PAGE.read_text(encoding="utf-8")
    absent = [bug.name for bug in BUGS if bug.sentence not in text or bug.source not in text]
    assert not absent, f"{PAGE} has no row, or another source, for these"
