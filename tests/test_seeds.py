"""A right solution passes with every seed; a verdict near the allowed error is not left to one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from course_lib.checking import Case, Form, Observed, equals, run_check, task
from course_lib.checking.cases import case_generator
from course_lib.checking.judges import rounding_errors
from tests.helpers.course_folders import SOURCES, assignments, needs_sources
from tests.helpers.seeds import HALVES, cases_of, findings, right_solutions
from tests.helpers.solutions import checks_of, readable

READABLE = readable(assignments(SOURCES))


@pytest.mark.large
@needs_sources
@pytest.mark.parametrize(
    ("folder", "task"),
    [(folder, task) for folder in READABLE for task in checks_of(folder)],
    ids=lambda value: getattr(value, "name", value),
)
def test_right_solutions_pass_with_other_seeds(folder: Path, task: str) -> None:
    check, right = checks_of(folder)[task], right_solutions(folder, task)
    for case in cases_of(folder, task):
        for i, (words, function) in enumerate(right):
            count = 12 if case.form.dtype in HALVES else 4
            seeds = [f"sample {number}" for number in range(i, count, len(right))]
            for seed, wrong in findings(f"{folder.name}/{task}", check, case, function, seeds):
                assert wrong is None, f"{words}, {case.name}, seed {seed}: {wrong}"


@pytest.mark.parametrize("dtype", HALVES)
def test_numbers_of_half_precisions_add_up_without_rounding(dtype: str) -> None:
    def drawn(case: Case, generator: torch.Generator) -> list[Any]:
        return [{"x": 300 * torch.randn(9, 5, generator=generator)} for _ in range(4)]

    check = task("total", inputs=drawn, program=lambda *_: None, judges=[], cases=[])
    inputs = check.inputs(Case("4 ranks", 4, form=Form(dtype=dtype)), torch.Generator())
    values = [each["own"]["x"] for each in inputs]
    exact = sum(value.double() for value in values)
    for order in itertools.permutations(values):
        assert torch.equal(sum(order).double(), exact)
    assert len(torch.cat(values).unique()) > 20


def test_where_terms_cancel_a_right_answer_may_differ_by_more() -> None:
    def product(inputs: Any) -> Any:
        x = inputs[0]["x"]
        return {"product": x.double().prod(0).sum().to(x.dtype)}

    def rounded_in_each_step(x: torch.Tensor) -> torch.Tensor:
        return (x[0] * x[1] * x[2] * x[3]).sum()

    check = task(
        "product",
        inputs=lambda case, generator: [{"x": torch.randn(4, 1024, generator=generator)}],
        program=lambda function, mine, given: {"product": function(mine["x"])},
        judges=[equals(lambda case, inputs, me: product(inputs))],
        cases=[Case("1 rank", 1, form=Form(dtype="bfloat16"))],
    )
    (case,), apart = check.cases, 0
    for seed in range(40):
        inputs = check.inputs(case, case_generator(str(seed), "t/product", case))
        answer = check.program(rounded_in_each_step, inputs[0])
        right = product([inputs[0]["own"]])["product"]
        apart += not torch.allclose(answer["value"]["product"], right, rtol=3e-2, atol=3e-3)
        check.judge(case, inputs, [answer])
    assert apart


def test_the_allowed_error_is_that_of_the_terms_where_they_cancel() -> None:
    inputs = [{"x": torch.tensor([3.0, 1.0])}, {"x": torch.tensor([-3.0, 1.0])}]

    def total(moved: Any) -> Any:
        return {"sum": sum(each["x"] for each in moved), "count": 2}

    found = rounding_errors(total, inputs, torch.bfloat16)
    assert 6 * 2.0**-8 <= found["sum"] <= 8 * 6.1 * 2.0**-8
    assert found["count"] == 0
    assert rounding_errors(total, inputs, torch.float64)["sum"] < 1e-13


def test_a_rank_may_round_its_own_mean() -> None:
    rows = [{"x": 1000 + rank + torch.linspace(-2, 2, 256)} for rank in range(2)]

    def variance(moved: Any) -> Any:
        return {"variance": torch.cat([each["x"].double() for each in moved]).var()}

    rounded = [{"x": rows[0]["x"].double() * (1 + 2.0**-24)}, rows[1]]
    error = abs(variance(rounded)["variance"] - variance(rows)["variance"])
    assert rounding_errors(variance, rows, torch.float32)["variance"] >= 8 * error > 1e-6


def test_half_precision_still_finds_what_no_rounding_explains() -> None:
    check = task(
        "mean",
        inputs=lambda case, generator: [{"x": torch.randn(64, generator=generator)}] * 2,
        program=lambda function, mine, given: {"mean": function(mine["x"])},
        judges=[equals(lambda case, inputs, me: {"mean": inputs[me]["x"]})],
        cases=[Case("2 ranks", 2, form=Form(dtype="bfloat16"))],
    )

    def run(change: Any) -> bool:
        def runner(check: Any, case: Case, inputs: Any) -> Any:
            return Observed([check.program(change, each) for each in inputs])

        return run_check("t/mean", check, runner, seed="1").passed

    assert run(lambda x: (x.double() * (1 + 2.0**-8)).bfloat16())
    assert not run(lambda x: x * 1.2)
    assert not run(lambda x: x + 0.3)


@pytest.mark.parametrize(
    ("error", "refused", "passes"),
    [
        (2e-4, ["1"], True),  # near the allowed error, once
        (2e-4, ["1", "1, again 1"], False),
        (1e-1, ["1"], False),  # far from it
    ],
)
def test_one_case_near_the_allowed_error_is_tried_with_more_seeds(
    error: float, refused: list[str], passes: bool
) -> None:
    """The drawn number tells the runner its seed: it answers wrongly for those in `refused`."""
    drawn: dict[float, str] = {}
    check = task(
        "same",
        inputs=lambda case, generator: [{"x": torch.rand((), generator=generator) + 1}],
        program=lambda function, mine, given: {"x": function(mine["x"])},
        judges=[equals(lambda case, inputs, me: {"x": inputs[me]["x"]})],
        cases=[Case("1 rank", 1), Case("1 rank, once more", 1)],
    )
    for seed in ("1", "1, again 0", "1, again 1"):
        (one, _) = check.cases
        (mine,) = check.inputs(one, case_generator(seed, "t/same", one))
        drawn[mine["own"]["x"].item()] = seed

    def runner(check: Any, case: Case, inputs: Any) -> Any:
        wrong = drawn.get(inputs[0]["own"]["x"].item()) in refused
        outputs = [check.program(lambda x: x * (1 + error * wrong), each) for each in inputs]
        return Observed(outputs)

    assert run_check("t/same", check, runner, seed="1").passed == passes
