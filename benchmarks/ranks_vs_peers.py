"""Compare ranks with ipyparallel, if it is installed: start, restart, call, memory.

    python benchmarks/ranks_vs_peers.py [--rounds 3]

Both are measured in one run, in turn, so that the ratios are meaningful even on a busy machine.
Memory is the PSS (shared pages counted in part) of the whole idle tree of processes, if the system
reports it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import arguments, publish, sentence

from autograder.sandbox.memory import descendants

_REST = 5.0
"""Seconds between the start and the calls; ours still loads modules after the start."""


def nothing() -> int:
    """Return at once."""
    return 0


def sum_of_ranks() -> float:
    """Return 0 + 1 + … + K-1, by an all_reduce."""
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


class Ours:
    """`course_lib.ranks`, with the methods that the other pool has, too."""

    def __init__(self, world_size: int) -> None:
        from course_lib.ranks import Ranks

        self._ranks = Ranks(world_size, on="cpu")

    def run(self, fn: Callable[[], Any]) -> list[Any]:
        """Return the result of every rank."""
        return self._ranks.run(fn)

    def kill_one(self) -> None:
        """End one rank with SIGKILL, and make the pool usable again."""
        from course_lib.ranks import RankError

        os.kill(self._ranks.processes()[0], signal.SIGKILL)
        # The death is noticed before the next call or in it. Then new ranks start.
        with suppress(RankError):
            self._ranks.run(nothing)

    def close(self) -> None:
        """End everything."""
        self._ranks.close()


class IPyParallel:
    """ipyparallel's local cluster."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._start()

    def _start(self) -> None:
        import ipyparallel

        self._folder = tempfile.TemporaryDirectory()
        self._cluster = ipyparallel.Cluster(n=self._world_size, log_level=40)
        client = self._cluster.start_and_connect_sync(activate=False)
        self._view = client[:]
        self._view.use_cloudpickle().get()
        store = f"{self._folder.name}/store"
        joined = [
            client[engine].apply_async(_join, store, rank, self._world_size)
            for rank, engine in enumerate(client.ids)
        ]
        for reply in joined:
            reply.get()

    def run(self, fn: Callable[[], Any]) -> list[Any]:
        return list(self._view.apply_sync(fn))

    def kill_one(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        self._cluster.stop_cluster_sync()
        self._folder.cleanup()


def _join(store: str, rank: int, world_size: int) -> None:
    """Join the process group, in a process of a peer."""
    torch.set_num_threads(1)
    file_store = dist.FileStore(store, world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=world_size)


def memory(pid: int) -> float:
    """Return the PSS of the descendants of `pid`, in MiB; 0 if the system does not report it."""
    total = 0
    for child in descendants(pid):
        with suppress(OSError):
            lines = Path(f"/proc/{child}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


@contextmanager
def timer(into: list[float]) -> Iterator[None]:
    """Append the seconds of the block."""
    start = time.monotonic()
    yield
    into.append(time.monotonic() - start)


def measure(kind: str, world_size: int) -> dict[str, float]:
    """Return the times and memory of one pool, measured in this process, which must be fresh."""
    cold: list[float] = []
    with timer(cold):
        pool: Ours | IPyParallel = Ours(world_size) if kind == "ours" else IPyParallel(world_size)
        expected = [sum(range(world_size))] * world_size
        assert pool.run(sum_of_ranks) == expected
    time.sleep(_REST)
    calls: list[float] = []
    for _ in range(50):
        with timer(calls):
            pool.run(nothing)
    restart: list[float] = []
    for _ in range(3 if kind == "ours" else 1):
        with timer(restart):
            pool.kill_one()
            assert pool.run(sum_of_ranks) == expected
    idle = memory(os.getpid())
    pool.close()
    return {
        "cold start (s)": cold[0],
        "restart (s)": statistics.median(restart),
        "empty call (ms)": 1e3 * statistics.median(calls),
        "memory, PSS (MiB)": idle,
    }


Rounds = dict[str, dict[str, list[float]]]
"""Kind → measurement → a number for each round."""


def compare(kinds: list[str], world_size: int, rounds: int) -> Rounds:
    """Measure every kind in fresh processes, in turn."""
    results: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind in kinds:
            print(f"K = {world_size}, round {number + 1} of {rounds}: {kind} …", file=sys.stderr)
            command = [sys.executable, __file__, "--measure", kind]
            command += ["--world-size", str(world_size)]
            process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results[kind].append(json.loads(process.stdout.splitlines()[-1]))
    return {
        kind: {measurement: [run[measurement] for run in runs] for measurement in runs[0]}
        for kind, runs in results.items()
    }


def table(world_size: int, measured: Rounds) -> str:
    """Return the medians, and their ratios to ours, as Markdown."""
    lines = [
        f"| K = {world_size} | " + " | ".join(measured) + " |",
        "|---" * (len(measured) + 1) + "|",
    ]
    for measurement in measured["ours"]:
        values = [statistics.median(numbers[measurement]) for numbers in measured.values()]
        cells = [f"{value:.3g} ({value / (values[0] or 1):.2g}×)" for value in values]
        lines.append(f"| {measurement} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables; with ``--write``, also to ``benchmarks/results/ranks_vs_peers.md``."""
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--world-size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.world_size)))
        return
    kinds = ["ours"]
    kinds += ["ipyparallel"] if importlib.util.find_spec("ipyparallel") else []
    title = (
        "# Ranks beside their peers\n\n"
        f"Medians of {options.rounds} interleaved rounds; in parentheses the ratio to ours.\n"
        + sentence("python benchmarks/ranks_vs_peers.py")
    )
    measured = {size: compare(kinds, size, options.rounds) for size in (2, 4)}
    text = "\n\n".join([title, *(table(size, rounds) for size, rounds in measured.items())])
    publish("ranks_vs_peers", text, options.write)


if __name__ == "__main__":
    main()
