"""How soon a failure on CPU ranks is explained, and how soon the next call has its result.

    python benchmarks/failures.py [--rounds 5] [--write]

On four ranks without a time limit: what ends such a call is that the failure was found. Fresh
ranks replace those that a failure has cost; the second time is that of the first call on them.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from machine import BusyElsewhere, arguments, publish, sentence

from course_lib.ranks import Ranks, RanksError

K = 4
TARGET = 2.0
"""Seconds until the explanation is there."""


def ring_of_receives() -> None:
    """Wait for the neighbour, who waits for the next."""
    dist.recv(torch.empty(1), (dist.get_rank() + 1) % K)


def one_skips() -> None:
    """Leave a collective out, on one rank."""
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(3))


def shapes_differ() -> None:
    """Enter one collective with different shapes."""
    dist.all_reduce(torch.ones(3 + (dist.get_rank() == 1)))


def two_are_stuck() -> None:
    """Wait for one another, on two ranks, while the others compute."""
    if dist.get_rank() < 2:
        dist.recv(torch.empty(1), 1 - dist.get_rank())
    time.sleep(1000)


def one_raises() -> None:
    """Raise on one rank, while the others wait for it."""
    if dist.get_rank() == 1:
        raise ValueError("no such shard")
    dist.barrier()


def one_dies() -> None:
    """End a process, while the others wait for it."""
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


CASES: dict[str, Callable[[], None]] = {
    "a ring of receives": ring_of_receives,
    "a collective that one rank skips": one_skips,
    "shapes that differ": shapes_differ,
    "two ranks stuck, two computing": two_are_stuck,
    "an exception on one rank": one_raises,
    "a process that ends": one_dies,
}


def seconds_of(ranks: Ranks, program: Callable[[], object], fails: bool) -> float:
    """Return how long a call takes, which must fail or must not."""
    start = time.perf_counter()
    try:
        ranks.run(program)
    except RanksError:
        assert fails
    else:
        assert not fails
    return time.perf_counter() - start


def main() -> None:
    """Print the table; with ``--write``, also to ``benchmarks/results/failures.*``."""
    options = arguments(__doc__, rounds=5).parse_args()
    explained: dict[str, list[float]] = {name: [] for name in CASES}
    after: dict[str, list[float]] = {name: [] for name in CASES}
    busy = BusyElsewhere()
    with Ranks(K, on="cpu", timeout=None) as ranks:
        ranks.run(dist.barrier)
        for _ in range(options.rounds):
            for name, program in CASES.items():
                explained[name].append(seconds_of(ranks, program, fails=True))
                after[name].append(seconds_of(ranks, dist.barrier, fails=False))
    print(f"others used {100 * busy.share():.0f} %", file=sys.stderr)
    rows = [
        f"| {name} | {statistics.median(seconds):.2g} | {min(seconds):.2g} – {max(seconds):.2g} "
        f"| {TARGET:g} | {statistics.median(after[name]):.2g} |"
        for name, seconds in explained.items()
    ]
    text = "\n".join(
        [
            "# From a failure to its explanation",
            "",
            f"Seconds, {K} ranks, medians of {options.rounds} rounds. Last column: the time of the "
            "next call, on fresh ranks. " + sentence("python benchmarks/failures.py"),
            "",
            "| what goes wrong | explained after | lowest – highest | target | next call |",
            "|---|---|---|---|---|",
            *rows,
        ]
    )
    series = {f"{name}, explained (s)": seconds for name, seconds in explained.items()}
    series |= {f"{name}, next call (s)": seconds for name, seconds in after.items()}
    publish("failures", text, series, options.write)


if __name__ == "__main__":
    main()
