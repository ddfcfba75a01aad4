"""Draws the pictures of README.md, each from a run: ``python docs/pictures.py``."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from IPython.core.interactiveshell import InteractiveShell
from matplotlib.patches import Rectangle
from torch import nn

from course_lib.checking import check
from course_lib.ddp import DistributedDataParallel
from course_lib.ranks import Device, Network, Ranks, clock, compute
from course_lib.ranks.trace.bars import COMPUTE, styles_of
from course_lib.ranks.trace.figure import DescribedFigure, png_of

HERE = Path(__file__).parent


K, LAYERS, WIDTH, ROWS = 4, 8, 256, 64
UPDATE = 2e-3  # seconds, declared
FORWARD, BACKWARD = "#e8e8e8", COMPUTE[0]
HIDDEN, EXPOSED = styles_of(["all_reduce", "send"])["all_reduce"][0], "#e69f00"
HIDDEN_TEXT, EXPOSED_TEXT, INK, QUIET = "#0a5f93", "#8f5300", "#1f2328", "#59636e"


class Step(NamedTuple):
    """A training step of one rank, with times in ms since it began."""

    marks: list[tuple[str, float]]
    """When each layer is over, forward ("F1") and backward ("B1"), and the update ("U")."""
    buckets: list[tuple[float, float, float]]
    """For each: when it is full, when its all-reduce begins, and when that ends."""


def training_step(bucket_cap_mb: float, first_bucket_mb: float) -> list[Step]:
    """Run a step of data-parallel training on simulated ranks; return what each rank did."""

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
        begin = clock()
        ddp(x).square().mean().backward()
        compute(UPDATE)
        mark("U")()
        return [("", begin), *marks]

    # A slow network and a slow device, so that both are worth looking at.
    ranks = Ranks(K, on="simulated", network=Network(0.2e-3, 200e6), device=Device(flops=4e9))
    steps = []
    for rank, marks in enumerate(ranks.run(step)):
        begin, buckets, free = marks[0][1], [], 0.0
        for event in ranks.trace.operations:
            if event.rank == rank and event.kind == "all_reduce" and event.start >= begin:
                full, ends = 1e3 * (event.start - begin), 1e3 * (event.end - begin)
                buckets.append((full, max(full, free), ends))  # one after the other
                free = ends
        steps.append(Step([(name, 1e3 * (end - begin)) for name, end in marks[1:]], buckets))
    return steps


def one_step() -> DescribedFigure:
    """Draw one step of data-parallel training: gradients leave while backward goes on."""
    steps, late = training_step(0.5, 0.25), training_step(100, 100)[0]
    marks, buckets = steps[0]
    ends = dict(marks)
    forward, backward, finish = ends[f"F{LAYERS}"], ends["B1"], ends["U"]
    over, alone = buckets[-1][2], late.buckets[-1][2] - backward
    hidden = sum(min(end, backward) - min(start, backward) for _, start, end in buckets)
    exposed = over - backward
    figure = DescribedFigure(figsize=(9, 4.5), dpi=200, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(-7.5, late.buckets[-1][2] + 0.5), ylim=(9.0, -1.5))

    def bar(
        start: float, end: float, top: float, high: float, color: str, edge: float = 1.2
    ) -> None:
        axes.add_patch(Rectangle((start, top), max(0.0, end - start), high, color=color, lw=0))
        axes.plot([end, end], [top, top + high], color="white", linewidth=edge)

    def say(x: float, y: float, text: str, color: str = INK, **more: Any) -> None:
        axes.text(x, y, text, color=color, **{"size": 9.5, "va": "center", "ha": "center"} | more)

    title = "One training step on four ranks: gradients leave while backward goes on"
    say(-7.5, -1.15, title, size=13, weight="bold", ha="left")
    say((0 + forward) / 2, -0.25, f"forward, layers 1 to {LAYERS}")
    say((forward + backward) / 2, -0.25, f"backward, layers {LAYERS} to 1")
    say((over + finish) / 2, -0.25, "update")
    tops, highs = (0.1, 1.3, 2.0, 2.7), (1.0, 0.5, 0.5, 0.5)
    for rank, (step, top, high) in enumerate(zip(steps, tops, highs, strict=True)):
        say(-0.8, top + high / 2, f"rank {rank}", ha="right")
        start = 0.0
        for name, end in step.marks:
            begin = over if name == "U" else start
            bar(begin, end, top, high, FORWARD if name[0] == "F" else BACKWARD)
            if rank == 0 and name != "U":
                say((begin + end) / 2, top + high / 2, name[1:], size=9)
            start = end
    say((backward + over) / 2, tops[0] + highs[0] / 2, "all wait", EXPOSED_TEXT)

    top, high, before = 4.2, 1.0, 0.0
    say(-0.8, top + high / 2, "network", ha="right")
    say(
        *(buckets[0][1] - 1, top + high / 2, "a bucket leaves as soon as\nits gradients are there"),
        **{"ha": "right", "color": HIDDEN_TEXT},
    )
    for full, start, end in buckets:
        bar(start, end, top, high, EXPOSED if end > backward else HIDDEN)
        bar(start, min(end, backward), top, high, HIDDEN, edge=0)
        inside = [name[1:] for name, ready in marks if name[0] == "B" and before < ready <= full]
        say((start + end) / 2, top + high / 2, "  ".join(inside), size=9)
        way = [(full, tops[0]), (full, top - 0.35), (start, top - 0.35), (start, top - 0.02)]
        axes.plot(*zip(*way, strict=True), color=INK, linewidth=0.8, solid_joinstyle="miter")
        head = {"arrowstyle": "-|>", "color": INK, "linewidth": 0.8, "mutation_scale": 7}
        axes.annotate("", way[3], way[2], arrowprops=head | {"shrinkA": 0, "shrinkB": 0})
        before = full
    low = top + high + 0.45
    middle, bold = (buckets[0][1] + backward) / 2, {"weight": "bold", "size": 10}
    say(middle, low, f"{hidden:.1f} ms hidden behind backward", HIDDEN_TEXT, **bold)
    say(backward, low, f"{exposed:.1f} ms exposed", EXPOSED_TEXT, ha="left", **bold)

    top, high = 6.7, 0.8
    bar(backward, backward + alone, top, high, EXPOSED)
    say(
        *(backward - 1, top + high / 2, "the same gradients in one bucket,\nwhich leaves last"),
        ha="right",
        color=EXPOSED_TEXT,
    )
    say(backward + alone / 2, top + high / 2, f"{alone:.1f} ms exposed", weight="bold", size=10)
    axis = 8.1
    axes.plot([0, late.buckets[-1][2]], [axis, axis], color=QUIET, linewidth=0.6)
    for time in range(0, 61, 10):
        axes.plot([time, time], [axis, axis + 0.12], color=QUIET, linewidth=0.6)
        say(time, axis + 0.42, f"{time} ms" if time in (0, 60) else f"{time}", QUIET, size=8.5)
    figure.alt = (
        f"Timeline of one training step. Four ranks compute forward, layers 1 to {LAYERS}, then "
        f"backward, layers {LAYERS} to 1, which ends at {backward:.1f} ms. From "
        f"{buckets[0][1]:.1f} ms on, {len(buckets)} buckets of gradients leave over the network, "
        f"each as soon as its gradients are there: {hidden:.1f} ms are hidden behind backward, "
        f"{exposed:.1f} ms are exposed. One bucket that leaves last would expose {alone:.1f} ms."
    )
    return figure


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


def deadlock() -> DescribedFigure:
    """Show the report of a deadlock, under the function that has it."""
    _, error = run_as_cell(PASS_ON)
    report = f"{type(error).__name__}: {error}".rstrip().splitlines()
    figure = text_figure([*PASS_ON.splitlines(), "", *report])
    figure.alt = (
        "A function in which three ranks each receive from the left before they send to the right, "
        f"and what running it says: {report[0]} {report[-1]}"
    )
    return figure


def graded() -> DescribedFigure:
    """Show the report of a check that grants a part of the points."""
    printed, _ = run_as_cell(RING)
    lines = printed.rstrip().splitlines()
    figure = text_figure([*RING.splitlines(), "", *lines])
    figure.alt = (
        "A function named ring_all_reduce that calls dist.all_reduce, and the report of its check: "
        f"{lines[0].partition(': ')[2]}; {' '.join(' '.join(lines[2:4]).split())}; "
        f"{lines[-1].strip()}."
    )
    return figure


def run_as_cell(source: str) -> tuple[str, BaseException]:
    """Run a cell as a notebook would; return what it printed, and the error that it ended with."""
    shell = InteractiveShell.instance()
    shell.showtraceback = lambda *_args, **_more: None
    shell.push({"torch": torch, "dist": dist, "Ranks": Ranks, "check": check})
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        done = shell.run_cell(source)
    assert done.error_in_exec is not None, "it was to fail"
    return printed.getvalue(), done.error_in_exec


def text_figure(lines: list[str]) -> DescribedFigure:
    """Return lines of text as a picture: dark on light, whatever the page's colours."""
    height, width = 0.21, 0.093  # of a line and of a character, in inches
    size = (width * max(map(len, lines)) + 0.5, height * len(lines) + 0.4)
    figure = DescribedFigure(figsize=size, facecolor="#f6f8fa")
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


PICTURES: dict[str, Callable[[], DescribedFigure]] = {
    "one_step.png": one_step,
    "deadlock.png": deadlock,
    "graded.png": graded,
}


def main() -> None:
    """Draw all pictures, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--to", type=Path, default=HERE, help="folder of the pictures (default: docs/)"
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"pictures to draw, of {', '.join(PICTURES)} (default: all)",
    )
    options = parser.parse_args()
    for name in options.names or PICTURES:
        figure = PICTURES[name]()
        (options.to / name).write_bytes(png_of(figure))
        print(f"{options.to / name}: {figure.alt}")


if __name__ == "__main__":
    main()
