"""The recipe that grades while the term runs: docs/hourly.sh, over three hours."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from autograder.commands.demo import ASSIGNMENT
from autograder.examination.verdict import Verdict, verdict_path
from tests.helpers.course_folders import ROOT, needs_sources
from tests.helpers.whole_class import FILE, notebook_of


@needs_sources
@pytest.mark.large
def test_no_page_is_new_without_news_and_hidden_cases_count_from_the_deadline(
    released_course: Path, copy_of: Callable[[Path], Path]
) -> None:
    course = copy_of(released_course)
    (course / ".venv/bin").mkdir(parents=True)
    program = f'autograder() {{ "{sys.executable}" -m autograder "$@"; }}\n'
    (course / ".venv/bin/activate").write_text(program)
    (course / "docs").mkdir()
    recipe = shutil.copy(ROOT / "docs/hourly.sh", course / "docs")
    exchange = course / "exchange"

    def hand_in(student: str, hour: int, *mutants: tuple[str, str]) -> None:
        name = f"{student}+{ASSIGNMENT}+2030-01-15 {hour:02}:00:00 UTC+x"
        folder = exchange / "sgd-to-ddp/inbound" / name
        folder.mkdir(parents=True)
        nbformat.write(notebook_of(course, *mutants), folder / FILE)
        (folder / "submission_secret.txt").write_text(f"{student}, {hour}")

    def pass_an_hour(due: str) -> dict[str, bytes]:
        """Return the pages in the exchange: nbgrader names one as new if its bytes have changed."""
        process = subprocess.run(
            ["sh", recipe, ASSIGNMENT, due],
            env={**os.environ, "EXCHANGE": str(exchange)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.returncode == 0, process.stdout
        pages = (exchange / "sgd-to-ddp/feedback").glob("*.html")
        return {page.name: page.read_bytes() for page in pages}

    def hidden(student: str) -> int:
        path = verdict_path(course / "grading", ASSIGNMENT, student, ASSIGNMENT)
        return sum(case["hidden"] for check in Verdict.read(path).checks for case in check.cases)

    hand_in("ada", 8, ("average_gradients", "sum"))
    first = pass_an_hour("tomorrow")
    assert len(first) == 1 and hidden("ada") == 0
    hand_in("bob", 9)
    with (course / "grading/hourly.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert pass_an_hour("tomorrow") == first, "the hour before is still at work"
    second = pass_an_hour("tomorrow")
    assert len(second) == 2 and first.items() <= second.items(), "ada's is as it was"
    hand_in("ada", 10)
    third = pass_an_hour("yesterday")
    assert len(third) == 3 and first.items() <= third.items(), "what ada submitted first is over"
    assert not (second.items() - first.items()) & third.items(), "bob's has the hidden cases now"
    assert hidden("ada") == hidden("bob") == 2
