"""A pipeline schedule, as a student writes it: executed on ranks, and judged as data.

A schedule is a list of steps for each rank, a step ``("F", 3)`` or ``("B", 3)``: forward or
backward of micro-batch 3. A stage is a matrix and a tanh, and takes `FORWARD` and `BACKWARD`
seconds. Sends do not wait; a rank that needs something waits for it, so that a schedule which
cannot go on is a deadlock, and is explained as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checking.answers import ANYTHING, Kind, sees
from course_lib.checking.cases import Case, Expectation, Observed, Wrong
from course_lib.checking.compare import describe
from course_lib.checking.judges import Judge, equals
from course_lib.checking.on_ranks.given import Given
from course_lib.ranks import Network, Trace, compute

FORWARD, BACKWARD = 1e-3, 2e-3
NEAR = Network(latency=1e-6, bandwidth=10e9)
"""A network whose messages take next to nothing beside a step."""
STAGE = "gradient of this rank's stage"

Steps = list[list[Any]]


def fewest(world_size: int, bubble: float) -> int:
    """Return the smallest number m of micro-batches with (p-1) / (m + p-1) <= bubble."""
    late = world_size - 1
    return next(m for m in range(1, 10_000) if late / (m + late) <= bubble)


def pipeline_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw two rows for each micro-batch, and a stage for each rank; the case has ``bubble``."""
    bubble, p = case.parameters["bubble"], case.world_size
    x = torch.randn(fewest(p, bubble), 2, 3, generator=generator)
    weights = torch.randn(p, 3, 3, generator=generator)
    return [{"bubble": bubble, "x": x, "weight": weights[rank]} for rank in range(p)]


def pipeline_program(schedule: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Ask for ``schedule(world_size, bubble)``, and execute it if every rank's steps are whole."""
    rank, p, x = dist.get_rank(), dist.get_world_size(), mine["x"]
    made = schedule(p, mine["bubble"])
    steps = _as_steps(made)
    weight = nn.Parameter(mine["weight"].clone())
    if steps is None:
        return {"schedule": describe(made), STAGE: None}
    if len(steps) == p and not any(_wrong_steps(each, len(x)) for each in steps):
        _run_stage(steps[rank], weight, x, rank, p)
    return {"schedule": steps, STAGE: weight.grad}


def pipeline_computes(own: Any) -> dict[float, int]:
    """Return how long `pipeline_program` computes: each micro-batch once forward, once back."""
    return {FORWARD: len(own["x"]), BACKWARD: len(own["x"])}


def _as_steps(made: Any) -> list[Steps] | None:
    if not _listed(made) or not all(_listed(steps) for steps in made):
        return None
    for step in (step for steps in made for step in steps):
        if not _listed(step) or len(step) != 2 or step[0] not in ("F", "B"):
            return None
        if type(step[1]) is not int and not isinstance(step[1], np.integer):
            return None
    return [[[action, int(number)] for action, number in steps] for steps in made]


def _listed(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _wrong_steps(steps: Steps, micro_batches: int) -> str:
    """Return what is wrong with one rank's steps, whatever the other ranks do; or nothing."""
    counts = Counter((action, m) for action, m in steps)
    for action, name in (("F", "forward"), ("B", "backward")):
        for m in range(micro_batches):
            if counts[action, m] != 1:
                return f"does the {name} of micro-batch {m} {counts[action, m]} times, not once"
    if more := [f"{a}{m}" for a, m in counts if not 0 <= m < micro_batches]:
        return f"has the step {more[0]}, of {micro_batches} micro-batches"
    for m in range(micro_batches):
        if steps.index(["B", m]) < steps.index(["F", m]):
            return f"does the backward of micro-batch {m} before its forward"
    return ""


def _run_stage(steps: Steps, weight: nn.Parameter, inputs: Tensor, rank: int, p: int) -> None:
    held: dict[int, tuple[Tensor, Tensor]] = {}
    sent = []
    for action, m in steps:
        forward = action == "F"
        source, to = (rank - 1, rank + 1) if forward else (rank + 1, rank - 1)
        message = inputs[m].clone(memory_format=torch.contiguous_format)
        if 0 <= source < p:
            dist.recv(message, source, tag=2 * m + forward)
        compute(FORWARD if forward else BACKWARD)
        if forward:
            held[m] = message.requires_grad_(), torch.tanh(message @ weight)
            result = held[m][1].detach()
        else:
            x, y = held.pop(m)
            y.backward(message if rank < p - 1 else 2 * y.detach() / len(inputs))  # type: ignore[no-untyped-call]
            assert x.grad is not None
            result = x.grad
        if 0 <= to < p:
            result = result.contiguous()
            sent.append((dist.isend(result, to, tag=2 * m + forward), result))
    for work, _ in sent:
        if work is not None:
            work.wait()


def _is_schedule(value: Any) -> bool:
    return isinstance(value, str) or _as_steps(value) is not None


_SEEN = {"schedule": Kind("lists of steps", _is_schedule), STAGE: ANYTHING}


@sees(_SEEN)
def whole_schedule(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge a schedule as data: its form, the number of micro-batches, every rank's steps."""
    p, bubble = case.world_size, case.parameters["bubble"]
    right = fewest(p, bubble)
    for rank, value in enumerate(values):
        made = value["schedule"]
        if not isinstance(made, list):
            raise Wrong(f'rank {rank}: {made} is no list of steps such as ("F", 0) for each rank')
        if len(made) != p:
            raise Wrong(f"rank {rank}: steps for {len(made)} ranks, and there are {p}")
        if made != values[0]["schedule"]:
            raise Wrong(f"rank {rank} was told another schedule than rank 0")
    for rank, steps in enumerate(values[0]["schedule"]):
        m = sum(action == "F" for action, _ in steps)
        if m != right:
            waits = f"{p - 1}/{m + p - 1} of the time" if m + p > 1 else "never"
            raise Wrong(
                f"rank {rank} has {m} micro-batches, expected {right}",
                f"With {m} a rank waits {waits}; at most {bubble} was asked for, with as few "
                "micro-batches as can be.",
            )
        if wrong := _wrong_steps(steps, right):
            raise Wrong(f"rank {rank} {wrong}")


def equals_one_process() -> Judge:
    """Judge the stages' gradients by those of one process, of the mean over the micro-batches."""

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
        weights = [each["weight"].double().clone().requires_grad_() for each in inputs]
        y = inputs[0]["x"].double()
        for weight in weights:
            y = torch.tanh(y @ weight)
        (y.square().sum() / len(y)).backward()
        return {STAGE: weights[me].grad.to(inputs[me]["weight"].dtype)}

    @sees(_SEEN)
    def judge(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
        equals(oracle)(case, inputs, [{STAGE: value[STAGE]} for value in values])

    return judge


def holds_few(case: Case, observed: Observed, trace: Trace) -> None:
    """Expect rank r to hold the activations of p - r micro-batches at most."""
    p, m = case.world_size, fewest(case.world_size, case.parameters["bubble"])
    for rank, steps in enumerate(observed.outputs[0]["value"]["schedule"]):
        held = peak = 0
        for action, _ in steps:
            held += 1 if action == "F" else -1
            peak = max(peak, held)
        if peak > min(p - rank, m):
            raise Wrong(
                f"rank {rank} holds the activations of {peak} micro-batches at once, expected at "
                f"most {min(p - rank, m)}",
                "From the first backward on, do a forward and a backward in turn.",
            )


FEW_ACTIVATIONS = Expectation(holds_few, part="memory")


def ends_in_time(case: Case, observed: Observed, trace: Trace) -> None:
    """Expect (m + p - 1)(F + B) on the virtual clock, and 1 % for the messages."""
    p, m = case.world_size, fewest(case.world_size, case.parameters["bubble"])
    allowed = 1.01 * (m + p - 1) * (FORWARD + BACKWARD)
    took = trace.makespan
    if observed.network is not None and took > allowed:
        raise Wrong(
            f"the ranks need {1e3 * took:.2f} ms, expected at most {1e3 * allowed:.2f} ms",
            "A rank before the last one must have done enough forwards before its first backward.",
        )


IN_TIME = Expectation(ends_in_time, part="time")
