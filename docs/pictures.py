"""Draws the picture of README.md from a run: ``python docs/pictures.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn

from course_lib.ddp import DistributedDataParallel
from course_lib.figures import Span, step_spans, timelines, use_course_style
from course_lib.ranks import Device, Network, Ranks, clock, compute
from course_lib.ranks.trace.figure import png_of

PICTURE = Path(__file__).with_name("one_step.png")
LAYERS, WIDTH, ROWS = 8, 256, 64
UPDATE = 2e-3  # seconds, declared


def training_step(bucket_cap_mb: float, first_bucket_mb: float) -> list[Span]:
    """Run a step of data-parallel training on four simulated ranks; return what rank 0 did."""

    def step() -> list[tuple[str, float]]:
        marks: list[tuple[str, float]] = []

        def mark(name: str) -> Callable[..., None]:
            return lambda *_: marks.append((name, clock()))

        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        for number, layer in enumerate(layers, 1):
            layer.register_forward_hook(mark(f"F{number}"))
            layer.weight.register_post_accumulate_grad_hook(mark(f"B{number}"))
        ddp = DistributedDataParallel(
            nn.Sequential(*layers), bucket_cap_mb=bucket_cap_mb, first_bucket_mb=first_bucket_mb
        )
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
        dist.barrier()
        mark("")()
        ddp(x).square().mean().backward()
        mark("")()  # the time before this mark is that of communication
        compute(UPDATE)
        mark("U")()
        return marks

    # A slow network and a slow device, so that both are worth looking at.
    ranks = Ranks(4, on="simulated", network=Network(0.2e-3, 200e6), device=Device(flops=4e9))
    return step_spans(ranks.run(step)[0], ranks.trace)


def one_step() -> tuple[Figure, str]:
    """Draw a step in which gradients leave while backward goes on; return alternative text, too."""
    panels, exposed = {}, []
    for title, sizes in {
        "Buckets leave as soon as their gradients are there": (0.5, 0.25),
        "The same gradients in one bucket, which leaves last": (100, 100),
    }.items():
        spans = training_step(*sizes)
        ends = {lane: end for _, lane, _, end, _ in spans}
        backward = ends["backward"]
        exposed.append(ends["all-reduce"] - backward)
        panels[f"{title}: {exposed[-1]:.1f} ms exposed"] = spans
    use_course_style()
    alt = (
        f"Two timelines of one training step of rank 0 of four: forward, layers 1 to {LAYERS}, "
        f"then backward, layers {LAYERS} to 1, which ends at {backward:.1f} ms, all-reduces, and "
        "the update. If gradients leave in buckets while backward goes on, "
        f"{exposed[0]:.1f} ms of communication are exposed after it; if they leave in one bucket "
        f"at the end, {exposed[1]:.1f} ms."
    )
    return timelines(panels, unit="ms"), alt


def main() -> None:
    """Draw the picture, and print its alternative text."""
    figure, alt = one_step()
    PICTURE.write_bytes(png_of(figure))
    print(f"{PICTURE}: {alt}")


if __name__ == "__main__":
    main()
