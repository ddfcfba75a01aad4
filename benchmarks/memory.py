"""Peak memory of training steps: our DDP beside PyTorch's.

    python benchmarks/memory.py [--write]

Every variant runs on fresh ranks. What is compared is how much a rank's resident memory grows from
before the wrapper is made to its peak in five steps, the model itself not counted.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import save, sentence
from models import MODELS
from torch import nn

from course_lib.ddp import DistributedDataParallel
from course_lib.ranks import Ranks

TorchDDP = nn.parallel.DistributedDataParallel
VARIANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch DDP": TorchDDP,
    "torch DDP, views": lambda model: TorchDDP(model, gradient_as_bucket_view=True),
    "ours": DistributedDataParallel,
}


def status(field: str) -> float:
    """Return a line of this process's status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def growth(variant: str, name: str) -> float:
    """Return, on a rank, MiB from before the wrapper to the peak of five steps."""
    torch.manual_seed(0)
    model = MODELS[name].make()
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, y = MODELS[name].batch(generator)
    # What the first backward loads and allocates once is not the wrapper's.
    nn.functional.cross_entropy(model(x), y).backward()
    model.zero_grad()
    gc.collect()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    wrapped = VARIANTS[variant](model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    for _ in range(5):
        x, y = MODELS[name].batch(generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    return status("VmHWM") - before


def main() -> None:
    """Print the table; with ``--write``, also to ``benchmarks/results/memory.*``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows, measured = [], {}
    for name, kind in MODELS.items():
        size = sum(param.nbytes for param in kind.make().parameters()) / 2**20
        grown: dict[str, list[Any]] = {variant: [] for variant in VARIANTS}
        for _ in range(options.rounds):
            for variant in VARIANTS:
                with Ranks(2, on="cpu", metered=False) as ranks:
                    grown[variant].append(max(ranks.run(growth, variant, name)))
        medians = {variant: statistics.median(each) for variant, each in grown.items()}
        measured[name] = grown
        cells = [f"{median:.0f} ({median / size:.2f})" for median in medians.values()]
        rows.append(f"| {name} | {size:.0f} | " + " | ".join(cells) + " |")
    text = "\n".join(
        [
            "# Peak memory of a training step",
            "",
            "MiB that a rank's memory grows from before the wrapper is made to its peak in five "
            "steps, the model not counted; in parentheses by the model's size. 1.00 would be the "
            f"gradients alone. K = 2, medians of {options.rounds} rounds. "
            + sentence("python benchmarks/memory.py"),
            "",
            "| model | MiB | " + " | ".join(VARIANTS) + " |",
            "|---" * (2 + len(VARIANTS)) + "|",
            *rows,
        ]
    )
    print(text)
    if options.write:
        save("memory", text, {"MiB": measured})


if __name__ == "__main__":
    main()
