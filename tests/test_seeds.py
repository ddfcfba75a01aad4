"""A right solution passes with every seed; a verdict near the allowed error is not left to one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from course_lib.checking import (
    Case,
    Check,
    CheckReport,
    Observed,
    Variety,
    by_reference,
    run_check,
)
from course_lib.checking.cases import case_generator
from course_lib.checking.local import LocalRunner
from course_lib.checking.rounding import bounds_from, moved_inputs
from tests.helpers.course_folders import SOURCES, assignments, needs_sources
from tests.helpers.solutions import checks_of, mutants_in, readable, solution_of

READABLE = readable(assignments(SOURCES))


@pytest.mark.large
@needs_sources
@pytest.mark.parametrize(
    ("folder", "task"),
    [(folder, task) for folder in READABLE for task in checks_of(folder)],
    ids=lambda value: getattr(value, "name", value),
)
def test_right_solutions_pass_with_other_seeds(folder: Path, task: str) -> None:
    check, name = checks_of(folder)[task], f"{folder.name}/{task}"
    others = [m.function for m in mutants_in(folder) if m.task == task and m.reason is None]
    for function in [solution_of(folder, task), *others]:
        with LocalRunner(function, "simulated", echo=None) as runner:
            for seed in ("sample 1", "sample 2", "sample 3", "sample 4"):
                report = run_check(name, check, runner, seed=seed, hidden=check.hidden(seed))
                assert report.passed, f"{function}, seed {seed}: {report}"


X = torch.linspace(0, 3, 5, dtype=torch.float64)


def allowed(function: Any, inputs: Any, dtype: str) -> dict[str, float]:
    """Return the error that a right value of the function may have."""
    return bounds_from(function(inputs), [function(m) for m in moved_inputs(inputs, dtype)], dtype)


def test_the_allowed_error_is_that_of_the_terms_where_they_cancel() -> None:
    inputs = [{"x": torch.tensor([3.0, 1.0])}, {"x": torch.tensor([-3.0, 1.0])}]

    def total(inputs: Any) -> Any:
        return {"sum": sum(rank_input["x"] for rank_input in inputs), "count": 2}

    bounds = allowed(total, inputs, "bfloat16")
    assert 6 * 2.0**-8 <= bounds["sum"] <= 16 * 6.1 * 2.0**-8
    assert bounds["count"] == 0
    assert 0 < allowed(total, inputs, "float64")["sum"] < 1e-13


def test_a_number_may_be_added_up_in_float32_and_a_tensor_may_not() -> None:
    bounds = allowed(lambda inputs: {"loss": 3.0, "sum": inputs[0]["x"]}, [{"x": X}], "float64")
    assert 3 * 2.0**-24 < bounds["loss"] < 1e-5
    assert bounds["sum"] < 1e-13


def test_a_rank_may_round_its_own_mean() -> None:
    rows = [{"x": 1000 + rank + torch.linspace(-2, 2, 256)} for rank in range(2)]

    def variance(inputs: Any) -> Any:
        return {"variance": torch.cat([rank_input["x"].double() for rank_input in inputs]).var()}

    rounded = [{"x": rows[0]["x"].double() * (1 + 2.0**-24)}, rows[1]]
    error = abs(variance(rounded)["variance"] - variance(rows)["variance"])
    assert allowed(variance, rows, "float32")["variance"] >= 8 * error > 1e-6


def same(x: torch.Tensor) -> torch.Tensor:
    return x


SAME = by_reference(
    "same",
    reference=f"{__name__}:same",
    program=lambda function, own, given: {"x": function(own["x"])},
    draw=lambda d: [{"x": d.randn(64)}],
    variety=Variety(ranks=(1,), dtypes=("bfloat16",), layouts=(), calls=False),
    seeds=(1, 2),
)


def report_on(function: Any) -> CheckReport:
    with LocalRunner(function) as runner:
        return run_check("t/same", SAME, runner, seed="1")


def test_half_precision_still_finds_what_no_rounding_explains() -> None:
    assert report_on(lambda x: (x.double() * (1 + 2.0**-8)).bfloat16()).passed
    assert not report_on(lambda x: x * 1.2).passed
    assert not report_on(lambda x: x + 0.3).passed


@pytest.mark.parametrize(
    ("error", "refused", "passes"),
    [
        (0.1, ["1"], True),  # near the allowed error, once
        (0.1, ["1", "1, again 1"], False),
        (0.5, ["1"], False),  # far from it
    ],
)
def test_one_case_near_the_allowed_error_is_tried_with_more_seeds(
    error: float, refused: list[str], passes: bool
) -> None:
    """The drawn numbers tell the runner its seed: it answers wrongly for those in `refused`."""
    seeds = {}
    (case, _) = SAME.cases
    for seed in ("1", "1, again 0", "1, again 1"):
        (rank_input,) = SAME.inputs(case, case_generator(seed, "t/same", case))
        seeds[rank_input["own"]["x"][0].item()] = seed

    def runner(check: Check, case: Case, inputs: Any) -> Observed:
        is_refused = seeds.get(inputs[0]["own"]["x"][0].item()) in refused
        return Observed([check.program(lambda x: x * (1 + error * is_refused), inputs[0])])

    assert run_check("t/same", SAME, runner, seed="1").passed == passes
