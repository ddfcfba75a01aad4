"""Compare a training step with our DDP, and the steps that lead to it, with PyTorch's DDP.

    python benchmarks/training_step.py [--rounds 4] [--write]

There are three models, on 2 and 4 ranks, with SGD. All variants exist at the same time on the same
ranks and take their steps in turn, in an order that is reversed every round. The slowest rank gives
the time, and ratios are taken within a round. Each rank has its own batches, and every variant sees
the same batches, so that their weights can be compared at the end.
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
from torch import Tensor, nn

from course_lib.ddp import DistributedDataParallel
from course_lib.gradient_sync import sync_bucketed, sync_flat, sync_per_parameter
from course_lib.ranks import Ranks

TorchDDP = nn.parallel.DistributedDataParallel
TORCH, ALONE = "torch DDP", "no communication"
STEPS = 2
"""Steps in a row that are timed as one."""
SETS = 3
"""Sets of ranks, one after the other, as a process's speed depends on where its memory is."""


class Variant:
    """A model, its optimizer, and how its gradients are averaged."""

    def __init__(self, wrapped: nn.Module, sync: Callable[[Any], None] | None = None) -> None:
        self.wrapped = wrapped
        self.sync = sync
        self.optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)

    def step(self, x: Tensor, y: Tensor) -> None:
        """Take one training step on this rank's batch."""
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.wrapped(x), y).backward()
        if self.sync is not None:
            self.sync(self.wrapped.parameters())
        self.optimizer.step()


def make_variants(make: Callable[[], nn.Module]) -> dict[str, Variant]:
    """Return the variants by name, all with equal weights."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return {
        TORCH: Variant(TorchDDP(model())),
        "torch DDP, views": Variant(TorchDDP(model(), gradient_as_bucket_view=True)),
        "ours": Variant(DistributedDataParallel(model())),
        "ours, 10 MiB": Variant(DistributedDataParallel(model(), bucket_cap_mb=10)),
        "per parameter": Variant(model(), sync_per_parameter),
        "flat": Variant(model(), sync_flat),
        "bucketed": Variant(model(), sync_bucketed),
        ALONE: Variant(model()),
    }


def measure(name: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return, on a rank, per variant: step seconds, and difference of weights from PyTorch's."""
    variants = make_variants(MODELS[name].make)
    generator = torch.Generator().manual_seed(dist.get_rank())
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for number in range(rounds + 2):
        batches = [MODELS[name].batch(generator) for _ in range(STEPS)]
        for variant in list(variants) if number % 2 else list(reversed(variants)):
            dist.barrier()
            start = time.perf_counter()
            for x, y in batches:
                variants[variant].step(x, y)
            seconds = torch.tensor([(time.perf_counter() - start) / STEPS], dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if number >= 2:  # the first steps build buckets again
                times[variant].append(float(seconds))
    weights = {variant: flat(each.wrapped) for variant, each in variants.items()}
    reference = weights[TORCH]
    return times, {v: float((w - reference).abs().max()) for v, w in weights.items() if v != ALONE}


def flat(model: nn.Module) -> Tensor:
    """Return all weights as one vector."""
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def main() -> None:
    """Print the tables; with ``--write``, also to ``benchmarks/results/training_step.*``."""
    parser = arguments(__doc__, rounds=4)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    measured: dict[str, Any] = {}
    for world_size in options.world_sizes:
        for model in options.models:
            times: dict[str, list[float]] = {}
            differences: dict[str, float] = {}
            for _ in range(SETS):
                busy = BusyElsewhere()
                with Ranks(world_size, on="cpu", metered=False) as ranks:
                    results = ranks.run(measure, model, options.rounds)
                others = 100 * busy.share()
                print(f"K = {world_size}, {model}: others used {others:.0f} %", file=sys.stderr)
                for variant, seconds in results[0][0].items():
                    times.setdefault(variant, []).extend(seconds)
                for _, each in results:
                    differences = {v: max(d, differences.get(v, 0.0)) for v, d in each.items()}
            measured[f"{model}, K = {world_size}"] = {"seconds": times, "differences": differences}
    text = "\n\n".join(
        [
            "# Training steps beside PyTorch's DDP",
            f"Ratio, with its quartiles: time divided by that of PyTorch's DDP over gloo; below 1 "
            f"is faster. Medians of {SETS} × {options.rounds} interleaved rounds of {STEPS} steps "
            f"({SETS} sets of ranks, one after the other). Weights: the largest difference of a "
            f"weight to PyTorch's after all steps.\n"
            + sentence("python benchmarks/training_step.py"),
            *(table(name, each["seconds"], each["differences"]) for name, each in measured.items()),
        ]
    )
    series = {
        f"{name}, {variant} (s)": seconds
        for name, each in measured.items()
        for variant, seconds in each["seconds"].items()
    }
    publish("training_step", text, series, options.write)


def table(name: str, times: dict[str, list[float]], differences: dict[str, float]) -> str:
    """Return one model's ratios as Markdown."""
    lines = [f"| {name} | ms | ratio | quartiles | weights |", "|---|---|---|---|---|"]
    for variant, seconds in times.items():
        ratios = sorted(a / b for a, b in zip(seconds, times[TORCH], strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        difference = f"{differences[variant]:.0e}" if variant in differences else ""
        lines.append(
            f"| {variant} | {1e3 * statistics.median(seconds):.0f} | {middle:.2f} "
            f"| {low:.2f} – {high:.2f} | {difference.replace('0e+00', '0')} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
