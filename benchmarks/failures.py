"""Time how soon a failure is explained, how soon the next call returns, and how training continues.

    python benchmarks/failures.py [--rounds 5] [--write]

The first table is about four ranks without a time limit. So such a call ends only because the
failure is found. New ranks replace the ranks that a failure has cost. The second time is the time
of the first call on the new ranks.

For the second table, a rank of a training is killed. It shows how long all ranks stand still and
how long the rank is missing. From these times, `simulate.failures` computes the share of the time
that is spent on training.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from machine import BusyElsewhere, arguments, publish, sentence

from course_lib.ranks import Ranks, RanksError
from course_lib.simulate.failures import Fleet, rejoining, restarting, shrinking
from course_lib.train import TrainConfig
from course_lib.train.checkpoint import save_checkpoint
from course_lib.train.elastic import Training, supervise

K = 4
TARGET = 2.0
"""Target: seconds until the explanation."""


def ring_of_receives() -> None:
    """Wait for the neighbour, which waits for the next rank."""
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
    """Return the seconds of a call, which must fail if `fails`, and must not fail otherwise."""
    start = time.perf_counter()
    try:
        ranks.run(program)
    except RanksError:
        assert fails
    else:
        assert not fails
    return time.perf_counter() - start


EVERY = 60.0
"""Assumed average seconds between two failures of the four ranks, for the second table."""
REPAIR = 60.0
"""Assumed seconds until a rank that is not replaced comes back."""
LOST = {
    "saving": "a checkpoint is saved",
    "restart": "all are killed, until four new processes take a step",
    "leaves": "one is killed, until the other three take a step",
    "joins": "a new process joins, between two steps of the others",
    "away": "one is killed, until its new process takes a step (the others train)",
}


def seconds_lost() -> dict[str, float]:
    """Return the seconds of each event in `LOST`, in a training of four ranks."""
    config = TrainConfig(width=16, layers=1, steps=300)
    pids: set[int] = set()
    times: dict[tuple[int, int], float] = {}  # (rank, step) → its time

    def kill(step: int, victims: Callable[[int], set[int]], rank: int, pid: int, now: int) -> None:
        times[rank, now] = time.perf_counter()
        pids.add(pid)
        if (rank, now) == (2, step) and "kill" not in lost:
            lost["kill"] = times[rank, now]
            for victim in victims(pid):
                os.kill(victim, signal.SIGKILL)

    lost: dict[str, float] = {}
    outcome = supervise(K, config, on_step=partial(kill, 10, lambda pid: {pid}))
    fewer = [step.step for step in outcome.steps[0] if step.members < K]
    assert outcome.died == [2] and fewer[-1] < config.steps
    killed = lost.pop("kill")
    lost["leaves"] = times[0, fewer[0]] - killed
    lost["joins"] = times[0, fewer[-1] + 1] - times[0, fewer[-1]]
    lost["away"] = times[0, fewer[-1] + 1] - killed
    pids.clear()
    try:
        supervise(K, config, replace=False, on_step=partial(kill, 10, lambda pid: pids))
    except RuntimeError:  # all ranks have died
        killed = lost.pop("kill")
    times.clear()
    supervise(K, replace(config, steps=1), on_step=partial(kill, 10, lambda pid: set()))
    lost["restart"] = min(times.values()) - killed
    training = Training(config)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        save_checkpoint(Path(folder), 1, training.state()._asdict())
        lost["saving"] = time.perf_counter() - start
    return lost


def training_goes_on(lost: dict[str, float]) -> str:
    """Return the second table: the times, and the shares that follow from them."""
    stall = (lost["leaves"] + lost["joins"]) / 2  # the formulas count the stall twice
    fleet = Fleet(K, K * EVERY, lost["saving"], lost["restart"], stall, REPAIR, replica=1)
    shares = {
        "restart": restarting(fleet),
        "shrink": shrinking(fleet),
        "rejoin": rejoining(replace(fleet, restart=lost["away"])),
    }
    rows = [f"| {what} | {lost[name]:.2g} |" for name, what in LOST.items()]
    told = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    return "\n".join(
        [
            "",
            "## Training that goes on",
            "",
            f"`course_lib.train.elastic`, {K} ranks, medians, in seconds:",
            "",
            "| | seconds |",
            "|---|---|",
            *rows,
            "",
            f"With a failure every {EVERY:g} s, and a repair of {REPAIR:g} s for *shrink* (both "
            f"assumed), `simulate.failures` computes the share of the time that trains: {told}.",
        ]
    )


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
    measured = [seconds_lost() for _ in range(options.rounds)]
    lost = {name: [each[name] for each in measured] for name in LOST}
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
    text += "\n" + training_goes_on({name: statistics.median(each) for name, each in lost.items()})
    series = {f"{name}, explained (s)": seconds for name, seconds in explained.items()}
    series |= {f"{name}, next call (s)": seconds for name, seconds in after.items()}
    series |= {f"{LOST[name]} (s)": seconds for name, seconds in lost.items()}
    publish("failures", text, series, options.write)


if __name__ == "__main__":
    main()
