"""What decides a case besides its values."""

import re
from dataclasses import replace

import pytest

from course_lib.checking import NETWORK, Case, Check, Form, Observed, Wrong, run_check
from course_lib.checking.run_check import agreed
from course_lib.limits import MAX_EMPTY
from course_lib.ranks import Event, Trace
from course_lib.ranks.trace.event import computation


def nothing(case: Case, inputs, outputs) -> None:
    """Find nothing wrong."""


def operation(rank: int, kind: str, size: int = 8) -> Event:
    return Event(rank, kind, (0, 1), None, size, "float32", 1, 0.0, 1.0, "here")


APART = Case("two groups", 2, form=Form(groups=((0,), (1,))))
HALF = [computation(0, 0.0, 1e-3), computation(1, 0.0, 2e-3)]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("case", "events", "message"),
    [
        (Case("a", 2), [*HALF[1:], computation(0, 0.0, 2e-3)], ""),
        (Case("a", 2), HALF, "rank 0 computes for only 1 of the 2 ms .* do not skip or shorten it"),
        (Case("a", 2), [operation(1, "barrier", 0)] * (MAX_EMPTY + 1), "operations that carry no"),
        (APART, [operation(1, "all_reduce")], "with ranks 0, 1 in all_reduce.* Only ranks 1 are"),
    ],
)
def test_what_the_ranks_did_is_judged_besides_their_values(case, events, message):
    computes = (
        (lambda _, inputs: [{1e-3: seconds} for seconds in inputs])
        if events[0].kind == "compute"
        else None
    )
    check = Check("f", len, lambda *_: [2, 2], nothing, (case,), computes=computes)
    run = lambda *_: Observed([1, 1], Trace(events, 2), NETWORK)
    report = run_check("t/f", check, run, seed="")
    result = report.results[-1]
    assert result.passed == (not message)
    assert re.search(message, result.reason), result.reason


def test_a_judge_that_has_no_memory_blames_nobody() -> None:
    def judge(*_) -> None:
        raise MemoryError

    check = Check("f", len, lambda *_: [1], judge, (Case("a", 1),))
    with pytest.raises(MemoryError):
        run_check("t/f", check, lambda *_: Observed([1]), seed="")


def looks(otherwise: str = "", **mistakes: str) -> Wrong:
    return Wrong(
        "no", otherwise, mistakes={mistake.replace("_", " "): h for mistake, h in mistakes.items()}
    )


@pytest.mark.parametrize(
    ("findings", "hints"),
    [
        # Both look right in the first case; the second case tells which one is.
        ([looks(sum="S.", mean="M."), looks(sum="", mean="M.")], ["M.", "M."]),
        # One that explains only some cases is not named.
        ([looks(sum="S."), looks("Else.", sum="")], ["", "Else."]),
        # A mistake need not explain a case that it could not explain.
        ([looks(sum="S."), looks(mean="M."), looks("Else.")], ["S.", "M.", "Else."]),
    ],
)
def test_a_mistake_is_named_if_it_explains_what_it_could(findings, hints):
    assert agreed(findings) == hints


def test_a_part_that_no_case_decides_is_not_earned_by_failing() -> None:
    """As if a check lost the cases of a part, or ran out of time before them."""

    def judge(case: Case, inputs, outputs) -> None:
        if case.name in outputs:
            raise Wrong("it fails")

    cases = tuple(
        Case(name, 1, decides=(part,)) for name, part in (("1", "a"), ("2", "a"), ("3", "b"))
    )
    check = Check(
        "f", print, lambda case, generator: [0], judge, cases, worth=dict.fromkeys("abc", 1)
    )

    def parts(*failing: str, of: Check = check) -> dict[str, bool]:
        return run_check("t/f", of, lambda *_: Observed(failing), seed="").parts

    assert parts("1", "2", "3") == {"a": False, "b": False, "c": False}
    assert parts("2") == {"a": False, "b": True, "c": False}
    assert parts("3") == {"a": True, "b": False, "c": False}
    assert parts("1", of=replace(check, cases=cases[:1])) == dict.fromkeys("abc", False)
