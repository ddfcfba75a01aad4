"""Ranks that lie: the examiner believes only what it knows by itself.

A student's code owns the process of its rank, with all of our code that runs in it. Each of these
lies once earned points.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autograder.examination.check import Examined, examine
from autograder.examination.submission import Submission
from autograder.passes.examine import masked_from
from autograder.sandbox.place import SandboxedPlace
from course_lib.checking import Case, Check, equals, sends_at_most, task, time_within
from course_lib.checking.mutants import Solution
from course_lib.checking.on_ranks.given import Given
from course_lib.ranks import compute
from tests.helpers.course_folders import SOURCES, needs_sources
from tests.helpers.solutions import checks_of, code_cells, hidden_of, mutants_in

SETUP = "import gc, sys, time, torch, torch.distributed as dist"


def examined(place: SandboxedPlace, check: Check, *cells: str) -> Examined:
    with Submission(place) as submission:
        for cell in (SETUP, *cells):
            assert not submission.run_cell(cell).error
        found = examine("forged/f", check, submission, seed="forged")
    assert not found.notes
    return found


# The clock ------------------------------------------------------------------------------------


def numbers(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    drawn = torch.randint(1, case.parameters["below"], (case.world_size,), generator=generator)
    return [{"number": number} for number in drawn.tolist()]


def told_program(f: Any, mine: Any, given: Given) -> Any:
    return {"rank 0's number": f(mine["number"])}


TOLD = task(
    "f",
    inputs=numbers,
    program=told_program,
    judges=[equals(lambda case, inputs, me: {"rank 0's number": inputs[0]["number"]})],
    expects=[sends_at_most(0)],
    cases=[Case("2 ranks", 2, {"below": 5000})],
)
"""Rank 1 must learn a value of rank 0, and nobody may send a byte."""

FIND = """
def client():
    return next(o for o in gc.get_objects() if type(o).__name__ == "FabricClient")

"""
IN_TIME = {
    "spend": """
def f(number):
    if dist.get_rank() == 0:
        client().spend(number * 1e-3)
    dist.barrier()
    return number if dist.get_rank() == 0 else round(client().clock * 1e3)
""",
    "compute": """
def f(number):
    from course_lib.ranks import compute, clock
    if dist.get_rank() == 0:
        compute(number * 1e-3)
    dist.barrier()
    return number if dist.get_rank() == 0 else round(clock() * 1e3)
""",
    "frames": """
def f(number):
    from course_lib.ranks.simulated import socket_frames as frames
    if dist.get_rank() == 0:
        client()._channel.sendall(frames.compute(number * 1e-3))
    dist.barrier()
    return number if dist.get_rank() == 0 else round(client().clock * 1e3)
""",
    "polls": """
def f(number):
    x = torch.zeros(0)
    if dist.get_rank() == 0:
        client().spend(number * 1e-3)
        dist.send(x, 1)
        return number
    work, polls = dist.irecv(x, 0), 0
    while not work.is_completed():
        polls += 1
    return polls - 9
""",
}
BIT_BY_BIT = """
def f(number):
    x = torch.zeros(0)
    for bit in range(40):
        one = number >> bit & 1
        if dist.get_rank() == 0:
            dist.send(x, 1, tag=one), dist.send(x, 1, tag=2)
            dist.recv(x, 1), dist.send(x, 1, tag=1 - one)
            continue
        works = [dist.irecv(x, 0, tag=tag) for tag in (0, 1)]
        dist.recv(x, 0, tag=2)
        seen = works[1].is_completed()
        number = number & ~(1 << bit) | seen << bit
        dist.send(x, 0), [work.wait() for work in works]
    return number
"""


@pytest.mark.parametrize("source", IN_TIME.values(), ids=IN_TIME.keys())
def test_no_number_travels_for_nothing(place: SandboxedPlace, source: str) -> None:
    report = examined(place, TOLD, FIND + source).report
    assert report.reason.startswith("rank 1: rank 0's number: expected"), str(report)


def test_empty_messages_are_few(place: SandboxedPlace) -> None:
    check = replace(TOLD, cases=(Case("2 ranks", 2, {"below": 2**40}),))
    report = examined(place, check, BIT_BY_BIT).report
    assert "operations that carry nothing" in report.reason, str(report)


def timed_program(f: Any, mine: Any, given: Given) -> Any:
    compute(1e-3)
    f()
    compute(2e-3)
    return {"done": True}


TIMED = task(
    "f",
    inputs=lambda case, generator: [{"x": 1}] * case.world_size,
    program=timed_program,
    computes=lambda own: {1e-3: 1, 2e-3: 1},
    judges=[equals(lambda case, inputs, me: {"done": True})],
    expects=[time_within(lambda case, network: 3.1e-3)],
    cases=[Case("2 ranks", 2)],
)
LAZY = """
def f():
    from course_lib.ranks.costs import computation
    computation._local.compute = lambda *_: None
    dist.barrier()
"""
NEGLIGENT = """
def f():
    client().spend = lambda *_: None
"""
BUSY = """
def f():
    for _ in range(1000):
        client().spend(2e-3)
        client().spend(1e-9)
"""


@pytest.mark.parametrize("source", [LAZY, NEGLIGENT], ids=["LAZY", "NEGLIGENT"])
def test_what_a_program_computes_must_be_there(place: SandboxedPlace, source: str) -> None:
    report = examined(place, TIMED, FIND + source).report
    assert not report.passed
    assert report.reason.startswith("rank 0 computes for only 1 of the 3 ms"), report.reason


def test_more_than_it_computes_does_not_count(place: SandboxedPlace) -> None:
    assert examined(place, TIMED, FIND + BUSY).report.passed
    assert examined(place, TIMED, "def f():\n    pass").report.passed


# Effects --------------------------------------------------------------------------------------

EFFECTS = task(
    "f",
    inputs=lambda case, generator: [
        {"x": torch.randn(5, generator=generator)} for _ in range(case.world_size)
    ],
    program=lambda f, mine, given: {"twice": f(mine["x"])},
    judges=[equals(lambda case, inputs, me: {"twice": 2 * inputs[me]["x"]})],
    cases=[Case("1 rank", 1)],
)
CHANGES = {
    "changes x": "y = 2 * x; x.zero_(); return y",
    "shares memory with x": "return x.mul_(2)",
    "random numbers": "torch.rand(1); return 2 * x",
    "gradients are disabled": "torch.set_grad_enabled(False); return 2 * x",
    "default dtype": "torch.set_default_dtype(torch.float64); return 2 * x",
    "requires a gradient": "y = 2 * x; x.requires_grad_(); return y",
}
SILENT = """
def silence():
    effects = sys.modules["course_lib.checking.on_ranks.effects"]
    given = sys.modules["course_lib.checking.on_ranks.given"]
    for name, member in list(vars(effects.Watch).items()):
        if not name.startswith(("__init__", "__", "add_")) and callable(member):
            setattr(effects.Watch, name, lambda *a, **k: {answer})

"""


@pytest.mark.parametrize("answer", ["[]", "{}", "None", "{'inputs': {}}"])
def test_nobody_says_of_himself_that_he_has_no_effects(place: SandboxedPlace, answer: str) -> None:
    lying = SILENT.replace("{answer}", answer)
    for body in list(CHANGES.values())[:2]:
        source = f"{lying}\ndef f(x):\n    silence()\n    {body}"
        report = examined(place, EFFECTS, source).report
        assert not report.passed, body


@pytest.mark.parametrize(("words", "body"), CHANGES.items(), ids=CHANGES.keys())
def test_effects_are_found_by_what_comes_back(place: SandboxedPlace, words: str, body: str) -> None:
    reason = examined(place, EFFECTS, f"def f(x):\n    {body}").report.reason
    if words == "shares memory with x":  # it changes it first
        words = "changes x"
    assert words in reason


# The same, of assignments ---------------------------------------------------------------------


def mutant(assignment: str, reason: str) -> tuple[Check, Solution]:
    folder = SOURCES / assignment
    found = next(
        each
        for each in mutants_in(folder)
        if each.reason and reason in each.reason and "grader" in each.where
    )
    return checks_of(folder)[found.task], found


PATCHED = {
    "09_sharding_the_model": (
        "enough forwards before its first backward",
        "from course_lib.ranks.costs import computation\n"
        "    computation._local.compute = lambda *_: None",
        "rank 0 computes for only 0 of the",
    ),
    "06_compression": (
        "the function changes x",
        "import sys\n    Watch = sys.modules['course_lib.checking.on_ranks.effects'].Watch\n"
        "    Watch.effects = Watch.told = lambda *_: {}",
        "an answer that cannot be read",
    ),
}


@needs_sources
@pytest.mark.parametrize("assignment", PATCHED)
def test_a_wrong_solution_that_patches_its_rank_stays_wrong(assignment: str) -> None:
    wrong, patch, words = PATCHED[assignment]
    check, each = mutant(assignment, wrong)
    head, _, body = each.source.partition("\n")
    lines = head
    source = f"{lines}\n    {patch}\n{body}"
    folder = SOURCES / assignment
    with (
        SandboxedPlace(masked_from(hidden_of(folder).MASKED)) as masked,
        Submission(masked) as submission,
    ):
        assert not submission.run_cell(next(code_cells(folder)).source).error
        assert not submission.run_cell(source).error
        report = examine("forged/f", check, submission, seed="1").report
    assert report.fraction < 1 and not report.passed, str(report)
    assert words in report.reason, str(report)
