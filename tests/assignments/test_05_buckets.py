"""Assignment 05, task 1: a report shows the parameters and the buckets expected."""

from __future__ import annotations

from typing import Any

from course_lib.checking import run_check
from course_lib.checking.cases import case_generator
from course_lib.checking.local import LocalRunner
from tests.helpers.course_folders import SOURCES, needs_sources
from tests.helpers.solutions import checks_of, solution_of

pytestmark = needs_sources
FOLDER = SOURCES / "05_bucketing_and_overlap"


def test_a_report_shows_the_parameters_and_the_buckets_that_a_solution_returns() -> None:
    check, solution = checks_of(FOLDER)["assign_buckets"], solution_of(FOLDER, "assign_buckets")

    def without_caps(params: Any, cap: int, first_cap: int) -> Any:
        return [[i] for i in reversed(range(len(list(params))))]

    with LocalRunner(without_caps, "simulated", echo=None) as runner:
        report = run_check("05/assign_buckets", check, runner, seed="1")
    assert report.results[0].name == "six of one size"
    shown = report.results[0].detail
    for words in ("position  bytes  dtype", "5         16     float32", "cap = 32 B", "= 16 B"):
        assert words in shown
    for case in check.cases:
        (mine,) = check.inputs(case, case_generator("1", "05/assign_buckets", case))
        assert "expected" not in mine["own"]
        if case.after is None:
            assert check.program(solution, mine)["value"] == case.parameters["expected"]
