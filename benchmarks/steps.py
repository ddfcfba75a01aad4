"""Training steps that several variants take in turn on the same ranks: `training_step`, `sharding`.

All variants exist at the same time on the same ranks, and their order is reversed every round. The
slowest rank gives the time. Every variant sees the same batches, each rank its own, so that weights
can be compared at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from models import MODELS
from torch import Tensor, nn

from course_lib.ranks import Ranks

STEPS = 2
"""Steps in a row that are timed as one."""
Series = dict[str, list[float]]
"""Variant → a number for each round."""


@dataclass
class Variant:
    """A model in its wrapper, its optimizer, and how gradients are averaged after backward."""

    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    sync: Callable[[Any], None] | None = None

    def step(self, x: Tensor, y: Tensor) -> None:
        """Take one training step on this rank's batch."""
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.wrapped(x), y).backward()
        if self.sync is not None:
            self.sync(self.wrapped.parameters())
        self.optimizer.step()


def take_turns(variants: dict[str, Variant], name: str, rounds: int) -> Series:
    """Return, on a rank, the seconds of a step on the slowest rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    times: Series = {variant: [] for variant in variants}
    for number in range(rounds + 2):
        batches = [MODELS[name].batch(generator) for _ in range(STEPS)]
        for variant in list(variants) if number % 2 else list(reversed(variants)):
            dist.barrier()
            start = time.perf_counter()
            for x, y in batches:
                variants[variant].step(x, y)
            seconds = torch.tensor([(time.perf_counter() - start) / STEPS], dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if number >= 2:  # the first steps make buckets and states
                times[variant].append(float(seconds))
    return times


def every_case(
    measure: Callable[[str, int], Any], sets: int, rounds: int
) -> Iterator[tuple[str, Series, list[Any]]]:
    """Yield, for each model and number of ranks, its name, times and the last results.

    `measure(model, rounds)` returns, on a rank, the series of `take_turns` and more. There are
    `sets` sets of ranks, one after the other, as a process's speed depends on where its memory is.
    """
    for world_size in (2, 4):
        for model in MODELS:
            times: Series = {}
            for _ in range(sets):
                with Ranks(world_size, on="cpu", metered=False) as ranks:
                    results = ranks.run(measure, model, rounds)
                for variant, seconds in results[0][0].items():
                    times.setdefault(variant, []).extend(seconds)
            yield f"{model}, K = {world_size}", times, [result[1:] for result in results]
