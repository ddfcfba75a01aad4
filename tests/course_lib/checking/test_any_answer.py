"""No answer of a rank, in any check of any assignment, breaks a judge or loses another case.

A right answer is taken, and something in it is replaced, left out, added or put elsewhere; or the
answer is something else altogether. Only the case that it was given in may fail.
"""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from course_lib.checking import run_check
from course_lib.checking.local import LocalRunner
from course_lib.ranks.wire import decode, encode
from tests.helpers.course_folders import needs_sources
from tests.helpers.solutions import checks_of, solution_of, tasks

pytestmark = needs_sources

# The judge of `train` declares no form, so an odd answer may break it, and is wrong.
TASKS = [parameters for parameters in tasks() if parameters.values[1] != "train"]

NAN, GONE = float("nan"), object()
ODD = [
    *(None, True, 7, 2**63, -(2**1024 - 1), 0.5, -1e300, NAN, float("inf"), "odd", [], {}),
    *([[1], "a"], {"a": 1}, torch.tensor(NAN), torch.full((2, 3), NAN), torch.zeros(0, 4)),
    *(torch.ones(3, dtype=dtype) for dtype in (torch.int8, torch.bool, torch.complex64)),
    *(GONE, GONE, GONE),
]


def places(value, path=()):
    """Yield the way to everything in a plain value, to itself first."""
    yield path
    pairs = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, list | tuple) else pairs:
        yield from places(item, (*path, key))


def changed(value, path, odd):
    """Return a copy of the value with something odd at one place, or without that place."""
    if not path:
        return None if odd is GONE else odd
    copied = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and odd is GONE:
        del copied[path[0]]
    else:
        copied[path[0]] = changed(value[path[0]], path[1:], odd)
    return copied


def odd_answer(rng: random.Random, right):
    path, odd = rng.choice([*places(right)]), rng.choice(ODD)
    item = right
    for key in path:
        item = item[key]
    if isinstance(item, torch.Tensor):
        odd = rng.choice([odd, item.double(), item.to(torch.int64)])
    return changed(right, path, rng.choice([odd, odd, [item]]))


@cache
def right_answers(folder, task: str):
    """Return what the solution gives in every public case, by the case's name."""
    check, observed = checks_of(folder)[task], {}
    with LocalRunner(solution_of(folder, task), echo=None) as runner:

        def keep(check, case, inputs):
            observed[case.name] = runner(check, case, inputs)
            return observed[case.name]

        report = run_check(f"{folder.name}/{task}", check, keep, seed="any")
    assert report.passed, str(report)
    return observed


@pytest.mark.parametrize(("folder", "task"), TASKS)
def test_no_answer_breaks_a_judge_or_costs_another_case(folder, task: str) -> None:
    check = checks_of(folder)[task]
    right = right_answers(folder, task)
    # The judges of the other cases would say the same every time: one of them is enough.
    last = check.cases[-1]
    rng = random.Random(task)
    for _ in range(20):
        case = rng.choice(check.cases[:-1] or check.cases)
        rank = rng.randrange(case.world_size)
        answer = odd_answer(rng, right[case.name].outputs[rank])
        try:
            crossed = decode(encode(answer))
        except (TypeError, ValueError):
            continue  # it would never have come as far as a judge
        outputs = list(right[case.name].outputs)
        outputs[rank] = crossed
        observed = right | {case.name: replace(right[case.name], outputs=outputs)}
        short_check = replace(check, cases=tuple(c for c in check.cases if c in (case, last)))
        report = run_check(f"{folder.name}/{task}", short_check, answers_in(observed), seed="any")
        assert len(report.results) == len(short_check.cases)
        for result in report.results:
            assert not result.trouble, result.trouble
            assert result.passed or 0 < len(result.reason) < 3000
            assert result.passed or result.name == case.name, str(report)


def answers_in(observed):
    return lambda check, case, inputs: observed[case.name]
