"""The judge of pipeline schedules, because many are right: as data, and as ranks executed them.

A schedule is a list of steps for each rank. A step is ``("F", 3)`` or ``("B", 3)``: forward or
backward of micro-batch 3.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from course_lib.checking import Case, Expectation, Observed, Wrong, expect_equal
from course_lib.checking.answers import describe
from course_lib.checking.communication import computes_between
from course_lib.ranks import Trace
from course_lib.ranks.explain.words import counted

FORWARD, BACKWARD = 1e-3, 2e-3
"""Seconds that a rank computes in a step."""
STAGE = "gradient of this rank's stage"

Steps = list[list[Any]]


def as_steps(answer: Any) -> list[Steps]:
    """Return a schedule as lists of [action, micro-batch]; raise TypeError if it is none."""
    listed = _listed(answer) and all(_listed(steps) for steps in answer)
    if listed and all(_is_step(step) for steps in answer for step in steps):
        return [[[action, int(number)] for action, number in steps] for steps in answer]
    raise TypeError(
        f"the schedule is {describe(answer)}, expected a list that holds a list of steps, such as "
        '("F", 0), for each rank'
    )


def _is_step(value: Any) -> bool:
    pair = _listed(value) and len(value) == 2 and value[0] in ("F", "B")
    return pair and (type(value[1]) is int or isinstance(value[1], np.integer))


def _listed(value: Any) -> bool:
    return isinstance(value, list | tuple)


def wrong_steps(steps: Steps, micro_batches: int) -> str:
    """Return what is wrong with one rank's steps on their own, or an empty string."""
    counts = Counter((action, m) for action, m in steps)
    for action in ("F", "B"):
        for m in range(micro_batches):
            if counts[action, m] != 1:
                return f'has the step ("{action}", {m}) {counts[action, m]} times, expected once'
    if strangers := [f'("{a}", {m})' for a, m in counts if not 0 <= m < micro_batches]:
        return f"has the step {strangers[0]}, but the last micro-batch is {micro_batches - 1}"
    for m in range(micro_batches):
        if steps.index(["B", m]) < steps.index(["F", m]):
            return f"does the backward of micro-batch {m} before its forward"
    return ""


def whole_schedule(
    case: Case, inputs: Sequence[Any], expected: Sequence[Any], values: Sequence[Any]
) -> None:
    """Judge the number of micro-batches, every rank's steps, and the gradients."""
    for rank, value in enumerate(values):
        schedule = value["schedule"]
        if len(schedule) != case.world_size:
            ranks = counted(len(schedule), "rank")
            raise Wrong(
                f"rank {rank}: the schedule has steps for {ranks}, expected {case.world_size}"
            )
        if schedule != values[0]["schedule"]:
            raise Wrong(f"rank {rank} returns a different schedule than rank 0")
    for rank, steps in enumerate(values[0]["schedule"]):
        _expect_few(rank, steps, case.world_size, len(inputs[0]["x"]), inputs[0]["bubble"])
        if fault := wrong_steps(steps, len(inputs[0]["x"])):
            raise Wrong(f"rank {rank} {fault}")
    for rank, (value, right) in enumerate(zip(values, expected, strict=True)):
        # The order of the backwards is free, so sums may be rounded otherwise than the reference's.
        expect_equal({STAGE: value[STAGE]}, {STAGE: right[STAGE]}, f"rank {rank}", atol=1e-5)


def _expect_few(rank: int, steps: Steps, p: int, right: int, bubble: float) -> None:
    m = sum(action == "F" for action, _ in steps)
    if m != right:
        n = min(m, right)
        waits = f"waits {p - 1}/{n + p - 1} of the time" if n + p > 1 else "never waits"
        raise Wrong(
            f"rank {rank} has {m} micro-batch{'es' * (m != 1)}, expected {right}",
            f"With m = {n} a rank {waits}. The task allows at most {bubble} of the time, and "
            "asks for as few micro-batches as possible.",
        )


def holds_few(case: Case, observed: Observed, trace: Trace) -> None:
    """Expect rank r to hold the activations of at most p - r micro-batches at once."""
    for rank, steps in enumerate(observed.outputs[0]["value"]["schedule"]):
        held = peak = 0
        for action, _ in steps:
            held += 1 if action == "F" else -1
            peak = max(peak, held)
        limit = min(case.world_size - rank, len(observed.inputs[0]["own"]["x"]))
        if peak > limit:
            begin = [action for action, _ in steps].index("B")
            raise Wrong(
                f"rank {rank} holds the activations of {peak} micro-batches at once, expected at "
                f"most {limit}",
                f"It does {begin} forwards before its first backward, and needs only {limit}. From "
                "then on, do a backward and a forward in turn.",
            )


FEW_ACTIVATIONS = Expectation(holds_few, part="memory")


def _computed_in_order(sends: bool) -> Callable[[Case, Observed, int], list[tuple[float, float]]]:
    """Return what a rank's schedule has computed when a message begins, and when one has come."""

    def bounds(case: Case, observed: Observed, rank: int) -> list[tuple[float, float]]:
        limits, seconds = [], 0.0
        for action, _ in observed.outputs[rank]["value"]["schedule"][rank]:
            forward = action == "F"
            source, to = (rank - 1, rank + 1) if forward else (rank + 1, rank - 1)
            if not sends and 0 <= source < case.world_size:
                limits.append((seconds, seconds))
            seconds += FORWARD if forward else BACKWARD
            if sends and 0 <= to < case.world_size:
                limits.append((seconds, math.inf))
        return limits

    return bounds


AS_SCHEDULED = [
    computes_between(_computed_in_order(sends=True), "send", part="time"),
    computes_between(_computed_in_order(sends=False), "recv", part="time"),
]
