"""What decides a case besides its values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from course_lib.checking import NETWORK, Case, Check, Form, Observed, Wrong, run_check
from course_lib.checking.judges import same_on_all_ranks
from course_lib.limits import MAX_EMPTY
from course_lib.ranks import Event, Trace
from course_lib.ranks.trace.event import computation


def nothing(case: Case, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Find nothing wrong."""


def operation(rank: int, kind: str, size: int = 8) -> Event:
    return Event(rank, kind, (0, 1), None, size, "float32", 1, 0.0, 1.0, "here")


APART = Case("two groups", 2, form=Form(groups=((0,), (1,))))
HALF = [computation(0, 0.0, 1e-3), computation(1, 0.0, 2e-3)]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("case", "events", "words"),
    [
        (Case("a", 2), [*HALF[1:], computation(0, 0.0, 2e-3)], ""),
        (Case("a", 2), HALF, "rank 0 computes for only 1 of the 2 ms .* do not skip or shorten it"),
        (Case("b", 2, after=Case("a", 2)), HALF, "‘a’, also fails .* look there first"),
        (Case("a", 2), [operation(1, "barrier", 0)] * (MAX_EMPTY + 1), "operations that carry no"),
        (APART, [operation(1, "all_reduce")], "with ranks 0, 1 in all_reduce.* Only ranks 1 are"),
    ],
)
def test_what_the_ranks_did_is_judged_besides_their_values(
    case: Case, events: list[Event], words: str
) -> None:
    computes = (
        (lambda _, inputs: [{1e-3: own} for own in inputs]) if events[0].kind == "compute" else None
    )
    cases = (case,) if case.after is None else (case.after, case)
    check = Check("f", len, lambda *_: [2, 2], nothing, cases, computes=computes)
    run = lambda *_: Observed([1, 1], Trace(events, 2), NETWORK)
    report = run_check("t/f", check, run, seed="")
    result = report.results[-1]
    assert result.passed == (not words)
    assert re.search(words, result.reason), result.reason


def test_a_judge_that_has_no_memory_blames_nobody() -> None:
    def judge(*_: Any) -> None:
        raise MemoryError

    check = Check("f", len, lambda *_: [1], judge, (Case("a", 1),))
    with pytest.raises(MemoryError):
        run_check("t/f", check, lambda *_: Observed([1]), seed="")


def test_replicas_that_differ_are_wrong() -> None:
    with pytest.raises(Wrong, match="x differs between rank 0 and rank 1"):
        same_on_all_ranks(Case("2 ranks", 2), [], [{"x": 1.0}, {"x": 1.5}])
