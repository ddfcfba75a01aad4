"""Compare ranks with other ways to run functions on K processes: start, restart, call, memory.

    python benchmarks/ranks_vs_peers.py [--rounds 3]

The peers are a pool of spawned processes, as ``torch.multiprocessing`` makes them, and ipyparallel
if it is installed. Everything is measured in one run, in turn, so that the ratios are meaningful
even on a busy machine. Memory is the PSS (shared pages counted in part) of the whole idle tree of
processes, if the system reports it.
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
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import cloudpickle
import torch
import torch.distributed as dist
from machine import arguments, publish, sentence

from autograder.sandbox.memory import descendants

_REST = 5.0
"""Seconds between the first step and the others; ours still loads modules during the first."""


def nothing() -> int:
    """Return at once."""
    return 0


def sum_of_ranks() -> float:
    """Return 0 + 1 + … + K-1, by an all_reduce."""
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


def ddp_step() -> float:
    """Return the seconds of one DDP step, model included."""
    start = time.monotonic()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    return time.monotonic() - start


class Pool(Protocol):
    """The interface of the compared pools."""

    def run(self, fn: Callable[[], Any]) -> list[Any]:
        """Return the result of every rank."""

    def kill_one(self) -> None:
        """End one rank with SIGKILL, and make the pool usable again."""

    def close(self) -> None:
        """End everything."""


class Ours:
    """`course_lib.ranks`."""

    def __init__(self, world_size: int) -> None:
        from course_lib.ranks import Ranks

        self._ranks = Ranks(world_size, on="cpu")

    def run(self, fn: Callable[[], Any]) -> list[Any]:
        return self._ranks.run(fn)

    def kill_one(self) -> None:
        from course_lib.ranks import RankError

        os.kill(self._ranks.processes()[0], signal.SIGKILL)
        # The death is noticed before the next call or in it. Then new ranks start.
        with suppress(RankError):
            self._ranks.run(nothing)

    def close(self) -> None:
        self._ranks.close()


def _serve(pipe: Connection, rank: int, world_size: int, store: str) -> None:
    """Run calls on a rank of the spawned pool."""
    _join(store, rank, world_size)
    with suppress(EOFError):
        while True:
            pipe.send(cloudpickle.loads(pipe.recv_bytes())())


class Spawned:
    """One spawned process per rank, a pipe to each, functions sent by cloudpickle."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(self._world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, self._world_size, f"{self._folder.name}/store")
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, fn: Callable[[], Any]) -> list[Any]:
        call = cloudpickle.dumps(fn)
        for pipe in self._pipes:
            pipe.send_bytes(call)
        return [pipe.recv() for pipe in self._pipes]

    def kill_one(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


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
        for each in joined:
            each.get()

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
        pool: Pool = {"ours": Ours, "spawn": Spawned, "ipyparallel": IPyParallel}[kind](world_size)
        expected = [sum(range(world_size))] * world_size
        assert pool.run(sum_of_ranks) == expected
    first_step = max(pool.run(ddp_step))
    time.sleep(_REST)
    warm_step = statistics.median(max(pool.run(ddp_step)) for _ in range(5))
    calls: list[float] = []
    reductions: list[float] = []
    for _ in range(50):
        with timer(calls):
            pool.run(nothing)
        with timer(reductions):
            pool.run(sum_of_ranks)
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
        "call with all_reduce (ms)": 1e3 * statistics.median(reductions),
        "first DDP step (s)": first_step,
        "warm DDP step (s)": warm_step,
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
            command += ["--world-sizes", str(world_size)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results[kind].append(json.loads(done.stdout.splitlines()[-1]))
    return {
        kind: {what: [r[what] for r in each] for what in each[0]} for kind, each in results.items()
    }


def table(world_size: int, measured: Rounds) -> str:
    """Return the medians, and their ratios to ours, as Markdown."""
    lines = [
        f"| K = {world_size} | " + " | ".join(measured) + " |",
        "|---" * (len(measured) + 1) + "|",
    ]
    for what in measured["ours"]:
        values = [statistics.median(each[what]) for each in measured.values()]
        cells = [f"{value:.3g} ({value / (values[0] or 1):.2g}×)" for value in values]
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables; with ``--write``, also to ``benchmarks/results/ranks_vs_peers.*``."""
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.world_sizes[0])))
        return
    kinds = ["ours", "spawn"]
    kinds += ["ipyparallel"] if importlib.util.find_spec("ipyparallel") else []
    title = (
        "# Ranks beside their peers\n\n"
        f"Medians of {options.rounds} interleaved rounds; in parentheses the ratio to ours.\n"
        + sentence("python benchmarks/ranks_vs_peers.py")
    )
    measured = {size: compare(kinds, size, options.rounds) for size in options.world_sizes}
    text = "\n\n".join([title, *(table(size, each) for size, each in measured.items())])
    series = {
        f"K = {size}, {kind}, {what}": numbers
        for size, kinds_of in measured.items()
        for kind, each in kinds_of.items()
        for what, numbers in each.items()
    }
    publish("ranks_vs_peers", text, series, options.write)


if __name__ == "__main__":
    main()
