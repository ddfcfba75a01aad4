"""Learning rates: every algorithm tries the same ones, and each gets its best.

The tries and their results are in ``learning_rates.csv`` beside this file, made by

    $ python -m course_lib.who_wins --tune --write

Each row is an algorithm, each column a learning rate. Each number is the mean steps to the target
(with a server: updates) over the seeds of `tune`. It is empty if not all of these seeds reached the
target.
"""

import csv
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path

GRID = (0.01, 0.016, 0.025, 0.04, 0.063, 0.1, 0.16, 0.25, 0.4, 0.63, 1.0, 1.6, 2.5, 4.0)
"""The tries: five per decade, wide enough for SGD and for AdamW inside DiLoCo."""
FILE = Path(__file__).with_name("learning_rates.csv")

Tried = Mapping[str, Mapping[float, float]]
"""Steps to the target by algorithm and learning rate; infinite if a seed did not reach it."""


def best(tries: Mapping[float, float]) -> float:
    """Return the learning rate with the fewest steps; if two are equal, the smaller one.

    Raises:
        ValueError: no learning rate reached the target.

    """
    if all(math.isinf(steps) for steps in tries.values()):
        raise ValueError(f"none of the learning rates {list(tries)} reached the target")
    return min(sorted(tries), key=lambda lr: tries[lr])


def write(tried: Tried, said: str, path: Path) -> None:
    """Write the tries below the lines of `said`; write nothing if an algorithm has no `best`."""
    lines: list[list[object]] = [["algorithm", "best", *next(iter(tried.values()))]]
    for name, tries in tried.items():
        steps = ["" if math.isinf(each) else f"{each:.1f}" for each in tries.values()]
        lines.append([name, best(tries), *steps])
    with path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"# {line}\n" for line in said.splitlines())
        csv.writer(file, lineterminator="\n").writerows(lines)


def read(path: Path = FILE) -> dict[str, dict[float, float]]:
    """Return the table that `write` has written; steps are rounded to a tenth."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return {
        row.pop("algorithm"): {
            float(lr): float(steps or math.inf) for lr, steps in row.items() if lr != "best"
        }
        for row in rows
    }


@cache
def rate_of(name: str) -> float:
    """Return the tuned learning rate of an algorithm.

    Raises:
        ValueError: it was not tuned.

    """
    tried = read()
    if name not in tried:
        raise ValueError(f"{name} has no learning rate in {FILE.name}; run --tune --write first")
    return best(tried[name])
