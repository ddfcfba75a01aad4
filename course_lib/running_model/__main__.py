"""Try what steps.csv lacks: see `steps`."""

import csv
from collections.abc import Iterator

from course_lib.running_model.steps import FILE, RATES, SEEDS, TUNING_SEEDS, run, tries, tuned_rate
from course_lib.running_model.ways import WAYS


def lacking(way: str) -> Iterator[tuple[float, int]]:
    """Yield rates and seeds that were not tried, first those that choose the rate."""
    for rate in RATES:
        yield from ((rate, seed) for seed in TUNING_SEEDS)
    yield from ((tuned_rate(way), seed) for seed in SEEDS)


def main() -> None:
    """Try what steps.csv lacks, and write each result as soon as it is known."""
    if not FILE.exists():
        FILE.write_text("way,rate,seed,steps\n", encoding="utf-8")
    for way in (name for name, entry in WAYS.items() if not entry.like):
        for rate, seed in lacking(way):
            if any(t[:3] == (way, rate, seed) for t in tries()):
                continue
            trial = run(way, rate, seed)
            print(*trial, flush=True)
            with FILE.open("a", encoding="utf-8", newline="") as file:
                csv.writer(file).writerow(trial)
            tries.cache_clear()


main()
