"""The message of a program, on the ranks, about a function of another kind than the task asks for.

Each mistake is made in one case of the assignment's own check. Where it is made around the right
solution, nothing else is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from course_lib.checking import run_check
from course_lib.checking.local import LocalRunner
from tests.helpers.course_folders import SOURCES, needs_sources
from tests.helpers.solutions import checks_of, solution_of

pytestmark = needs_sources

Wrapped = Callable[..., Any]
"""From the right solution to a wrong one."""


def gives(value: Any) -> Wrapped:
    """Return what gives this and nothing else, whatever it is asked."""
    return lambda right: lambda *_, **__: value


def clears_gradients(right: Wrapped) -> Wrapped:
    def evaluate(model: Any, *arguments: Any, **group: Any) -> Any:
        model.zero_grad()
        return right(model, *arguments, **group)

    return evaluate


def counts_its_calls(right: Wrapped) -> Wrapped:
    calls: list[int] = []

    def assign_buckets(*arguments: Any) -> Any:
        calls.append(1)
        return right(*arguments)[len(calls) % 2 :]

    return assign_buckets


ODD = [
    ("04_pytorch_ddp", "my_batches", gives(None), "my_batches returns None, expected a list"),
    ("04_pytorch_ddp", "evaluate", clears_gradients, "evaluate changes the gradients"),
    ("05_bucketing_and_overlap", "assign_buckets", counts_its_calls, "it keeps something from"),
    (
        *("05_bucketing_and_overlap", "data_parallel", gives((None, nullcontext))),
        "finish is NoneType, expected a function",
    ),
    ("06_compression", "quantize", gives(None), "wire is None"),
    ("08_decentralized_training", "choose_graph", gives(None), "expected (which, seconds)"),
    ("09_sharding_the_model", "pipeline_schedule", gives(3), "that holds a list of steps, such as"),
    ("09_sharding_the_model", "column_parallel", gives(len), "expected an nn.Module"),
]


@pytest.mark.parametrize(("folder", "task", "wrapped", "message"), ODD)
def test_it_says_what_it_was_given(folder: str, task: str, wrapped: Wrapped, message: str) -> None:
    source = SOURCES / folder
    check = checks_of(source)[task]
    check = replace(check, cases=check.cases[:1])
    with LocalRunner(wrapped(solution_of(source, task)), echo=None) as runner:
        report = run_check(f"{folder}/{task}", check, runner, seed="1")
    assert not report.passed
    assert message in " ".join(str(report).split())
