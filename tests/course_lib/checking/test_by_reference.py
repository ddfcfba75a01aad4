"""`by_reference`: values, effects, communication, forms and points, on simulated ranks."""

import itertools
import os
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from course_lib.checking import (
    Allowed,
    Case,
    Expectation,
    Form,
    Observed,
    Variety,
    Wrong,
    by_reference,
    run_check,
)
from course_lib.checking.by_reference import expect_same_bits
from course_lib.checking.cases import AuthorError, case_generator
from course_lib.checking.local import LocalRunner
from course_lib.checking.mutants import passes
from course_lib.checking.on_ranks.given import RankProgram

PLAIN, IN_GROUPS, TRANSPOSED = Form(), Form(((0, 3), (1, 2))), Form(layout="transposed")


def total(x: torch.Tensor, group=None) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def by_gathering(x: torch.Tensor, group=None) -> torch.Tensor:
    copies = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(copies, x, group=group)
    return torch.stack(copies).sum(0)


def program(function, inputs, case):
    return {"the total": function(inputs["x"], group=case.group)}


def draw(d):
    return [{"x": d.randn(3, 2)} for _ in d.ranks]


def mean(inputs, me: int, expected):
    return {"the total": expected[me]["the total"] / len(inputs)}


def sum_task(*cases: Case, **changes):
    """Return the check of `total` on these cases; by default, on two, three and four ranks."""
    settings = {
        "reference": f"{__name__}:total",
        "program": program,
        "draw": draw,
        "mistakes": {"the mean": mean},
        "worth": {"values": 3, "communication": 1},
    }
    check = by_reference("total", **settings | changes)
    plain = [case(f"{k} ranks", k) for k in (2, 3, 4)]
    return replace(check, cases=cases or (*plain[:2], replace(plain[2], form=IN_GROUPS)))


def case(name: str, k: int, form: Form = PLAIN, **options) -> Case:
    return Case(name, k, {"seed": 0, "features": ()}, form, difficulty=(k,), **options)


def run(function, check=None):
    with LocalRunner(function) as runner:
        return run_check("t/total", check or sum_task(), runner, seed="1")


def test_a_right_sum_by_a_forbidden_way_keeps_the_points_of_its_values() -> None:
    report = run(by_gathering)
    assert report.parts == {"values": True, "communication": False}
    assert report.fraction == 0.75
    assert "calls 1 × all_gather, 24 B (test_by_reference.py, line" in report.reason
    assert "all_gather" in report.trace.plot().alt
    assert run(by_gathering, sum_task(allowed=Allowed(kinds=("all_gather",), calls=1))).passed


def test_sending_nothing_earns_nothing_and_without_shares_a_task_is_all_or_nothing() -> None:
    assert run(lambda x, group=None: x.clone()).fraction == 0
    assert run(by_gathering, sum_task(worth=None)).fraction == 0


def total__unwritten(x: torch.Tensor, group=None) -> torch.Tensor:
    raise NotImplementedError


def not_for_groups(x: torch.Tensor, group=None) -> torch.Tensor:
    raise NotImplementedError("not for groups")


@pytest.mark.parametrize(
    ("function", "form", "message"),
    [
        (passes(total__unwritten).function, PLAIN, "not written yet: NotImplementedError (<total"),
        (not_for_groups, PLAIN, "raised NotImplementedError: not for groups"),
        (lambda x, group=None: total(x, group) / dist.get_world_size(group), PLAIN, "the mean"),
        (lambda x, group=None: x.clone(), PLAIN, "equals the result of this rank alone"),
        (lambda x, group=None: total(x), IN_GROUPS, "equals the result over all ranks, not over"),
        (lambda x, group=None: total(x), IN_GROUPS, "In one group of all ranks, the same case"),
        (lambda x, group=None: (total(x, group), x.zero_())[0], PLAIN, "changes x"),
        # An effect that explains a wrong value is told before the value.
        (lambda x, group=None: total(x.mul_(2), group), PLAIN, "changes x"),
        (lambda x, group=None: total(x, group).requires_grad_(), PLAIN, "carries the graph"),
        (lambda x, group=None: total(x, group).add_(torch.empty_like(x)), PLAIN, "torch.empty"),
        (lambda x, group=None: total(x, group).bfloat16().to(x.dtype), PLAIN, "to bfloat16"),
        (lambda x, group=None: total(x.view(-1), group).view(x.shape), TRANSPOSED, "With contigu"),
        (lambda x, group=None: (torch.rand(1), total(x, group))[1], PLAIN, "of the torch gener"),
        (lambda x, group=None: (torch.set_grad_enabled(False), total(x, group))[1], PLAIN,
         "disabled"),
        (lambda x, group=None: (torch.set_default_dtype(torch.float64), total(x, group))[1], PLAIN,
         "changes torch's default dtype"),
        (lambda x, group=None: object(), PLAIN, "the total is of type object; return tensors"),
        (lambda x, group=None: (dist.all_reduce(x.clone(), async_op=True), total(x, group))[1],
         PLAIN, "never waits for the handle of all_reduce"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(function, form: Form, message: str) -> None:
    report = run(function, sum_task(case("a case", 4, form)))
    assert message in report.reason


def test_a_mistake_is_named_only_if_it_explains_all_cases_that_it_could() -> None:
    def mean_of_two(x: torch.Tensor, group=None) -> torch.Tensor:
        k = dist.get_world_size(group)
        return total(x, group) / (2 if k < 4 else 1)

    two, three = case("2 ranks", 2), case("3 ranks", 3)
    assert "equals the mean" in run(mean_of_two, sum_task(two)).reason
    assert "equals" not in run(mean_of_two, sum_task(two, three)).reason


def test_replicas_that_differ_are_wrong() -> None:
    with pytest.raises(Wrong, match="x differs between rank 0 and rank 1"):
        expect_same_bits(Case("2 ranks", 2), [{"x": 1.0}, {"x": 1.5}])


# The ranks' side ----------------------------------------------------------------------------------

ALONE = {"form": {**vars(Form()), "seed": None}, "own": {"x": torch.ones(2)}}


def test_memory_is_filled_while_a_program_runs_and_no_longer() -> None:
    before = torch.get_deterministic_debug_mode()
    memory = []

    def look(x: torch.Tensor, group=None) -> torch.Tensor:
        memory.extend([torch.empty(3), torch.empty(2, dtype=torch.int64)])
        raise ValueError("seen")

    with pytest.raises(ValueError, match="seen"):
        RankProgram(program)(look, ALONE)
    assert memory[0].isnan().all()
    assert (memory[1] == torch.iinfo(torch.int64).max).all()
    assert torch.get_deterministic_debug_mode() == before


def test_warnings_are_shown_again_when_the_program_has_ended() -> None:
    def warns(x: torch.Tensor, group=None) -> torch.Tensor:
        warnings.warn("in a case", stacklevel=1)
        return torch.tensor(x)  # PyTorch warns here

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        RankProgram(program)(warns, ALONE)
        assert not caught
        warnings.warn("afterwards", stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["afterwards"]


def total__with_a_number(x: torch.Tensor, group=None) -> torch.Tensor:
    copies = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather([*copies, 1], x, group=group)
    return x


def test_a_tracebacks_lines_are_the_students() -> None:
    detail = run(passes(total__with_a_number).function).results[0].detail
    assert "in total" in detail
    for place in ("site-packages", "course_lib", "test_by_reference.py"):
        assert place not in detail


# What the check cannot expect ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "output",
    [None, 1, [], {}, {"value": 1}, {"value": 1, "left": [["no such", "x"]]},
     {"value": 1, "left": 7}, {"value": {"the total": 10**300}, "left": {}},
     {"refused": 1}, {"refused": "it is no list"}, {"value": [[]], "left": {}}],
)  # fmt: skip
def test_forged_answers_cost_their_case_and_nothing_else(output) -> None:
    report = run_check(
        "t/total", sum_task(), lambda _, case, __: Observed([output] * case.world_size), seed="1"
    )
    assert len(report.results) == 3
    assert not any(result.passed for result in report.results)
    assert not any(result.trouble for result in report.results)


def test_what_escapes_a_judge_is_kept_for_the_author() -> None:
    def careless(case: Case, inputs, expected, values) -> None:
        raise KeyError(values[0]["no such key"])

    result = run(total, sum_task(judge=careless)).results[0]
    assert result.reason.startswith("the answer has a form that this check does not expect")
    assert "no such key" in result.trouble


def test_a_demand_that_fails_costs_its_case_and_is_kept_for_the_author() -> None:
    def careless(case: Case, observed: Observed, trace) -> None:
        if case.world_size == 2:
            raise ZeroDivisionError

    report = run(total, sum_task(expects=[Expectation(careless)]))
    assert [result.passed for result in report.results] == [False, True, True]
    assert report.results[0].reason == "the messages have a form that this check does not expect"
    assert "ZeroDivisionError" in report.results[0].trouble
    assert report.parts == {"values": True, "communication": False}


def test_each_part_of_the_points_that_is_missed_is_told_once() -> None:
    def missing(sentence: str) -> Expectation:
        def test(case: Case, observed: Observed, trace) -> None:
            raise Wrong(sentence, f"Mend {sentence}.")

        return Expectation(test, part=sentence.partition(" ")[0])

    demands = [missing("time is long"), missing("time is short"), missing("memory is short")]
    check = sum_task(expects=demands, worth={"values": 1, "time": 1, "memory": 1})
    report = run(total, check)
    assert report.reason == (
        "time is long. Mend time is long. Also: memory is short. Mend memory is short."
    )
    assert report.parts == {"values": True, "time": False, "memory": False}


def test_after_two_cases_out_of_time_a_check_stops_and_says_so():
    def endless(x: torch.Tensor, group=None) -> None:
        while True:
            pass

    report = run(endless, replace(sum_task(), seconds=0.5))
    assert "limit of 0.5 s" in report.results[1].reason
    assert "not run, because 2 earlier cases" in report.results[2].reason
    assert "Ranks(…, timeout" not in str(report)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: os._exit(3), "share: it called exit with status 3"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        (
            lambda: dist.recv(torch.ones(1), src=(dist.get_rank() + 1) % 3),
            "waits in recv from rank 1",
        ),
    ],
)
def test_a_failure_costs_its_case_and_the_rest_is_still_examined(function, message):
    def careful(x: torch.Tensor, group=None):
        return function() if dist.get_world_size() == 3 else total(x, group)

    report = run(careful)
    assert [result.passed for result in report.results] == [True, False, True]
    assert message in report.reason


def test_inputs_that_cannot_be_sent_are_the_authors_mistake() -> None:
    check = replace(sum_task(), inputs=lambda case, _: [{"x": object()}] * case.world_size)
    check = replace(check, prepare=lambda *_: None)
    with pytest.raises(AuthorError, match=r"'2 ranks': .* type object"):
        run(total, check)


# Two calls on the same ranks ----------------------------------------------------------------------


def again(name: str, k: int, form: Form = PLAIN) -> Case:
    return case(f"{name}, again", k, form, after=case(name, k))


def into_one_buffer(x: torch.Tensor, group=None, buffers={}):  # noqa: B006
    buffer: torch.Tensor = buffers.setdefault(dist.get_rank(), torch.empty_like(x))
    dist.all_reduce(buffer.copy_(x), group=group)
    return buffer


def in_the_first_group(x: torch.Tensor, group=None, groups={}):  # noqa: B006
    return total(x, groups.setdefault(dist.get_rank(), group))


def adding_its_calls():
    """Return a function that ranks copy for each run, with what it keeps."""

    def counted(x: torch.Tensor, group=None, calls: list[int] = [-1]) -> torch.Tensor:  # noqa: B006
        calls[0] += 1
        return total(x, group) + calls[0]

    return counted


def destroying_the_group(x: torch.Tensor, group=None) -> torch.Tensor:
    result = total(x, group)
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize(
    ("function", "form", "message"),
    [
        (destroying_the_group, PLAIN, "the process group was destroyed or replaced"),
        (into_one_buffer, PLAIN, "this call has changed the result of an earlier call"),
        (in_the_first_group, Form(((0, 2), (1,))), "pass group=group to every call"),
        (adding_its_calls(), PLAIN, "something is kept from the call before"),
    ],
)
def test_what_is_kept_from_one_call_to_the_next_is_found(function, form, message):
    check = sum_task(again("3 ranks", 3, form))
    assert run(total, check).passed
    assert message in run(function, check).reason


def gathering_in_call(number: int):
    """Return `total`, which in this one of its calls gathers as well."""

    def counted(x: torch.Tensor, group=None, calls: list[int] = [0]) -> torch.Tensor:  # noqa: B006
        calls[0] += 1
        if calls[0] == number:
            dist.all_gather([x.clone(), x.clone()], x, group=group)
        return total(x, group)

    return counted


def behind_a_barrier(x: torch.Tensor, group=None) -> torch.Tensor:
    dist.barrier()
    return by_gathering(x, group)


@pytest.mark.parametrize(
    ("function", "passed"),
    [
        (by_gathering, False),
        (gathering_in_call(1), True),
        (gathering_in_call(2), False),
        (behind_a_barrier, True),  # nobody knows which of three begins the second call
    ],
)
def test_of_two_calls_what_the_second_one_sends_is_judged(function, passed: bool) -> None:
    assert run(function, sum_task(again("2 ranks", 2))).passed == passed


# Cases --------------------------------------------------------------------------------------------


def test_a_draw_gives_few_features_and_groups_of_no_even_spacing() -> None:
    check = by_reference(
        "total",
        reference=f"{__name__}:total",
        program=program,
        draw=lambda d: [{"x": d.randn(3, 2), "late": d.rank("rank {} is late")} for _ in d.ranks],
        variety=Variety(ranks=(3, 4, 5)),
        seeds=range(60),
    )
    names = [case.name for case in check.cases]
    assert len(set(names)) == len(names)
    assert all(len(case.parameters["features"]) <= 3 for case in check.cases)
    grouped = [case for case in check.cases if case.form.groups]
    assert grouped
    for drawn in grouped:
        around, inner = drawn.groups
        assert sorted([*around, *inner]) == list(range(drawn.world_size))
        assert inner[-1] - inner[0] == len(inner) - 1 and 0 in around
        assert "in two groups" in drawn.name
    assert check.hidden("a") != check.hidden("b") and check.hidden("a") == check.hidden("a")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_of_half_precisions_add_up_without_rounding(dtype: str) -> None:
    check = sum_task(draw=lambda d: [{"x": 300 * d.randn(9, 5)} for _ in d.ranks])
    drawn = case("4 ranks", 4, Form(dtype=dtype))
    values = [
        rank_input["own"]["x"]
        for rank_input in check.inputs(drawn, case_generator("1", "t", drawn))
    ]
    exact = sum(value.double() for value in values)
    for order in itertools.permutations(values):
        assert torch.equal(sum(order).double(), exact)
    assert len(torch.cat(values).unique()) > 20
