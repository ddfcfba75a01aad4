"""Measure whether operations on an emulated slow network take the time of its model.

    python benchmarks/emulated_link.py [--rounds 9] [--write]

They never take less time, which the tests check. How much more time they take depends on the
machine: on how soon it wakes a thread, and on whether gloo, which moves the data, is faster than
the emulated network.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from machine import BusyElsewhere, arguments, publish, sentence

from course_lib.ranks import Network, Ranks
from course_lib.ranks.costs.collective_time import collective_time

SLOW = Network(latency=2e-3, bandwidth=40e6)
MB = 1_000_000
MOST = 1.1
"""Target: the largest ratio of the median to the model's time."""


def all_reduce() -> None:
    """All-reduce 4 MB."""
    dist.all_reduce(torch.ones(MB))


def ring() -> None:
    """Send and receive a third of 6 MB, four times, around a ring of three."""
    rank, k = dist.get_rank(), dist.get_world_size()
    mine, theirs = torch.ones(6 * MB // 4 // k), torch.empty(6 * MB // 4 // k)
    for _ in range(2 * (k - 1)):
        request = dist.isend(mine, (rank + 1) % k)
        dist.recv(theirs, (rank - 1) % k)
        request.wait()


def two_buckets() -> None:
    """All-reduce 4 MB twice, and sleep 0.1 s during the first, which hides the sleep."""
    works = [dist.all_reduce(torch.ones(MB), async_op=True) for _ in range(2)]
    time.sleep(0.1)
    for work in works:
        work.wait()


def fan_out() -> None:
    """Send 2 MB to each of two ranks at once, over one link."""
    x = torch.ones(MB // 2)
    if dist.get_rank() == 0:
        for request in [dist.isend(x, 1), dist.isend(x, 2)]:
            request.wait()
    else:
        dist.recv(x, 0)


def rows_and_columns() -> None:
    """All-reduce 4 MB in the rows and 4 MB in the columns of a 2×2 mesh, at the same time."""
    rank = dist.get_rank()
    if not MESH:
        MESH.extend(dist.new_group(pair) for pair in ([0, 1], [2, 3], [0, 2], [1, 3]))
    works = [
        dist.all_reduce(torch.ones(MB), group=MESH[rank // 2], async_op=True),
        dist.all_reduce(torch.ones(MB), group=MESH[2 + rank % 2], async_op=True),
    ]
    for work in works:
        assert work is not None
        work.wait()


MESH: list[dist.ProcessGroup] = []
"""On a rank: the rows, then the columns, made in the first round."""


def late() -> None:
    """All-reduce 2 MB, with rank 1 starting 0.1 s late."""
    time.sleep(0.1 * dist.get_rank())
    dist.all_reduce(torch.ones(MB // 2))


class Case(NamedTuple):
    """A program, its number of ranks, and the model's seconds for it."""

    program: Callable[[], None]
    world_size: int
    model: float


def ring_time(k: int, nbytes: int) -> float:
    """Return the seconds of 2(K-1) steps with a K-th of the bytes each."""
    return 2 * (k - 1) * (SLOW.latency + nbytes / (k * SLOW.bandwidth))


CASES = {
    **{f"all_reduce, K = {k}": Case(all_reduce, k, ring_time(k, 4 * MB)) for k in (2, 3, 4)},
    "a ring by hand, K = 3": Case(ring, 3, ring_time(3, 6 * MB)),
    "two all_reduces beside computation": Case(two_buckets, 2, 2 * ring_time(2, 4 * MB)),
    "two sends over one link": Case(fan_out, 3, SLOW.latency + 4 * MB / SLOW.bandwidth),
    "rows and columns of 2×2 at once": Case(
        rows_and_columns, 4, 8 * MB / SLOW.bandwidth + SLOW.latency
    ),
    "a rank that comes late": Case(late, 2, 0.1 + collective_time("all_reduce", SLOW, 2, 2 * MB)),
}


def measure(program: Callable[[], None], rounds: int) -> list[float]:
    """Return, on a rank, the seconds of each round, from a common start."""
    seconds = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        program()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]  # in the first round, gloo connects the ranks


def main() -> None:
    """Print the table; with ``--write``, also to ``benchmarks/results/emulated_link.*``."""
    options = arguments(__doc__, rounds=9).parse_args()
    series: dict[str, list[float]] = {}
    for name, case in CASES.items():
        busy = BusyElsewhere()
        with Ranks(case.world_size, on="cpu", network=SLOW) as ranks:
            of_ranks = ranks.run(measure, case.program, options.rounds)
        series[name] = [max(seconds) for seconds in zip(*of_ranks, strict=True)]
        print(f"{name}: others used {100 * busy.share():.0f} %", file=sys.stderr)
    rows = []
    for name, case in CASES.items():
        ratios = sorted(seconds / case.model for seconds in series[name])
        rows.append(
            f"| {name} | {1e3 * case.model:.1f} | {1e3 * statistics.median(series[name]):.1f} "
            f"| {statistics.median(ratios):.3f} | {ratios[0]:.3f} – {ratios[-1]:.3f} | {MOST:g} |"
        )
    text = "\n".join(
        [
            "# The time of an emulated network, beside its model",
            "",
            f"{1e3 * SLOW.latency:g} ms and {SLOW.bandwidth / MB:g} MB/s; the slowest rank, "
            f"medians of {options.rounds} rounds. "
            + sentence("python benchmarks/emulated_link.py"),
            "",
            "| what | model (ms) | measured (ms) | ratio | lowest – highest | target |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
    )
    named = {f"{name} (s)": seconds for name, seconds in series.items()}
    publish("emulated_link", text, named, options.write)


if __name__ == "__main__":
    main()
