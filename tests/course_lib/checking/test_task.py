"""`task`: values, effects, forms and points, on simulated ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_lib.checking import (
    Case,
    Check,
    CheckReport,
    Expectation,
    Form,
    Observed,
    equals,
    in_many_forms,
    only_calls,
    run_check,
    same_on_all_ranks,
    task,
)
from course_lib.checking.answers import ANYTHING, sees
from course_lib.checking.local import LocalRunner
from course_lib.checking.mutants import passes
from course_lib.checking.on_ranks.given import RankProgram


def inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    return [{"x": torch.randn(3, 2, generator=generator)} for _ in range(case.world_size)]


def program(total: Callable[..., Any], mine: Any, given: Any) -> Any:
    return {"the total": total(mine["x"], group=given.group)}


def right(case: Case, theirs: Any, me: int) -> Any:
    return {
        "the total": torch.stack([each["x"].double() for each in theirs])
        .sum(0)
        .to(theirs[me]["x"].dtype)
    }


def mean(case: Case, theirs: Any, me: int) -> Any:
    return {"the total": right(case, theirs, me)["the total"] / len(theirs)}


def sum_task(**changes: Any) -> Check:
    settings: dict[str, Any] = {
        "inputs": inputs,
        "program": program,
        "judges": [equals(right, {"the mean": mean}), same_on_all_ranks],
        "expects": [only_calls("all_reduce")],
        "worth": {"values": 3, "communication": 1},
        "cases": in_many_forms(*(Case(f"{k} ranks", k) for k in (1, 2, 3, 4))),
    }
    return task("total", **{**settings, **changes})


def run(function: Callable[..., Any], check: Check | None = None) -> CheckReport:
    with LocalRunner(function) as runner:
        return run_check("t/total", check or sum_task(), runner, seed="1")


def total(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def by_gathering(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    copies = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(copies, x, group=group)
    return torch.stack(copies).sum(0)


def test_a_right_function_gets_all_points() -> None:
    report = run(total)
    assert report.passed, str(report)
    assert report.fraction == 1


def test_a_right_sum_by_a_forbidden_way_keeps_the_points_of_its_values() -> None:
    report = run(by_gathering)
    assert not report.passed
    assert report.parts == {"values": True, "communication": False}
    assert report.fraction == 0.75
    assert "calls 1 × all_gather, 24 B (test_task.py, line" in report.reason
    assert report.trace is not None
    # One rank alone needs no time to communicate, and has no timeline.
    assert (report.trace.world_size, report.traced) == (2, "2 ranks")
    assert "all_gather" in report.trace.plot().alt


def test_sending_nothing_earns_nothing() -> None:
    report = run(lambda x, group=None: x.clone())
    assert report.fraction == 0


def test_without_shares_a_task_is_all_or_nothing() -> None:
    assert run(by_gathering, sum_task(worth=None)).fraction == 0


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x, group=None: total(x, group) / dist.get_world_size(group), "equals the mean"),
        (lambda x, group=None: total(x), "groups of the ranks"),
        (lambda x, group=None: (total(x, group), x.zero_())[0], "changes x"),
        # An effect that explains a wrong value is told before the value.
        (lambda x, group=None: total(x.mul_(2), group), "changes x"),
        (lambda x, group=None: total(x, group).requires_grad_(), "carries the graph"),
        (lambda x, group=None: total(x, group).add_(torch.empty_like(x)), "memory of torch.empty"),
        (lambda x, group=None: total(x, group).bfloat16().to(x.dtype), "rounded to bfloat16"),
        (lambda x, group=None: total(x.view(-1), group).view(x.shape), ".reshape works, and"),
        (lambda x, group=None: (torch.rand(1), total(x, group))[1], "numbers of the torch gener"),
        (lambda x, group=None: (torch.set_grad_enabled(False), total(x, group))[1], "disabled"),
        (lambda x, group=None: (torch.set_default_dtype(torch.float64), total(x, group))[1],
         "changes torch's default dtype"),
        (lambda x, group=None: object(), "the total is of type object; return tensors"),
        (lambda x, group=None: (dist.all_reduce(x.clone(), async_op=True), total(x, group))[1],
         "never waits for the handle of all_reduce"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(function: Any, words: str) -> None:
    report = run(function)
    if words == "groups of the ranks":  # right wherever the group is the world
        assert [result.passed for result in report.results] == [True, True, True, False]
    else:
        assert words in "\n".join([report.reason, *(each.detail for each in report.results)])


def test_memory_is_filled_while_a_program_runs_and_no_longer() -> None:
    before = torch.get_deterministic_debug_mode()
    seen: list[Any] = []

    def look(x: torch.Tensor, group: Any = None) -> torch.Tensor:
        seen.extend([torch.empty(3), torch.empty(2, dtype=torch.int64)])
        raise ValueError("seen")

    mine = {"form": {**vars(Form()), "seed": None}, "own": {"x": torch.ones(2)}}
    with pytest.raises(ValueError, match="seen"):
        RankProgram(program)(look, mine)
    assert seen[0].isnan().all()
    assert (seen[1] == torch.iinfo(torch.int64).max).all()
    assert torch.get_deterministic_debug_mode() == before


def test_warnings_are_shown_again_when_the_program_has_ended() -> None:
    def warns(x: torch.Tensor, group: Any = None) -> torch.Tensor:
        warnings.warn("in a case", stacklevel=1)
        return torch.tensor(x)  # PyTorch warns here

    mine = {"form": {**vars(Form()), "seed": None}, "own": {"x": torch.ones(2)}}
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        RankProgram(program)(warns, mine)
        assert not shown
        warnings.warn("afterwards", stacklevel=1)
    assert [str(each.message) for each in shown] == ["afterwards"]


def total__with_a_number(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    copies: list[Any] = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather([*copies, 1], x, group=group)
    return x


def test_a_tracebacks_lines_are_the_students() -> None:
    detail = run(passes(total__with_a_number).function).results[0].detail
    assert "in total" in detail
    assert "site-packages" not in detail
    assert "course_lib" not in detail


@pytest.mark.parametrize(
    "output",
    [None, 1, [], {}, {"value": 1}, {"value": 1, "left": [["no such", "x"]]},
     {"value": 1, "left": 7}, {"value": {"the total": 10**300}, "left": {}},
     {"refused": 1}, {"refused": "it is no list"}, {"value": [[]], "left": {}}],
)  # fmt: skip
def test_forged_answers_cost_their_case_and_nothing_else(output: Any) -> None:
    report = run_check("t/total", sum_task(), lambda *_: Observed([output] * 4), seed="1")
    assert len(report.results) == 4
    assert not any(result.passed for result in report.results)
    assert not any(result.trouble for result in report.results)


def test_what_escapes_a_judge_is_kept_for_the_author() -> None:
    @sees(ANYTHING)
    def careless(case: Case, theirs: Any, values: Any) -> None:
        raise KeyError(values[0]["no such key"])

    result = run(total, sum_task(judges=[careless])).results[0]
    assert result.reason.startswith("the answer has a form that this check does not expect")
    assert "no such key" in result.trouble


def test_after_two_cases_out_of_time_a_check_stops_and_says_so() -> None:
    def endless(x: torch.Tensor, group: Any = None) -> None:
        while True:
            pass

    report = run(endless, sum_task(seconds=0.5))
    assert "limit of 0.5 s" in report.results[1].reason
    assert "not run, because 2 earlier cases" in report.results[2].reason
    assert "Ranks(…, timeout" not in str(report)


def test_forms_are_drawn_evenly_and_a_case_keeps_its_own() -> None:
    own = Form(dtype="float64", layout="transposed")
    cases = in_many_forms(*(Case(str(k), k) for k in (1, 2, 3, 4, 5, 6)), Case("own", 2, form=own))
    assert cases[0].form == cases[1].form == Form()  # one rank, and the first that is not
    assert cases[-1].form == own
    assert {case.form.dtype for case in cases[1:4]} == {"float32", "float64", "bfloat16"}
    assert [bool(case.form.groups) for case in cases[:6]] == [
        False,
        False,
        False,
        True,
        False,
        True,
    ]
    for case in cases:
        members = sorted(rank for group in case.groups for rank in group)
        assert members == list(range(case.world_size))
    (first, second) = cases[5].groups
    assert first == (0, 1, 5)  # by no rule of evenly spaced ranks
    assert second == (2, 3, 4)


def test_an_expectation_that_fails_costs_its_case_and_is_kept_for_the_author() -> None:
    def careless(case: Case, observed: Observed, trace: Any) -> None:
        if case.world_size == 2:
            raise ZeroDivisionError

    report = run(total, sum_task(expects=[Expectation(careless)]))
    assert [result.passed for result in report.results] == [False, True, True, True]
    assert report.results[0].reason == "the messages have a form that this check does not expect"
    assert "ZeroDivisionError" in report.results[0].trouble
    assert report.parts == {"values": True, "communication": False}


def into_one_buffer(x: torch.Tensor, group: Any = None, kept: dict[int, Any] = {}) -> torch.Tensor:  # noqa: B006
    buffer: torch.Tensor = kept.setdefault(dist.get_rank(), torch.empty_like(x))
    dist.all_reduce(buffer.copy_(x), group=group)
    return buffer


def in_the_first_group(x: torch.Tensor, group: Any = None, kept: dict[int, Any] = {}) -> Any:  # noqa: B006
    return total(x, kept.setdefault(dist.get_rank(), group))


def destroying_the_group(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    result = total(x, group)
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize(
    ("function", "pair", "words"),
    [
        (destroying_the_group, (1, 1), "the process group was destroyed or replaced"),
        (into_one_buffer, (1, 1), "this call has changed the result of an earlier call"),
        (in_the_first_group, (2, 3), "pass group=group to every call"),
    ],
)
def test_what_is_kept_from_one_call_to_the_next_is_found_in_turn(
    function: Any, pair: tuple[int, int], words: str
) -> None:
    cases = (
        *in_many_forms(Case("1 rank", 1), Case("2 ranks", 2), dtypes=["float32"]),
        Case("3 ranks", 3),
        Case("3 ranks, one alone", 3, form=Form(((0, 2), (1,)))),
    )
    check = sum_task(cases=cases, in_turn=[pair])
    assert run(total, check).passed
    assert words in run(function, check).results[-1].reason


def test_a_tensor_may_be_withheld() -> None:
    check = sum_task(
        inputs=lambda case, generator: [
            {**each, "secret": torch.ones(3)} for each in inputs(case, generator)
        ],
        answers=lambda own, question: (own["secret"], 0.0),
        withheld=["secret"],
    )
    assert run(total, check).passed


def gathering_in_call(number: int) -> Callable[..., Any]:
    """Return `total`, which in this one of its calls gathers as well."""

    def counted(x: torch.Tensor, group: Any = None, calls: list[int] = [0]) -> torch.Tensor:  # noqa: B006
        calls[0] += 1
        if calls[0] == number:
            dist.all_gather([x.clone(), x.clone()], x, group=group)
        return total(x, group)

    return counted


def behind_a_barrier(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    dist.barrier()
    return by_gathering(x, group)


@pytest.mark.parametrize(
    ("function", "passed"),
    [
        (total, [True, True]),
        (by_gathering, [False, False]),
        (gathering_in_call(1), [False, True]),
        (gathering_in_call(2), [True, False]),
        (behind_a_barrier, [False, True]),  # nobody knows which of three begins the second call
    ],
)
def test_of_cases_in_turn_what_the_second_one_sends_is_judged(
    function: Any, passed: list[bool]
) -> None:
    check = sum_task(cases=[Case("2 ranks", 2)], in_turn=[(0, 0)])
    assert [result.passed for result in run(function, check).results] == passed
