"""A right solution passes with every seed, and the allowed error is that of the arithmetic."""

import pytest
import torch

from course_lib.checking import Variety, by_reference, run_check
from course_lib.checking.cases import Wrong, case_generator
from course_lib.checking.local import LocalRunner
from course_lib.checking.rounding import bounds_from, moved_inputs
from course_lib.ranks import Ranks, per_rank
from tests.helpers.course_folders import needs_sources
from tests.helpers.solutions import checks_of, hidden_cases, mutants_in, solution_of, tasks


def right_solutions(folder, task: str):
    """Return the course's own solution of a task, and the others that must pass, by name."""
    others = [m for m in mutants_in(folder) if m.task == task and m.reason is None]
    return [("ours", solution_of(folder, task)), *((m.mistake, m.function) for m in others)]


def require_right(name, check, case, function, seeds):
    """Run a solution in a case that is drawn anew for each seed, and judge it."""
    program = check.program  # alone: the ranks do not need the judge, and some cannot be sent

    def run_all(own_inputs):
        return [program(function, own_input) for own_input in own_inputs]

    inputs = [check.inputs(case, case_generator(seed, name, case)) for seed in seeds]
    by_rank = per_rank([list(of_rank) for of_rank in zip(*inputs, strict=True)])
    with Ranks(case.world_size, on="simulated", network=case.network, timeout=600) as ranks:
        results = ranks.run(run_all, by_rank)
    for seed, drawn, outputs in zip(seeds, inputs, zip(*results, strict=True), strict=True):
        try:
            check.judge(case, drawn, outputs)
        except Wrong as wrong:
            pytest.fail(f"{case.name}, seed {seed}: {wrong}")


@pytest.mark.large
@needs_sources
@pytest.mark.parametrize(("folder", "task"), tasks())
def test_right_solutions_pass_with_other_seeds(folder, task: str) -> None:
    check, right = checks_of(folder)[task], right_solutions(folder, task)
    for case in (*check.cases, *hidden_cases(folder, task)):
        for i, (_, function) in enumerate(right):
            count = 12 if case.form.dtype in ("bfloat16", "float16") else 4
            if seeds := [f"sample {number}" for number in range(i, count, len(right))]:
                require_right(f"{folder.name}/{task}", check, case, function, seeds)


DRAWN_SEEDS = 300


@pytest.mark.large
@needs_sources
@pytest.mark.parametrize(("folder", "task"), tasks())
def test_a_reference_runs_in_every_case_that_is_drawn(folder, task: str) -> None:
    """A draw makes no case that is illegal."""
    check, name = checks_of(folder)[task], f"{folder.name}/{task}"
    if check.drawn is None:
        pytest.skip("its cases are listed")
    for case in map(check.drawn, range(DRAWN_SEEDS)):
        check.prepare(case, check.inputs(case, case_generator("tests", name, case)))


X = torch.linspace(0, 3, 5, dtype=torch.float64)


def allowed(function, inputs, dtype: str) -> dict[str, float]:
    """Return the error that a right value of the function may have."""
    return bounds_from(function(inputs), [function(m) for m in moved_inputs(inputs, dtype)], dtype)


def test_the_allowed_error_is_that_of_the_terms_where_they_cancel() -> None:
    inputs = [{"x": torch.tensor([3.0, 1.0])}, {"x": torch.tensor([-3.0, 1.0])}]

    def total(inputs):
        return {"sum": sum(rank_input["x"] for rank_input in inputs), "count": 2}

    # The sums are 0 and 2. The bound from them alone would be 16 units.
    for dtype, unit in (("bfloat16", 2.0**-8), ("float64", 2.0**-52)):
        bounds = allowed(total, inputs, dtype)
        assert 4 * 6 * unit <= bounds["sum"] <= 16 * 6.1 * unit
        assert bounds["count"] == 0


def test_a_number_may_be_added_up_in_float32_and_a_tensor_may_not() -> None:
    bounds = allowed(lambda inputs: {"loss": 3.0, "sum": inputs[0]["x"]}, [{"x": X}], "float64")
    assert 3 * 2.0**-24 < bounds["loss"] < 1e-5
    assert bounds["sum"] < 1e-13


def test_a_rank_may_round_its_own_mean() -> None:
    rows = [{"x": 1000 + rank + torch.linspace(-2, 2, 256)} for rank in range(2)]

    def variance(inputs):
        return {"variance": torch.cat([rank_input["x"].double() for rank_input in inputs]).var()}

    rounded = [{"x": rows[0]["x"].double() * (1 + 2.0**-24)}, rows[1]]
    error = abs(variance(rounded)["variance"] - variance(rows)["variance"])
    assert allowed(variance, rows, "float32")["variance"] >= 8 * error > 1e-6


SAME = by_reference(
    "same",
    reference="torch:clone",  # the ranks would import this file, and all assignments with it
    program=lambda function, own, given: {"x": function(own["x"])},
    draw=lambda d: [{"x": d.randn(64)}],
    variety=Variety(ranks=(1,), dtypes=("bfloat16",), layouts=(), calls=False),
    seeds=(1, 2),
)


def report_on(function):
    with LocalRunner(function) as runner:
        return run_check("t/same", SAME, runner, seed="1")


def test_half_precision_still_finds_what_no_rounding_explains() -> None:
    assert report_on(lambda x: (x.double() * (1 + 2.0**-8)).bfloat16()).passed
    assert not report_on(lambda x: x * 1.2).passed
    assert not report_on(lambda x: x + 0.3).passed
