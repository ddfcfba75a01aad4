"""Assignment 05, task 1: a report shows the parameters and the buckets expected."""

from __future__ import annotations

from typing import Any

from course_lib.checking import run_check
from course_lib.checking.local import LocalRunner
from tests.helpers.course_folders import SOURCES, needs_sources
from tests.helpers.solutions import checks_of

pytestmark = needs_sources
FOLDER = SOURCES / "05_bucketing_and_overlap"


def test_a_report_shows_the_parameters_and_the_buckets_that_a_solution_returns() -> None:
    check = checks_of(FOLDER)["assign_buckets"]

    def without_caps(params: Any, cap: int, first_cap: int) -> Any:
        return [[i] for i in reversed(range(len(list(params))))]

    with LocalRunner(without_caps, "simulated", echo=None) as runner:
        report = run_check("05/assign_buckets", check, runner, seed="1")
    failure = next(result for result in report.results if not result.passed)
    assert "expected [[" in failure.reason
    for text in ("position  bytes  dtype", "float32", "cap = ", "first_cap = "):
        assert text in failure.detail
