"""Equal failures are told once, and the simplest case of them is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from course_lib.checking import (
    Case,
    CaseResult,
    Check,
    CheckReport,
    Expectation,
    Form,
    Observed,
    Wrong,
    equals,
    run_check,
    task,
)
from course_lib.checking.causes import agreed, cause_of, in_common
from course_lib.checking.local import LocalRunner
from course_lib.checking.mutants import says
from course_lib.ranks import Trace
from course_lib.ranks.explain.errors import RankState
from course_lib.ranks.explain.failure import Failure, rank_error


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "rank 0: sum[0, 2]: expected 1.5, got -3 (6 of 6 elements differ). This equals X.",
            "rank 2: sum[11]: expected -2e-05, got 4 (1 of 9 elements differ). This equals X.",
        ),
        (
            "Ranks 0, 1 raised ValueError: no  (Cell In[3], line 2)",
            "Rank 2 raised ValueError: no  (Cell In[3], line 2)",
        ),
        (
            "Nobody goes on. Rank 0 waits in recv from rank 1 (8 B). Rank 1 waits in recv from "
            "rank 0 (8 B).",
            "Nobody goes on. Rank 0 waits in recv from rank 2 (1.5 KiB). Rank 1 waits in recv from "
            "rank 0 (1.5 KiB). Rank 2 waits in recv from rank 1 (1.5 KiB).",
        ),
        ("the ranks need 44.06 µs, expected 44.03 µs", "the ranks need 1.2 ms, expected 1 ms"),
        (
            "rank 0: tensor has dtype torch.float32, expected torch.bfloat16",
            "rank 1: tensor has dtype torch.float32, expected torch.float64",
        ),
    ],
)
def test_numbers_ranks_and_places_do_not_make_another_cause(one: str, other: str) -> None:
    assert cause_of(one) == cause_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("rank 0: loss: expected 1, got 2", "rank 0: gradient: expected 1, got 2"),
        ("rank 0 calls 1 × all_reduce, 8 B", "rank 0 calls 1 × broadcast, 8 B"),
        ("expected 1, got 2. This equals the sum.", "expected 1, got 2"),
    ],
)
def test_other_words_are_another_cause(one: str, other: str) -> None:
    assert cause_of(one) != cause_of(other)


def result(name: str, reason: str, difficulty: tuple[int, ...] = (), **more: object) -> CaseResult:
    fields = {"detail": f"all about {name}" if reason else "", **more}
    return CaseResult(name, not reason, reason, seconds=0.1, difficulty=difficulty, **fields)  # type: ignore[arg-type]


def test_a_cause_is_told_once_for_its_simplest_case() -> None:
    report = CheckReport(
        "t/f",
        (
            result("right", ""),
            result("hard", "rank 3: sum[7]: expected 1, got 2", (4, 4)),
            result("other", "rank 0 calls 2 × barrier", (2, 2)),
            result("simple", "rank 0: sum[0]: expected 3, got 4", (0, 2)),
            result("middle", "rank 1: sum[2]: expected 5, got 6", (1, 2)),
        ),
    )
    assert str(report).splitlines() == [
        "t/f: 1 of 5 cases passed",
        "  ✓ right",
        "  ✗ simple",
        "      rank 0: sum[0]: expected 3, got 4",
        "      all about simple",
        "      The same in 2 other cases: hard · middle",
        "  ✗ other",
        "      rank 0 calls 2 × barrier",
    ]
    assert report.reason == "rank 0: sum[0]: expected 3, got 4"


def test_of_hidden_cases_the_order_says_nothing_about_them() -> None:
    report = CheckReport(
        "t/f",
        (
            result("seen", "rank 0: wrong", (9, 9)),
            result("secret A", "It is wrong.", (5, 5), hidden=True),
            result("secret B", "It is wrong.", (0, 1), hidden=True),
            result("late", "not run: 2 cases before it took long", ran=False),
        ),
    )
    assert str(report).splitlines() == [
        "t/f: 0 of 4 cases passed",
        "  ✗ seen",
        "      rank 0: wrong",
        "      all about seen",
        "  ✗ hidden case 2",
        "      It is wrong.",
        "      The same in 1 other case: hidden case 3",
        "  ✗ late",
        "      not run: 2 cases before it took long",
    ]


@pytest.mark.parametrize(
    ("words", "where", "reason"),
    [
        ("", "Cell In[3], line 8", "not written yet: NotImplementedError (Cell In[3], line 8)"),
        ("not for groups", "", "Ranks 0, 1 raised NotImplementedError: not for groups"),
    ],
)
def test_a_function_that_is_not_written_is_told_in_a_line(
    words: str, where: str, reason: str
) -> None:
    def run(*_: object) -> Observed:
        failure = Failure("NotImplementedError", words, where, "Traceback …", False, None)
        states = [RankState(rank, "") for rank in (0, 1)]
        raise rank_error({0: failure, 1: failure}, 0, states, None)

    check = Check("f", len, lambda case, generator: [[]], lambda *_: None, (Case("a", 1),))
    report = run_check("t/f", check, run, seed="")
    assert report.reason == reason
    assert ("Traceback" in str(report)) == bool(words)


# Hints of several cases, which tell one story -----------------------------------------------------


def looks(otherwise: str = "", **known: str) -> Wrong:
    return Wrong("no", otherwise, known={words.replace("_", " "): h for words, h in known.items()})


def test_what_a_passed_case_rules_out_is_not_named() -> None:
    findings = [looks("Else.", sum="S.", mean="M."), looks(sum="S.", mean="M.")]
    assert agreed(findings, {"sum"}) == ["M.", "M."]
    assert agreed(findings, {"sum", "mean"}) == ["Else.", ""]


@pytest.mark.parametrize(
    ("findings", "hints"),
    [
        ([looks(sum="S.", mean="")], ["S."]),
        # Both look right in the first case; the second case tells which one is.
        ([looks(sum="S.", mean="M."), looks(sum="", mean="M.")], ["M.", "M."]),
        # One that explains only some cases is not named.
        ([looks(sum="S."), looks("Else.", sum="")], ["", "Else."]),
        (
            [looks(sum="S.", mean=""), looks(sum="S."), looks(sum="", mean="M."), looks(mean="")],
            ["", "", "", ""],
        ),
        # A hint that all cases have is better than one that explains some.
        ([looks("Step 1.", sum="S."), looks("Step 2.", sum="")], ["Step 1.", "Step 2."]),
        # A mistake need not explain a case that it could not explain.
        ([looks(sum="S."), looks(mean="M."), looks("Else.")], ["S.", "M.", "Else."]),
    ],
)
def test_a_mistake_is_named_if_it_explains_what_it_could(
    findings: list[Wrong], hints: list[str]
) -> None:
    assert agreed(findings) == hints


PLAIN = [Case("plain", 2, {}), Case("large", 2, {})]
TRANSPOSED = Case("a (transposed)", 2, {}, Form(layout="transposed"))
STRIDED = Case("b (float64, strided)", 4, {}, Form(layout="strided", dtype="float64"))
GROUPS = Form(layout="strided", dtype="float64", groups=((0, 1), (2, 3)))


@pytest.mark.parametrize(
    ("failed", "passed", "words"),
    [
        ([TRANSPOSED, STRIDED], PLAIN, "tensors that are not contiguous"),
        (
            [replace(STRIDED, form=GROUPS), replace(STRIDED, name="c (strided)", form=GROUPS)],
            [*PLAIN, STRIDED],
            "several groups of ranks",
        ),
        (
            [replace(STRIDED, form=GROUPS), replace(STRIDED, name="c (float64)", form=GROUPS)],
            PLAIN,
            "",  # either may be the reason
        ),
        ([TRANSPOSED, STRIDED], [*PLAIN, replace(STRIDED, name="c (strided)")], ""),
        ([TRANSPOSED, replace(TRANSPOSED, name="a (transposed), after ‘plain’")], PLAIN, ""),
        # Its tensors have one dimension: they are contiguous, and its name does not say otherwise.
        ([TRANSPOSED, replace(STRIDED, name="b (float64)")], PLAIN, ""),
    ],
)
def test_failed_cases_have_in_common_what_no_passed_one_has(
    failed: list[Case], passed: list[Case], words: str
) -> None:
    assert in_common(failed, passed) == words


@pytest.mark.parametrize("known", [None, "refuted", "named"])
def test_a_report_says_which_cases_alone_fail_unless_a_known_mistake_explains_them(
    known: str | None,
) -> None:
    def zero(case: Case, inputs: Sequence[Any], me: int) -> Any:
        return {"total": 0.0} if known == "refuted" or case.form.groups else {}

    mistake = {"zero": zero} if known else {}
    grouped = Form(groups=((0,), (1,)))
    cases = [Case(f"2 ranks, x = {x}", 2, {"x": x}) for x in (1, 2)]
    check = task(
        "total",
        inputs=lambda case, _: [{"x": float(case.parameters["x"])}] * 2,
        program=lambda function, mine, given: {"total": function(mine["x"], given.group)},
        judges=[equals(lambda case, inputs, me: {"total": inputs[me]["x"]}, mistake)],
        cases=[*cases, *(replace(c, name=f"{c.name}, in groups", form=grouped) for c in cases)],
    )
    with LocalRunner(lambda x, group: x if group is None else 0.0) as runner:
        report = run_check("t/total", check, runner, seed="1")
    only = "All failing cases, and no passing case, have several groups of ranks."
    assert [result.passed for result in report.results] == [True, True, False, False]
    named = known == "named"
    assert report.only == ("" if named else only)
    assert (only in str(report)) == says(report, only) == (not named)
    assert ("This equals zero." in report.reason) == named


def test_a_part_that_no_case_decides_is_not_earned_by_failing() -> None:
    """As if a check lost the cases of a part, or ran out of time before them."""

    def judge(case: Case, inputs: Any, outputs: Any) -> None:
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


def test_each_part_of_the_points_that_is_missed_is_told_once() -> None:
    def missing(words: str) -> Expectation:
        def test(case: Case, observed: Observed, trace: Trace) -> None:
            raise Wrong(words, f"Mend {words}.")

        return Expectation(test, part=words.partition(" ")[0])

    check = task(
        "same",
        inputs=lambda case, _: [{"x": 1.0}],
        program=lambda function, mine, given: {"x": function(mine["x"])},
        judges=[equals(lambda case, inputs, me: {"x": 1.0})],
        expects=[missing("time is long"), missing("time is short"), missing("memory is short")],
        worth={"values": 1, "time": 1, "memory": 1},
        cases=[Case("1 rank", 1)],
    )
    with LocalRunner(lambda x: x) as runner:
        report = run_check("t/same", check, runner, seed="1")
    assert report.reason == (
        "time is long. Mend time is long. Also: memory is short. Mend memory is short."
    )
    assert report.parts == {"values": True, "time": False, "memory": False}
