"""No answer of a rank, in any check of any assignment, breaks a judge or loses another case.

A right answer is taken, and something in it is replaced, left out, added or put elsewhere; or the
answer is something else altogether. Only the case that it was given in may fail.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from course_lib.checking import Case, Check, Observed, run_check
from course_lib.checking.local import LocalRunner
from course_lib.checking.report import CaseResult
from course_lib.ranks.wire import Plain, decode, encode
from tests.helpers.course_folders import SOURCES, assignments, needs_sources
from tests.helpers.solutions import checks_of, readable, solution_of

pytestmark = needs_sources

TASKS = [
    pytest.param(folder, task, id=f"{folder.name}-{task}")
    for folder in readable(assignments(SOURCES))
    for task in checks_of(folder)
    if task != "train"  # its judge declares no form, so an odd answer may break it, and is wrong
]

NUMBERS = st.one_of(
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63, -(2**63), 2**1023, 2**1024 - 1, -(2**1024 - 1), 10**9]),
    st.floats(),
)
DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64),
]
FILLS = st.sampled_from([0.0, 1.0, -1.0, float("nan"), float("inf"), 100.0])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype, full = draw(st.sampled_from(DTYPES)), torch.full(shape, draw(FILLS))
    return (full if dtype.is_floating_point else full.nan_to_num(7.0)).to(dtype)


LEAVES = st.one_of(st.none(), NUMBERS, st.text(max_size=5), tensors())
PLAIN = st.recursive(
    LEAVES,
    lambda below: st.one_of(
        st.lists(below, max_size=4),
        st.lists(below, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=5), below, max_size=4),
    ),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the way to everything in a plain value, to itself first."""
    paths = [path]
    if isinstance(value, dict):
        for key, item in value.items():
            paths += places(item, (*path, key))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            paths += places(item, (*path, i))
    return paths


def thawed(value: Any) -> Any:
    """Return the value with lists for tuples, which can be changed."""
    if isinstance(value, dict):
        return {key: thawed(item) for key, item in value.items()}
    return [thawed(item) for item in value] if isinstance(value, list | tuple) else value


@st.composite
def broken(draw: st.DrawFn, right: Plain) -> Any:
    """Draw an answer that is like `right` but for one thing."""
    value = thawed(copy.deepcopy(right))
    path = draw(st.sampled_from(places(value)))
    if not path:
        return draw(PLAIN)
    *above, last = path
    holder = value
    for key in above:
        holder = holder[key]
    item, change = holder[last], draw(st.sampled_from(["remove", "twice", "replace", "replace"]))
    if change == "remove":
        del holder[last]
    elif change == "twice" and isinstance(holder, list):
        holder.append(item)
    elif change == "twice":
        holder[draw(st.text(max_size=5))] = item
    else:
        replacements = [draw(PLAIN), [item], item[:0] if isinstance(item, list | str) else {}]
        if isinstance(item, torch.Tensor):
            replacements.append(item.to(draw(st.sampled_from(DTYPES))))
        holder[last] = draw(st.sampled_from(replacements))
    return value


@cache
def right_answers(folder: Path, task: str) -> dict[str, Observed]:
    """Return what the solution gives in every public case, by the case's name."""
    check, observed = checks_of(folder)[task], {}
    with LocalRunner(solution_of(folder, task), echo=None) as runner:

        def keep(check: Check, case: Case, inputs: Sequence[Plain]) -> Observed:
            observed[case.name] = runner(check, case, inputs)
            return observed[case.name]

        report = run_check(f"{folder.name}/{task}", check, keep, seed="any")
    assert report.passed, str(report)
    return observed


@pytest.mark.parametrize(("folder", "task"), TASKS)
def test_no_answer_breaks_a_judge_or_costs_another_case(folder: Path, task: str) -> None:
    check = checks_of(folder)[task]
    right = right_answers(folder, task)
    # The judges of the other cases would say the same every time: one of them is enough.
    last = check.cases[-1]

    @settings(
        max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        case = data.draw(st.sampled_from(check.cases[:-1] or check.cases))
        rank = data.draw(st.integers(0, case.world_size - 1))
        answer = data.draw(broken(right[case.name].outputs[rank]))
        try:
            crossed = decode(encode(answer))
        except (TypeError, ValueError):
            return  # it would never have come as far as a judge

        def forged(check: Check, current: Case, inputs: Sequence[Plain]) -> Observed:
            observed = right[current.name]
            if current is not case:
                return observed
            outputs = list(observed.outputs)
            outputs[rank] = crossed
            return replace(observed, outputs=outputs)

        short_check = replace(check, cases=tuple(c for c in check.cases if c in (case, last)))
        report = run_check(f"{folder.name}/{task}", short_check, forged, seed="any")
        assert len(report.results) == len(short_check.cases)
        for result in report.results:
            assert not result.trouble, result.trouble
            assert result.passed or told(result)
            assert result.passed or result.name == case.name, str(report)

    run()


def told(result: CaseResult) -> bool:
    return bool(result.reason) and len(result.reason) < 3000
