"""Compare our ring all-reduce with gloo's all-reduce, from 1 KB to 256 MB.

    python benchmarks/all_reduce.py [--rounds 7] [--write]

Both are timed in turn on the same ranks, in an order that is reversed every round. The slowest rank
gives the time, and ratios are taken within a round. Messages between ranks of one machine are
copies that the ranks' own cores make, so the advantage of a ring shows on a network, not here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from machine import arguments, publish, ratios, sentence
from torch import Tensor

from course_lib.collectives import ring_all_reduce
from course_lib.ranks import Ranks

SIZES = [1 << 10, 1 << 14, 1 << 17, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28]
AT_ONCE = {1 << 10: 40, 1 << 14: 40, 1 << 17: 30, 1 << 18: 20, 1 << 20: 10, 1 << 22: 4}
ALGORITHMS: dict[str, Callable[[Tensor], object]] = {
    "gloo": dist.all_reduce,
    "ring": ring_all_reduce,
}
Times = dict[str, list[float]]


def measure(rounds: int) -> dict[int, Times]:
    """Return, on a rank: size in bytes → algorithm → seconds of the slowest rank, per round."""
    results: dict[int, Times] = {}
    for size in SIZES:
        tensor, repeats = torch.zeros(size // 4), AT_ONCE.get(size, 2)
        for all_reduce in ALGORITHMS.values():
            all_reduce(tensor)
        results[size] = {name: [] for name in ALGORITHMS}
        for number in range(rounds):
            for name in list(ALGORITHMS) if number % 2 else list(reversed(ALGORITHMS)):
                results[size][name].append(slowest(ALGORITHMS[name], tensor, repeats))
    return results


def slowest(all_reduce: Callable[[Tensor], object], tensor: Tensor, repeats: int) -> float:
    """Return the seconds of one call, the mean of `repeats`, on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        all_reduce(tensor)
    seconds = torch.tensor([(time.perf_counter() - start) / repeats], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def table(world_size: int, results: dict[int, Times]) -> str:
    """Return the ratios as Markdown."""
    lines = [f"| K = {world_size} | gloo (ms) | ring |", "|---|---|---|"]
    for size, times in results.items():
        gloo, ratio = median(times["gloo"]), median(ratios(times, "ring", "gloo"))
        lines.append(f"| {pretty(size)} | {1e3 * gloo:.3g} | {ratio:.2g} |")
    return "\n".join(lines)


def pretty(size: int) -> str:
    """Return bytes as text."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def main() -> None:
    """Print the tables; with ``--write``, also to ``benchmarks/results/all_reduce.md``."""
    options = arguments(__doc__, rounds=7).parse_args()
    measured = {}
    for world_size in (2, 4):
        with Ranks(world_size, on="cpu", metered=False) as ranks:
            measured[world_size] = ranks.run(measure, options.rounds)[0]
    text = "\n\n".join(
        [
            "# The ring beside gloo's all-reduce",
            f"Time divided by gloo's time: below 1 is faster. float32, medians of {options.rounds} "
            "interleaved rounds. " + sentence("python benchmarks/all_reduce.py"),
            *(table(world_size, results) for world_size, results in measured.items()),
        ]
    )
    publish("all_reduce", text, options.write)


if __name__ == "__main__":
    main()
