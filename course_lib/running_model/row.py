"""A row of the table: the time of a step, the bytes that a rank sends, and the memory it needs.

A program is a function `train(steps)` that every rank runs. It runs twice, for a few steps and for
some more. All numbers are differences of the two runs, so they are those of the last steps. Ranks
are simulated: times are virtual, and the same on every machine.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from course_lib.ranks import Device, Network, Ranks, Trace
from course_lib.running_model.problem import DEVICE, NETWORK, new_model
from course_lib.running_model.steps import mean_steps
from course_lib.running_model.training import Train, backward, train_one_way
from course_lib.running_model.ways import WAYS, Way, one_rank
from course_lib.sharded_optimizer import model_state_bytes

Span = tuple[int, str, float, float, str]
"""Rank, lane, begin and end in ms from the start of the step, label; for `figures.timelines`."""


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        way: the first column.
        ranks: how many ranks compute gradients together.
        step_ms: virtual milliseconds of a step.
        sent: bytes that a rank sends in a step; like the next two, of the rank with the most.
        state: bytes of weights, gradients and the optimizer's state, *derived* from the number of
            weights.
        saved: bytes of activations that forward saves for backward in a step.
        loss: the loss over the global batch of the last step, in nats per byte.
        steps: steps until the held-out loss reaches the target, the mean over the seeds in
            `steps.csv`; infinite if not all seeds reach it, None for a function.
        spans: rank 0 in the last step; `timelines({row.way: row.spans}, unit="ms")` draws it.

    """

    way: str
    ranks: int
    step_ms: float
    sent: float
    state: float
    saved: float
    loss: float
    steps: float | None
    spans: tuple[Span, ...]


def measure(
    train: str | Train,
    way: str = "",
    *,
    ranks: int | None = None,
    network: Network = NETWORK,
    device: Device = DEVICE,
) -> Row:
    """Run a program on simulated ranks, and return its row.

    Args:
        train: the name of a way in `WAYS`, which trains with AdamW; or `train(steps)`, whose row
            assumes plain SGD and a whole model on each rank.
        way: the name in the table; for a name in `WAYS`, the same one by default.
        ranks: how many ranks run it; 4, or as many as the way needs, by default.
        network: what messages cost.
        device: what computation costs.

    """
    name = train if isinstance(train, str) else None
    chosen = WAYS[name] if name else Way(one_rank)
    program = partial(train_one_way, name) if name else train
    world_size, period = ranks or chosen.world_size, chosen.period
    torch.set_num_threads(1)
    with Ranks(world_size, on="simulated", network=network, device=device) as simulated:
        simulated.run(_observed, program, 1)  # reads the text, which costs nothing afterwards
        few = max(chosen.warm_up, period)
        before, shorter = simulated.run(_observed, program, few), simulated.trace
        after, longer = simulated.run(_observed, program, few + period), simulated.trace
        weights = simulated.run(_weights_held, chosen)
    everyone = range(world_size)
    losses = [run.loss for run in after if run.loss is not None]
    optimizer_bytes = 8 if name else 0  # AdamW's two moments, or plain SGD
    return Row(
        way or str(train),
        world_size - 1 if chosen.prepare is None else world_size,
        1e3 * (longer.makespan - shorter.makespan) / period,
        max(longer.bytes_sent(rank) - shorter.bytes_sent(rank) for rank in everyone) / period,
        model_state_bytes(max(weights), world_size, chosen.stage, 4, 4, optimizer_bytes),
        max(after[rank].saved - before[rank].saved for rank in everyone) / period,
        sum(losses) / len(losses),
        mean_steps(name) if name else None,
        _spans(longer, max(event.end for event in shorter.events if event.rank == 0)),
    )


def _spans(trace: Trace, begin: float) -> tuple[Span, ...]:
    """Return what rank 0 did after `begin`; of messages, those that it sent.

    A message starts in the figure when the one before it is over: they share one port.
    """
    spans: list[Span] = []
    port_is_free = begin
    for event in trace.events:
        if event.rank != 0 or event.end <= begin or event.kind == "recv":
            continue
        lane, start = "compute", max(event.start, begin)
        if event.kind != "compute":
            lane, start = "messages", max(event.start, port_is_free)
            port_is_free = max(event.end, port_is_free)
        if start < event.end:
            spans.append((0, lane, 1e3 * (start - begin), 1e3 * (event.end - begin), ""))
    return tuple(spans)


def _weights_held(way: Way) -> int:
    """Return how many weights this rank holds, before a ZeRO stage divides them."""
    counts: list[int] = []

    def make_optimizer(params: Iterable[Tensor]) -> Optimizer:
        held = list(params)
        counts.append(sum(param.numel() for param in held))
        return AdamW(held)

    model = new_model()
    if way.prepare is None or way.stage:
        return sum(param.numel() for param in model.parameters())
    way.prepare(model, make_optimizer, backward)
    return counts[0]


class _Run(NamedTuple):
    saved: int
    loss: float | None


def _observed(train: Train, steps: int) -> _Run:
    """Run a program on this rank; count the bytes that autograd saves, without weights.

    Each piece of memory counts once. The pieces are kept alive: otherwise a later piece could get
    the address of a freed one, and the two would look like one.
    """
    pieces: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base
        if not isinstance(base, nn.Parameter):
            storage = tensor.untyped_storage()
            pieces[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = train(steps)
    saved = sum(piece.nbytes() for piece in pieces.values())
    losses = result[-1] if isinstance(result, tuple) else result
    return _Run(saved, None if losses is None or not len(losses) else float(losses[-1]))


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, one line each, below a line of headings."""
    width = max([20, *(len(row.way) for row in rows)])
    heading = f"{'way':{width}} ranks  ms a step  kB sent  kB state  kB saved"
    with_steps = any(row.steps is not None for row in rows)
    lines = [heading + ("  steps" if with_steps else "")]
    for row in rows:
        kilobytes = f"{row.sent / 1e3:7.0f}  {row.state / 1e3:8.0f}  {row.saved / 1e3:8.0f}"
        steps = "" if row.steps is None else f"  {row.steps:5.0f}"
        if row.steps == math.inf:
            steps = "  never"
        lines.append(f"{row.way:{width}} {row.ranks:5}  {row.step_ms:9.2f}  {kilobytes}{steps}")
    return "\n".join(lines)
