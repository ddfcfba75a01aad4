"""Compare a training step with our DDP, and the steps that lead to it, with PyTorch's DDP.

    python benchmarks/training_step.py [--rounds 4] [--write]

There are three models, on 2 and 4 ranks, with SGD. `steps` says how a step is timed. Ratios are
taken within a round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from machine import arguments, publish, ratios, sentence
from models import MODELS
from steps import STEPS, Series, Variant, every_case, take_turns
from torch import Tensor, nn

from course_lib.ddp import DistributedDataParallel
from course_lib.gradient_sync import sync_bucketed, sync_flat, sync_per_parameter

TorchDDP = nn.parallel.DistributedDataParallel
TORCH, ALONE = "torch DDP", "no communication"
SETS = 3


def make_variants(make: Callable[[], nn.Module]) -> dict[str, Variant]:
    """Return the variants by name, all with equal weights."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return make()

    def with_sgd(wrapped: nn.Module, sync: Callable[[Any], None] | None = None) -> Variant:
        return Variant(wrapped, torch.optim.SGD(wrapped.parameters(), lr=1e-3), sync)

    return {
        TORCH: with_sgd(TorchDDP(model())),
        "torch DDP, views": with_sgd(TorchDDP(model(), gradient_as_bucket_view=True)),
        "ours": with_sgd(DistributedDataParallel(model())),
        "ours, 10 MiB": with_sgd(DistributedDataParallel(model(), bucket_cap_mb=10)),
        "per parameter": with_sgd(model(), sync_per_parameter),
        "flat": with_sgd(model(), sync_flat),
        "bucketed": with_sgd(model(), sync_bucketed),
        ALONE: with_sgd(model()),
    }


def measure(name: str, rounds: int) -> Any:
    """Return, on a rank, per variant: seconds, and difference from PyTorch's."""
    variants = make_variants(MODELS[name].make)
    times = take_turns(variants, name, rounds)
    weights = {variant: flat(pair.wrapped) for variant, pair in variants.items()}
    reference = weights[TORCH]
    apart = {v: float((w - reference).abs().max()) for v, w in weights.items() if v != ALONE}
    return times, apart


def flat(model: nn.Module) -> Tensor:
    """Return all weights as one vector."""
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def main() -> None:
    """Print the tables; with ``--write``, also to ``benchmarks/results/training_step.md``."""
    options = arguments(__doc__, rounds=4).parse_args()
    tables = []
    for name, times, results in every_case(measure, SETS, options.rounds):
        apart = {
            variant: max(differences[variant] for (differences,) in results)
            for variant in results[0][0]
        }
        tables.append(table(name, times, apart))
    text = "\n\n".join(
        [
            "# Training steps beside PyTorch's DDP",
            f"Ratio, with its quartiles: time divided by that of PyTorch's DDP over gloo; below 1 "
            f"is faster. Medians of {SETS} × {options.rounds} interleaved rounds of {STEPS} steps "
            f"({SETS} sets of ranks, one after the other). Weights: the largest difference of a "
            f"weight to PyTorch's after all steps.\n"
            + sentence("python benchmarks/training_step.py"),
            *tables,
        ]
    )
    publish("training_step", text, options.write)


def table(name: str, times: Series, differences: dict[str, float]) -> str:
    """Return one model's ratios as Markdown."""
    lines = [f"| {name} | ms | ratio | quartiles | weights |", "|---|---|---|---|---|"]
    for variant, seconds in times.items():
        low, middle, high = statistics.quantiles(ratios(times, variant, TORCH), n=4)
        difference = f"{differences[variant]:.0e}" if variant in differences else ""
        lines.append(
            f"| {variant} | {1e3 * statistics.median(seconds):.0f} | {middle:.2f} "
            f"| {low:.2f} – {high:.2f} | {difference.replace('0e+00', '0')} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
