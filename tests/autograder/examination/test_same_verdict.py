"""The check in a notebook and the grader agree on the same function, case by case.

Their words may differ only in the line of a cell or file that they name.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from autograder.examination.submission import Submission, examine
from autograder.sandbox.sandbox import Sandbox
from course_lib.checking import Case, CheckReport, equals, run_check, task
from course_lib.checking.local import LocalRunner
from course_lib.limits import CASE_SECONDS, MAX_TIMEOUTS


def without_places(text: str) -> str:
    """Return a reason without the parts that name a line."""
    text = re.sub(r"\s*\([^()]*, line \d+\)", "", text)
    text = re.sub(r"\S*(<[^<>]*>|\w+\.py|Cell In\[\d+\]), line \d+", "line", text)
    text = re.sub(r"File .*?, line \d+", "line", text)
    text = text.replace(", made at line", "")  # the line of ours that makes the case's groups
    # In a notebook all simulated ranks are threads of one process.
    return re.sub(r"(A rank|Rank \d+)'s process ended", "A process ended", text)


def told(report: CheckReport) -> list[tuple[Any, ...]]:
    """Return the contents of a report, case by case."""
    return [
        (result.name, result.passed, dict(result.parts), without_places(result.reason))
        for result in report.results
    ]


TOUCHES = """
import torch.distributed as dist
def f(x):
    if dist.get_world_size() == 1:
        return x.clone()
    total = x.clone()
    work = dist.all_reduce(total, async_op=True)
    seen = total + 1
    work.wait()
    return total
"""
ENDLESS = """
def f(x):
    while True:
        pass
"""
TOTAL = task(
    "f",
    inputs=lambda case, generator: [
        {"x": torch.randn(3, generator=generator)} for _ in range(case.world_size)
    ],
    program=lambda f, mine, given: {"the total": f(mine["x"])},
    judges=[equals(lambda case, inputs, me: {"the total": sum(each["x"] for each in inputs)})],
    cases=[Case(f"{k} ranks", k) for k in (1, 2, 3)],
    seconds=60.0,
)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (TOUCHES, ["Ranks 0, 1 read the buffer of all_reduce #1 before its wait(): line"]),
        (
            ENDLESS,
            [
                "The case took longer than its limit of 1 s.",
                f"not run, because {MAX_TIMEOUTS} earlier cases took longer than their limit",
            ],
        ),
    ],
)
def test_of_one_rule(place: Sandbox, source: str, words: list[str]) -> None:
    check = TOTAL if source is TOUCHES else replace(TOTAL, seconds=1.0)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(source, namespace)
    with Submission(place) as submission:
        assert not submission.run_cell(source).error
        ours = examine("t/f", check, submission, seed="same")
    with LocalRunner(namespace["f"], echo=None) as run:
        theirs = run_check("t/f", check, run, seed="same")
    assert told(ours) == told(theirs)
    reasons = " ".join(reason for *_, reason in told(ours))
    assert all(each in reasons for each in words), reasons


def test_a_case_has_the_same_seconds_in_both(place: Sandbox) -> None:
    without = replace(TOTAL, seconds=None)
    with Submission(place) as submission:
        assert submission.budget.settings.case_seconds == CASE_SECONDS == without.case_seconds()
    assert TOTAL.case_seconds(7.0) == 60.0
