"""Draws the pictures of README.md, each from a run: ``python docs/pictures.py``."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from IPython.core.interactiveshell import InteractiveShell
from torch import nn

from course_lib.checking import check
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
    """Show what a deadlock is told, under the function that has it."""
    _, error = run_as_cell(PASS_ON)
    told = f"{type(error).__name__}: {error}".rstrip().splitlines()
    figure = text_figure([*PASS_ON.splitlines(), "", *told])
    figure.alt = (
        "A function in which three ranks each receive from the left before they send to the right, "
        f"and what running it says: {told[0]} {told[-1]}"
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
    "four_ranks.png": four_ranks,
    "deadlock.png": deadlock,
    "graded.png": graded,
}


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
