"""Measure the cost of recording every operation: compare metered ranks with plain ranks.

    python benchmarks/metering.py [--rounds 9] [--write]

Both kinds are measured in turn, round by round, in one process. The ratio is taken within a round.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from machine import arguments, publish, sentence

from course_lib.ranks import Ranks

SIZES = {"4 B": (1, 300), "4 MiB": (1 << 20, 20)}
"""Name → (float32 elements, all_reduces in a row)."""


def seconds_per_all_reduce(elements: int, repeats: int) -> float:
    """Return the mean time of one all_reduce on this rank, after a warm-up."""
    tensor = torch.zeros(elements)
    for _ in range(3):
        dist.all_reduce(tensor)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    return (time.perf_counter() - start) / repeats


def compare(world_size: int, rounds: int) -> tuple[list[str], dict[str, list[float]]]:
    """Return one table row per size, and the seconds of both kinds by name."""
    rows, series = [], {}
    with (
        Ranks(world_size, on="cpu") as metered,
        Ranks(world_size, on="cpu", metered=False) as plain,
    ):
        for name, (elements, repeats) in SIZES.items():
            times: list[tuple[float, float]] = []
            for _ in range(rounds):
                with_meter = max(metered.run(seconds_per_all_reduce, elements, repeats))
                without = max(plain.run(seconds_per_all_reduce, elements, repeats))
                times.append((with_meter, without))
            ours, theirs = (1e6 * statistics.median(column) for column in zip(*times, strict=True))
            series[f"K = {world_size}, {name}, metered (s)"] = [a for a, _ in times]
            series[f"K = {world_size}, {name}, plain (s)"] = [b for _, b in times]
            ratios = sorted(a / b for a, b in times)
            rows.append(
                f"| {world_size} | {name} | {ours:.0f} | {theirs:.0f} | "
                f"{statistics.median(ratios):.2f} | {ratios[0]:.2f} – {ratios[-1]:.2f} |"
            )
    return rows, series


def main() -> None:
    """Print the table; with ``--write``, also to ``benchmarks/results/metering.*``."""
    options = arguments(__doc__, rounds=9).parse_args()
    rows: list[str] = []
    series: dict[str, list[float]] = {}
    for world_size in (2, 4):
        more, times = compare(world_size, options.rounds)
        rows += more
        series |= times
    text = "\n".join(
        [
            "# What metering costs",
            "",
            f"One all_reduce over gloo, float32, medians of {options.rounds} interleaved rounds.",
            sentence("python benchmarks/metering.py"),
            "",
            "| K | size | metered (µs) | plain (µs) | ratio | lowest – highest |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
    )
    publish("metering", text, series, options.write)


if __name__ == "__main__":
    main()
