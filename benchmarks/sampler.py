"""Compare `ShardedSampler` with PyTorch's `DistributedSampler`: an epoch's indices.

python benchmarks/sampler.py [--rounds 7] [--write]
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from machine import arguments, publish, sentence
from torch.utils.data import DistributedSampler

from course_lib.sharding import ShardedSampler


def seconds(sampler: Any, epoch: int) -> float:
    """Return the seconds to iterate over the indices of an epoch, as a DataLoader does."""
    sampler.set_epoch(epoch)
    start = time.perf_counter()
    for _ in sampler:
        pass
    return time.perf_counter() - start


def main() -> None:
    """Print the table; with ``--write``, also to ``benchmarks/results/sampler.*``."""
    options = arguments(__doc__, rounds=7).parse_args()
    rows, series = [], {}
    for length in (100_000, 1_000_000, 5_000_000):
        for world_size in (1, 2, 4, 8):
            place: dict[str, Any] = {"num_replicas": world_size, "rank": world_size - 1}
            ours = ShardedSampler(range(length), **place)
            theirs = DistributedSampler(range(length), **place)
            epochs = range(options.rounds)
            pairs = [(seconds(ours, epoch), seconds(theirs, epoch)) for epoch in epochs]
            assert list(ours) == list(theirs)
            ratio = statistics.median(a / b for a, b in pairs)
            mine, other = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
            what = f"{length:,} examples, K = {world_size}"
            series[f"{what}, ours (s)"], series[f"{what}, torch (s)"] = zip(*pairs, strict=True)
            rows.append(f"| {length:,} | {world_size} | {mine:.1f} | {other:.1f} | {ratio:.2f} |")
    text = "\n".join(
        [
            "# Samplers",
            "",
            "The time to list one epoch's shuffled indices of one rank. Both give the same "
            f"indices. Medians of {options.rounds} interleaved rounds. "
            + sentence("python benchmarks/sampler.py"),
            "",
            "| examples | K | ours (ms) | torch (ms) | ratio |",
            "|---|---|---|---|---|",
            *rows,
        ]
    )
    publish("sampler", text, series, options.write)


if __name__ == "__main__":
    main()
