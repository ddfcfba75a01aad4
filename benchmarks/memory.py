"""Compare the peak memory of training steps with our DDP and with PyTorch's.

    python benchmarks/memory.py [--write]

This compares the peak memory of a rank's tensors, from before the wrapper is made to the end of
five steps, without the model itself. PyTorch's profiler records the allocator's allocations and
frees. The result has no noise, but does not include gloo's own buffers.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from machine import arguments, publish, sentence
from models import MODELS
from torch import nn
from torch.profiler import ProfilerActivity, profile

from course_lib.ddp import DistributedDataParallel
from course_lib.ranks import Ranks

TorchDDP = nn.parallel.DistributedDataParallel
VARIANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch DDP": TorchDDP,
    "torch DDP, views": lambda model: TorchDDP(model, gradient_as_bucket_view=True),
    "ours": DistributedDataParallel,
}


def peak(variant: str, name: str) -> float:
    """Return, on a rank, the peak MiB of tensors in five steps, minus those before the wrapper."""
    torch.manual_seed(0)
    model = MODELS[name].make()
    generator = torch.Generator().manual_seed(dist.get_rank())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        wrapped = VARIANTS[variant](model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
        for _ in range(5):
            x, y = MODELS[name].batch(generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    events = recorded.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return max(itertools.accumulate(nbytes for _, nbytes in sorted(changes))) / 2**20


def main() -> None:
    """Print the table; with ``--write``, also to ``benchmarks/results/memory.*``."""
    options = arguments(__doc__, rounds=1).parse_args()
    rows, series = [], {}
    for name, kind in MODELS.items():
        size = sum(param.nbytes for param in kind.make().parameters()) / 2**20
        grown: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for _ in range(options.rounds):
            for variant in VARIANTS:
                with Ranks(2, on="cpu", metered=False) as ranks:
                    grown[variant].append(max(ranks.run(peak, variant, name)))
        medians = {variant: statistics.median(each) for variant, each in grown.items()}
        series |= {f"{name}, {variant} (MiB)": each for variant, each in grown.items()}
        cells = [f"{median:.1f} ({median / size:.2f})" for median in medians.values()]
        rows.append(f"| {name} | {size:.0f} | " + " | ".join(cells) + " |")
    text = "\n".join(
        [
            "# Peak memory of a training step",
            "",
            "MiB of tensors on a rank at the peak of five steps, with activations, without the "
            "model itself. In parentheses: divided by the model's size; gradients alone are 1.00. "
            f"K = 2, medians of {options.rounds} rounds. "
            + sentence("python benchmarks/memory.py"),
            "",
            "| model | MiB | " + " | ".join(VARIANTS) + " |",
            "|---" * (2 + len(VARIANTS)) + "|",
            *rows,
        ]
    )
    publish("memory", text, series, options.write)


if __name__ == "__main__":
    main()
