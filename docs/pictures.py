"""Draws the pictures of README.md, each from a run: ``python docs/pictures.py``."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from IPython.core.interactiveshell import InteractiveShell
from matplotlib.figure import Figure
from torch import nn

from course_lib.checking import check
from course_lib.ddp import DistributedDataParallel
from course_lib.figures import Span, step_spans, timelines, use_course_style
from course_lib.ranks import Device, Network, Ranks, clock, compute
from course_lib.ranks.trace.figure import png_of

HERE = Path(__file__).parent

Picture = tuple[Figure, str]
"""A figure, and its alternative text."""

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


def one_step() -> Picture:
    """Draw one step of data-parallel training: gradients leave while backward goes on."""
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


PASS_ON = """\
def pass_on(x):
    rank, k = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    dist.recv(received, src=(rank - 1) % k)
    dist.send(x, dst=(rank + 1) % k)
    return received


Ranks(3, on="simulated").run(pass_on, torch.ones(1000))"""

RING = """\
def ring_all_reduce(tensor, group=None):
    dist.all_reduce(tensor, group=group)


check("03_collectives/ring_all_reduce", ring_all_reduce)"""


def deadlock() -> Picture:
    """Show the report of a deadlock, under the function that has it."""
    _, error = run_as_cell(PASS_ON)
    report = f"{type(error).__name__}: {error}".rstrip().splitlines()
    figure = text_figure([*PASS_ON.splitlines(), "", *report])
    alt = (
        "A function in which three ranks each receive from the left before they send to the right, "
        f"and what running it says: {report[0]} {report[-1]}"
    )
    return figure, alt


def graded() -> Picture:
    """Show the report of a check that grants a part of the points."""
    printed, _ = run_as_cell(RING)
    lines = printed.rstrip().splitlines()
    figure = text_figure([*RING.splitlines(), "", *lines])
    alt = (
        "A function named ring_all_reduce that calls dist.all_reduce, and the report of its check: "
        f"{lines[0].partition(': ')[2]}; {' '.join(' '.join(lines[2:4]).split())}; "
        f"{lines[-1].strip()}."
    )
    return figure, alt


def run_as_cell(source: str) -> tuple[str, BaseException]:
    """Run a cell as a notebook would; return what it printed, and the error that it ended with."""
    shell = InteractiveShell.instance()
    shell.showtraceback = lambda *_args, **_more: None
    shell.push({"torch": torch, "dist": dist, "Ranks": Ranks, "check": check})
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = shell.run_cell(source)
    assert result.error_in_exec is not None, "it was to fail"
    return printed.getvalue(), result.error_in_exec


def text_figure(lines: list[str]) -> Figure:
    """Return lines of text as a picture: dark on light, whatever the page's colours."""
    height, width = 0.21, 0.093  # of a line and of a character, in inches
    size = (width * max(map(len, lines)) + 0.5, height * len(lines) + 0.4)
    figure = Figure(figsize=size, facecolor="#f6f8fa")
    for number, line in enumerate(lines):
        mark = line.strip()[:1]
        colour = {"✓": "#116329", "✗": "#a40e26"}.get(mark, "#1f2328")
        bold = "bold" if line.startswith(("DeadlockError", "  0 %", "  50 %")) else "normal"
        y = 1 - (0.2 + height * (number + 0.5)) / size[1]
        figure.text(
            *(0.25 / size[0], y, line.replace("$", r"\$")),
            **{"family": "DejaVu Sans Mono", "size": 11, "color": colour, "weight": bold},
            va="center",
        )
    return figure


PICTURES = {"one_step.png": one_step, "deadlock.png": deadlock, "graded.png": graded}


def main() -> None:
    """Draw all pictures."""
    for name, draw in PICTURES.items():
        figure, alt = draw()
        (HERE / name).write_bytes(png_of(figure))
        print(f"{HERE / name}: {alt}")


if __name__ == "__main__":
    main()
