"""Time how long simulated ranks take on the real clock.

    python benchmarks/simulation.py [--rounds 5] [--write]

This times a ring all-reduce by hand on 64 ranks, collectives on 256, a sweep over world sizes as in
a check of a student's ring, the drawing of the first one's trace, and the time until a deadlock is
reported. It also times what `python -m course_lib.simulate` computes by formula, without the
seconds for importing torch: a step of 100,000 ranks, and the fastest layouts of a model on 512.
"""

from __future__ import annotations

import contextlib
import functools
import io
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from machine import arguments, publish, sentence

from course_lib.collectives import simple_ring_all_reduce
from course_lib.ranks import DeadlockError, Network, Ranks, Trace
from course_lib.ranks.trace.figure import png_of
from course_lib.simulate.__main__ import main as simulate

NETWORK = Network(latency=10e-6, bandwidth=10e9)


def ring_on_64() -> int:
    """All-reduce 64 numbers around a ring of 64 ranks; return the number of messages."""
    ranks = Ranks(64, on="simulated", network=NETWORK)
    ranks.run(lambda: simple_ring_all_reduce(torch.ones(64)))
    return sum(ranks.trace.calls(rank)["send"] for rank in range(64))


def collectives_on_256() -> int:
    """Run ten collectives on 256 ranks; return their number over all ranks."""

    def program() -> None:
        x = torch.ones(1000)
        for _ in range(3):
            dist.all_reduce(x)
            dist.broadcast(x, 0)
            dist.barrier()
        dist.all_gather([torch.empty(4) for _ in range(256)], torch.ones(4))

    ranks = Ranks(256, on="simulated", network=NETWORK)
    ranks.run(program)
    return sum(sum(ranks.trace.calls(rank).values()) for rank in range(256))


def sweep() -> int:
    """Check a ring on K = 1 … 8 with 12 lengths each; return the number of cases."""
    lengths = (1, 2, 3, 5, 7, 8, 16, 17, 64, 100, 255, 256)

    def program(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        for tensor in inputs:
            simple_ring_all_reduce(tensor)
        return inputs

    for world_size in range(1, 9):
        inputs = [torch.arange(float(length)) for length in lengths]
        for each in Ranks(world_size, on="simulated", network=NETWORK).run(program, inputs):
            for tensor, length in zip(each, lengths, strict=True):
                assert torch.equal(tensor, world_size * torch.arange(float(length)))
    return 8 * len(lengths)


def deadlock() -> int:
    """Find that four ranks wait for one another; return the number of ranks."""

    def program() -> None:
        dist.recv(torch.empty(1), (dist.get_rank() + 1) % 4)

    try:
        Ranks(4, on="simulated", network=NETWORK).run(program)
    except DeadlockError:
        return 4
    raise AssertionError("a deadlock was not reported")


@functools.cache
def ring_trace() -> Trace:
    """Return the trace of the ring on 64 ranks."""
    ranks = Ranks(64, on="simulated", network=NETWORK)
    ranks.run(lambda: simple_ring_all_reduce(torch.ones(64)))
    return ranks.trace


def drawing() -> int:
    """Draw the ring's trace as a notebook shows it; return the number of its events."""
    png_of(ring_trace().plot())
    return len(ring_trace().events)


STEP = (
    *("step", "--like", "MT-NLG 530B, 2240", "--layers", "100", "--batch", "20000"),
    *("--data", "500", "--tensor", "8", "--pipeline", "25"),
)
SEARCH = ("search", "--like", "MPT 30b, 8 H100", "--ranks", "512", "--batch", "1024")


def by_formula(*arguments: str) -> int:
    """Run ``python -m course_lib.simulate`` with `arguments`; return the lines it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert simulate(arguments) == 0
    return len(printed.getvalue().splitlines())


CASES: dict[str, tuple[Callable[[], int], str, float]] = {
    "ring all-reduce, 64 ranks": (ring_on_64, "messages", 2.0),
    "10 collectives, 256 ranks": (collectives_on_256, "operations", 5.0),
    "a ring checked on K = 1 … 8": (sweep, "cases", 1.0),
    "a trace drawn": (drawing, "events", 3.0),
    "a deadlock reported": (deadlock, "ranks", 0.05),
    "a step of 100,000 ranks, by formula": (lambda: by_formula(*STEP), "lines", 1.0),
    "the layouts of 512 ranks searched": (lambda: by_formula(*SEARCH), "lines", 30.0),
}
"""Name → (function, the unit that it counts, target in seconds)."""


def main() -> None:
    """Print the table; with ``--write``, also to ``benchmarks/results/simulation.*``."""
    options = arguments(__doc__, rounds=5).parse_args()
    deadlock()  # the first call loads modules
    drawing()
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    counts = {}
    for _ in range(options.rounds):
        for name, (case, _, _) in CASES.items():
            start = time.perf_counter()
            counts[name] = case()
            seconds[name].append(time.perf_counter() - start)
    rows = [
        f"| {name} | {counts[name]:,} {what} | {statistics.median(seconds[name]):.3g} "
        f"| {min(seconds[name]):.3g} – {max(seconds[name]):.3g} | {target:g} |"
        for name, (_, what, target) in CASES.items()
    ]
    text = "\n".join(
        [
            "# Simulated ranks, in the computer's own time",
            "",
            f"Seconds, medians of {options.rounds} rounds. "
            + sentence("python benchmarks/simulation.py"),
            "",
            "| what | size | seconds | lowest – highest | target |",
            "|---|---|---|---|---|",
            *rows,
        ]
    )
    series = {f"{name} (s)": times for name, times in seconds.items()}
    publish("simulation", text, series, options.write)


if __name__ == "__main__":
    main()
