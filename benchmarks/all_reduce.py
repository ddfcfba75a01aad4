"""Compare our ring all-reduce with gloo's all-reduce, from 1 KB to 256 MB.

    python benchmarks/all_reduce.py [--rounds 7] [--write]

Both are timed in turn on the same ranks, in an order that is reversed every round. The slowest rank
gives the time, and ratios are taken within a round. Messages between ranks of one machine are
copies that the ranks' own cores make, so the advantage of a ring shows on a network, not here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from machine import arguments, publish, ratios, sentence

from course_lib.collectives import ring_all_reduce
from course_lib.ranks import Ranks

SIZES = [1 << 10, 1 << 14, 1 << 17, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28]
AT_ONCE = {1 << 10: 40, 1 << 14: 40, 1 << 17: 30, 1 << 18: 20, 1 << 20: 10, 1 << 22: 4}
Times = dict[str, list[float]]


def measure(rounds: int) -> dict[int, Times]:
    """Return, on a rank: size in bytes → algorithm → seconds of the slowest rank, per round."""
    results: dict[int, Times] = {}
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        kinds: dict[str, Callable[[], object]] = {
            "gloo": lambda t=tensor: dist.all_reduce(t),
            "ring": lambda t=tensor: ring_all_reduce(t),
        }
        repeats = AT_ONCE.get(size, 2)
        for kind in kinds.values():
            kind()
        results[size] = {name: [] for name in kinds}
        for number in range(rounds):
            order = list(kinds) if number % 2 else list(reversed(kinds))
            for name in order:
                results[size][name].append(slowest(kinds[name], repeats))
    return results


def slowest(kind: Callable[[], object], repeats: int) -> float:
    """Return the seconds of one call, the mean of `repeats`, on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        kind()
    seconds = torch.tensor([(time.perf_counter() - start) / repeats], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def table(world_size: int, results: dict[int, Times]) -> str:
    """Return the ratios as Markdown."""
    names = [name for name in next(iter(results.values())) if name != "gloo"]
    lines = [
        f"| K = {world_size} | gloo (ms) | " + " | ".join(names) + " |",
        "|---" * (len(names) + 2) + "|",
    ]
    for size, times in results.items():
        cells = [f"{1e3 * statistics.median(times['gloo']):.3g}"]
        medians = [statistics.median(ratios(times, name, "gloo")) for name in names]
        cells += [f"{median:.2g}" for median in medians]
        lines.append(f"| {pretty(size)} | " + " | ".join(cells) + " |")
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
