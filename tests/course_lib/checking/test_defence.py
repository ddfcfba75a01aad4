"""Questions on a student's own run: who answers what the trace shows gets the points."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from course_lib.checking import Case, CheckReport, run_check
from course_lib.checking.defence import Defence, Question, Run, defend
from course_lib.checking.local import LocalRunner
from course_lib.ranks import Network, Trace
from course_lib.ranks.trace.event import Event, computation
from tests.helpers.course_folders import SOURCES, needs_sources
from tests.helpers.solutions import checks_of, readable, solution_of

pytestmark = needs_sources

DEFENCES = [
    (folder, check)
    for folder in readable(sorted(SOURCES.glob("[0-9]*")))
    for check in checks_of(folder).values()
    if isinstance(check, Defence)
]
each_task = pytest.mark.parametrize(
    ("folder", "check"), DEFENCES, ids=lambda x: getattr(x, "of", "")
)


def runner(folder: Path, check: Defence) -> LocalRunner:
    return LocalRunner(solution_of(folder, check.of), "simulated", echo=None)


def questions(folder: Path, check: Defence, student: str, number: int = 1) -> list[Question]:
    with runner(folder, check) as run:
        return check.questions(checks_of(folder)[check.of], run, student, number)[1]


def answered(folder: Path, check: Defence, student: str, answers: Callable[[], Any]) -> CheckReport:
    """Return the report as the grader's: of the questions, with these answers."""
    with runner(folder, check) as run:
        made = check.asked(checks_of(folder)[check.of], run, student)
    with LocalRunner(answers, "simulated", echo=None) as run:
        return run_check("check", made, run, seed="any")


@pytest.mark.every_case
@each_task
def test_right_answers_earn_all_points_or_in_the_second_set_half(
    folder: Path, check: Defence
) -> None:
    for number, share in ((1, 1.0), (2, 0.5)):
        right = [question.right for question in questions(folder, check, "ada", number)]
        report = answered(folder, check, "ada", lambda n=number, r=right: (n, r))
        assert report.fraction == pytest.approx(share), report


@each_task
def test_a_wrong_answer_costs_a_third_and_is_told_what_the_run_shows(
    folder: Path, check: Defence
) -> None:
    asked = questions(folder, check, "ada")
    right = [question.right for question in asked]
    report = answered(folder, check, "Ada ", lambda: (1, [right[0], right[1] * 1.1 + 1, right[2]]))
    assert report.fraction == pytest.approx(2 / 3)
    assert asked[1].text in report.reason and "your own run shows" in report.reason


@pytest.mark.large
@each_task
def test_guesses_and_a_neighbours_answers_earn_little(folder: Path, check: Defence) -> None:
    """A guess is another student's answer to a question of the same kind, or a round number."""
    right = {f"s{i}": [q.right for q in questions(folder, check, f"s{i}")] for i in range(10)}
    shares = [
        answered(folder, check, student, lambda a=right[other]: (1, a)).fraction
        for student, other in zip(right, [*list(right)[1:], "s0"], strict=True)
    ]
    assert sum(shares) / len(shares) <= 1 / 5 and max(shares) <= 1 / 3


@each_task
def test_two_students_have_different_cases(folder: Path, check: Defence) -> None:
    def drawn(seed: int) -> Case:
        return check.draw(torch.Generator().manual_seed(seed))

    assert len({drawn(seed).name for seed in range(20)}) > 15
    assert drawn(3).name == drawn(3).name


def test_the_questions_are_printed_and_answers_only_for_practice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, check = next(each for each in DEFENCES if each[1].of == "data_parallel")
    solution = solution_of(folder, check.of)
    defend(f"{folder.name}/{check.of}", solution, "ada")
    told = capsys.readouterr().out
    assert all(question.text in told for question in questions(folder, check, "ada"))
    assert "answer 1" not in told
    defend(f"{folder.name}/{check.of}", solution)
    assert "answer 3" in capsys.readouterr().out
    with pytest.raises(ValueError, match="sets 1 and 2"):
        defend(f"{folder.name}/{check.of}", solution, "ada", draw=3)


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([2, (1.5, 24, 360)], ""),
        ((1, [12, None, 30]), "answer 2 is not written yet"),
        ([12, 24, 30], "a list of three numbers"),
        ((3, [12, 24, 30]), "a list of three numbers"),
        ((1, ["12 µs", "24 B", "30 µs"]), "a list of three numbers"),
    ],
)
def test_a_notebook_looks_only_at_the_form_of_the_answers(answers: Any, says: str) -> None:
    _, check = DEFENCES[0]
    with LocalRunner(lambda: answers, "simulated", echo=None) as run:
        report = run_check("check", check, run, seed="any")
    assert report.passed == (not says) and says in report.reason


@pytest.fixture
def by_hand() -> Iterator[Run]:
    """Two ranks that compute for 4 s; messages of 8 B in [1, 3] and 16 B in [3, 6]."""

    def message(rank: int, size: int, start: float, end: float) -> Event:
        return Event(rank, "all_reduce", (0, 1), None, size, "float32", 1, start, end, "line")

    events = [
        event
        for rank in range(2)
        for event in (
            computation(rank, 0, 2),
            message(rank, 8, 1, 3),
            computation(rank, 3, 5),
            message(rank, 16, 3, 6),
        )
    ]
    yield Run(
        Case("", 2, network=Network(0, 1)), Trace(events, 2), lambda network: Trace(events[:2], 2)
    )


def test_the_kinds_of_questions_read_the_trace(by_hand: Run) -> None:
    from course_lib.checking import defence

    one = torch.Generator().manual_seed(0)
    assert defence.time_waiting(by_hand, one).right == pytest.approx(2e6)
    assert defence.half_the_bandwidth(by_hand, one).right == pytest.approx(3e6)
    assert {defence.bytes_handed_over("all_reduce")(by_hand, one).right for _ in range(20)} == {
        8,
        16,
    }
    before = {defence.computed_before("all_reduce")(by_hand, one).right for _ in range(20)}
    assert sorted(before) == pytest.approx([1e6, 2e6])
