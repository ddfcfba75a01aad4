"""Show where the time of a training step goes over shared memory, to see what could still improve.

    python benchmarks/step_profile.py [--rounds 15] [--write]

The models and batches are the same as in `training_step`. A wrapper times the functions of the
communication. The rest of backward is computation. Each number is the median over the steps of the
mean over the ranks. So the parts of a column add up to about a step.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from machine import BusyElsewhere, arguments, publish, sentence
from models import MODELS
from torch import nn

from course_lib.ddp import DistributedDataParallel, reducer
from course_lib.peer_memory import shared_memory_group
from course_lib.ranks import Ranks

OURS, TORCHS, ALONE = "ours", "PyTorch's DDP, our group", "no communication"
PARTS = [
    "forward",
    "backward",
    "gradients into buckets",
    "waiting for the other ranks",
    "all-reduce",
    "optimizer",
]


class Stopwatch:
    """Adds up seconds under names; a call inside a timed call counts only under its own name."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._inside = 0.0  # seconds of calls inside the call that is being timed

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            before, self._inside = self._inside, 0.0
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - start
                self.seconds[name] += elapsed - self._inside
                self._inside = before + elapsed

        return timed


def profile(name: str, variant: str, rounds: int) -> list[list[float]]:
    """Return, on a rank, seconds of each of the `PARTS` for each step."""
    torch.manual_seed(0)
    group, model, watch = shared_memory_group(), MODELS[name].make(), Stopwatch()
    memory: Any = group.memory
    memory.barrier = watch.around("waiting for the other ranks", memory.barrier)
    memory.all_reduce = watch.around("all-reduce", memory.all_reduce)
    wrapped: nn.Module = model
    if variant == TORCHS:
        wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
    elif variant == OURS:
        reducer.copy_scaled = watch.around("gradients into buckets", reducer.copy_scaled)
        wrapped = DistributedDataParallel(model, group=group, allocate=memory.empty)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    forward = watch.around("forward", lambda x, y: nn.functional.cross_entropy(wrapped(x), y))
    backward = watch.around("backward", lambda loss: loss.backward())
    step = watch.around("optimizer", optimizer.step)
    steps = []
    for number in range(rounds + 3):
        x, y = MODELS[name].batch(generator)
        dist.barrier()
        watch.seconds = dict.fromkeys(PARTS, 0.0)
        optimizer.zero_grad()
        backward(forward(x, y))
        step()
        if number >= 3:  # the first steps build buckets again
            steps.append(list(watch.seconds.values()))
    return steps


def column(world_size: int, name: str, variant: str, rounds: int) -> list[list[float]]:
    """Return for each of the `PARTS` the milliseconds of every step."""
    busy = BusyElsewhere()
    with Ranks(world_size, on="cpu", metered=False) as ranks:
        ranks_steps = ranks.run(profile, name, variant, rounds)
    print(
        f"K = {world_size}, {name}, {variant}: others used {100 * busy.share():.0f} %",
        file=sys.stderr,
    )
    return [
        [1e3 * statistics.mean(each) for each in zip(*steps, strict=True)]
        for steps in zip(*(zip(*steps, strict=True) for steps in ranks_steps), strict=True)
    ]


def main() -> None:
    """Print the tables; with ``--write``, also to ``benchmarks/results/step_profile.*``."""
    parser = arguments(__doc__, rounds=15)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    variants = [ALONE, OURS, TORCHS]
    tables, series = [], {}
    for world_size in options.world_sizes:
        for name in MODELS:
            columns = []
            for variant in variants:
                parts = column(world_size, name, variant, options.rounds)
                columns.append([statistics.median(steps) for steps in parts])
                for part, steps in zip(PARTS, parts, strict=True):
                    series[f"{name}, K = {world_size}, {variant}, {part} (ms)"] = steps
            rows = [*zip(PARTS, *columns, strict=True), ("all", *map(sum, columns))]
            tables.append(
                "\n".join(
                    [
                        f"| {name}, K = {world_size} | " + " | ".join(variants) + " |",
                        "|---" * (len(variants) + 1) + "|",
                        *(f"| {part} | " + " | ".join(map(cell, ms)) + " |" for part, *ms in rows),
                    ]
                )
            )
    text = "\n\n".join(
        [
            "# Where the time of a step goes",
            "Milliseconds over shared memory; medians of "
            f"{options.rounds} steps. " + sentence("python benchmarks/step_profile.py"),
            *tables,
        ]
    )
    publish("step_profile", text, series, options.write)


def cell(milliseconds: float) -> str:
    """Return a number in three digits; an empty string for 0."""
    return f"{milliseconds:.3g}" if milliseconds else ""


if __name__ == "__main__":
    main()
