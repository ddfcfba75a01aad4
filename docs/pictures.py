"""Draws the pictures of README.md, each from a run: ``python docs/pictures.py``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from course_lib.ddp import DistributedDataParallel
from course_lib.ranks import Device, Network, Ranks
from course_lib.ranks.trace.figure import DescribedFigure, png_of

HERE = Path(__file__).parent


def four_ranks() -> DescribedFigure:
    """Draw one step of data-parallel training: gradients leave while backward goes on."""

    def step() -> None:
        layers = [each for _ in range(8) for each in (nn.Linear(256, 256), nn.ReLU())]
        ddp = DistributedDataParallel(
            nn.Sequential(*layers), bucket_cap_mb=0.6, first_bucket_mb=0.3
        )
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(dist.get_rank()))
        dist.barrier()
        ddp(x).square().mean().backward()

    # A slow network and a slow device, so that both are worth looking at.
    device = Device(flops=4e9)
    ranks = Ranks(4, on="simulated", network=Network(0.3e-3, 150e6), device=device)
    ranks.run(step)
    begin = max(event.end for event in ranks.trace.events if event.kind == "barrier")
    trace = ranks.trace.between(begin)
    figure = trace.plot(title="One step on 4 ranks")
    buckets = [event for event in trace.operations if event.rank == 0]
    computed = max(event.end for event in trace.events if event.kind == "compute")
    figure.alt = (
        "Timeline of one training step on four ranks. Each rank computes without a pause for "
        f"{1e3 * computed:.0f} ms, forward and then backward. From {1e3 * buckets[0].start:.0f} ms "
        f"on, {len(buckets)} all_reduce operations carry its gradients, bucket by bucket, beside "
        f"the computation; the last one ends at {1e3 * trace.makespan:.0f} ms."
    )
    return figure


PICTURES: dict[str, Callable[[], DescribedFigure]] = {"four_ranks.png": four_ranks}


def main() -> None:
    """Draw all pictures, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=HERE, help="the folder (default: docs/)")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)}")
    options = parser.parse_args()
    for name in options.names or PICTURES:
        figure = PICTURES[name]()
        (options.to / name).write_bytes(png_of(figure))
        print(f"{options.to / name}: {figure.alt}")


if __name__ == "__main__":
    main()
