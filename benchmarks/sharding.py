"""Compare sharded optimizer states and sharded weights with PyTorch's, over gloo.

    python benchmarks/sharding.py [--rounds 4] [--write]

There are three models, on 2 and 4 ranks, always with fused AdamW. `steps` says how a step is timed.
Ratios are taken within a round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from machine import arguments, publish, ratios, sentence
from models import MODELS
from steps import STEPS, Series, Variant, every_case, take_turns
from torch import nn

from course_lib.ddp import DistributedDataParallel
from course_lib.fully_sharded import FullyShardedDataParallel
from course_lib.sharded_optimizer import ShardedOptimizer

TorchDDP = nn.parallel.DistributedDataParallel
ZERO, FSDP = "torch ZeroRedundancyOptimizer", "torch FSDP2"
ADAMW = {"lr": 1e-4, "fused": True}
SETS = 2
PEERS = {"ours, ZeRO-1": ZERO, "ours, ZeRO-1 after DDP": ZERO,
         "ours, fully sharded": FSDP}  # fmt: skip


def state_elements(optimizer: Any) -> int:
    """Return how many numbers of optimizer state this rank keeps."""
    inner: Any = getattr(optimizer, "_local", getattr(optimizer, "optim", None))
    states = (inner or optimizer).state.values()
    values = (_local(value) for state in states for value in state.values())
    return sum(value.numel() for value in values if value.dim() > 0)


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def make_variants(make: Callable[[], nn.Module]) -> dict[str, Variant]:
    """Return the variants by name, all with equal weights."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def model() -> nn.Module:
        torch.manual_seed(0)
        return make()

    def with_adamw(wrapped: nn.Module) -> Variant:
        return Variant(wrapped, torch.optim.AdamW(wrapped.parameters(), **ADAMW))

    def ours(wrapped: nn.Module, **options: Any) -> Variant:
        cls = torch.optim.AdamW
        return Variant(wrapped, ShardedOptimizer(wrapped.parameters(), cls, **options, **ADAMW))

    torch_ddp = TorchDDP(model(), gradient_as_bucket_view=True)
    zero = ZeroRedundancyOptimizer(torch_ddp.parameters(), torch.optim.AdamW, **ADAMW)
    sharded = model()
    kind = unit_of(sharded)
    for layer in (module for module in sharded.modules() if isinstance(module, kind)):
        fully_shard(layer)
    return {
        "torch DDP": with_adamw(TorchDDP(model(), gradient_as_bucket_view=True)),
        ZERO: Variant(torch_ddp, zero),
        "ours, DDP": with_adamw(DistributedDataParallel(model())),
        "ours, ZeRO-1": ours(model(), gradients="local"),
        "ours, ZeRO-1 after DDP": ours(DistributedDataParallel(model())),
        FSDP: with_adamw(fully_shard(sharded)),
        "ours, fully sharded": with_adamw(FullyShardedDataParallel(model(), unit_types=(kind,))),
    }


def unit_of(model: nn.Module) -> type[nn.Module]:
    """Return the kind of module that both shard as a unit; other parameters belong to the whole."""
    layer = nn.TransformerEncoderLayer
    return layer if any(isinstance(module, layer) for module in model.modules()) else nn.Linear


def measure(name: str, rounds: int) -> Any:
    """Return, on a rank, per variant: seconds, and numbers of optimizer state."""
    variants = make_variants(MODELS[name].make)
    times = take_turns(variants, name, rounds)
    return times, {v: state_elements(pair.optimizer) for v, pair in variants.items()}


def main() -> None:
    """Print the tables; with ``--write``, also to ``benchmarks/results/sharding.md``."""
    options = arguments(__doc__, rounds=4).parse_args()
    tables = []
    for name, times, results in every_case(measure, SETS, options.rounds):
        tables.append(table(name, times, results))
    text = "\n\n".join(
        [
            "# Sharded states and weights beside PyTorch's",
            f"Over gloo, fused AdamW, medians of {SETS} × {options.rounds} interleaved rounds of "
            f"{STEPS} steps ({SETS} sets of ranks, one after the other). Ratio, with its "
            "quartiles: our time divided by PyTorch's; below 1 is faster. ZeRO-1 is "
            "compared with its ZeroRedundancyOptimizer, fully sharded with FSDP2. State: optimizer "
            "state on the rank with most, divided by the mean over the ranks.\n"
            + sentence("python benchmarks/sharding.py"),
            *tables,
        ]
    )
    publish("sharding", text, options.write)


def table(name: str, times: Series, results: list[Any]) -> str:
    """Return one model's ratios as Markdown."""
    lines = [f"| {name} | ms | ratio | quartiles | state |", "|---|---|---|---|---|"]
    for variant, seconds in times.items():
        held = [states[variant] for (states,) in results]
        cells = [variant, f"{1e3 * statistics.median(seconds):.0f}", "", ""]
        if variant in PEERS:
            low, middle, high = statistics.quantiles(ratios(times, variant, PEERS[variant]), n=4)
            cells[2:] = [f"{middle:.2f}", f"{low:.2f} – {high:.2f}"]
        cells.append(f"{max(held) / statistics.mean(held):.3f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
