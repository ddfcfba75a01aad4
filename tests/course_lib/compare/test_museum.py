"""Silent bugs are found and named, and right programs raise no alarm.

`docs/silent_bugs.md` lists the bugs. After a change of the words or of the museum,
``python -m tests.course_lib.compare.test_museum`` writes that page.
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


def of_the_bug(bug, world_size: int, on: str):
    records = ranks_on(on, world_size).run(bug.step)
    return compare(trusted_of(bug.name), records, bug.shards)


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
    report = of_the_bug(bug, world_size, on)
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


def page() -> str:
    """Return the page that lists the bugs and what is said of them, on simulated ranks."""
    lines = [
        "# Silent bugs, and what is said of them",
        "",
        "Each bug follows a report to a public project, which is linked. It raises no error. It",
        "is a function of a few lines here. `course_lib.compare` compares one or two steps of it",
        "on 4 ranks with one rank. It names the first tensor that differs, and says what the",
        "difference looks like. The programs are in `tests/course_lib/compare/museum.py`.",
        "`test_museum.py` beside it runs them on 2 and on 4 ranks, simulated and on the CPU, and",
        "also runs right programs, which must raise no alarm. It made this page.",
        "",
        "| | bug | from | first to differ | what is said of it |",
        "|---|---|---|---|---|",
    ]
    for number, bug in enumerate(BUGS, 1):
        first = of_the_bug(bug, 4, "simulated").first
        assert first is not None, bug.name
        place = "/".join(bug.source.split("/")[3:5]) + " #" + bug.source.rsplit("/", 1)[1]
        lines.append(
            f"| {number} | {bug.sentence} | [{place}]({bug.source}) | {first.key.kind} "
            f"`{first.key.name}` | `{first.label}`: {first.says} |"
        )
    return "\n".join(lines) + "\n"


def test_the_page_lists_all_bugs() -> None:
    text = PAGE.read_text(encoding="utf-8")
    absent = [bug.name for bug in BUGS if bug.sentence not in text or bug.source not in text]
    assert not absent, "write it anew: python -m tests.course_lib.compare.test_museum"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
