"""Settings: the same optimizers and learning rates are tried for every algorithm; the best is used.

The tries and their results are in ``settings.csv`` in this folder, which is made by

    $ python -m course_lib.who_wins --tune --write

Each row is an algorithm with an optimizer, each column a learning rate. Each number is the mean
steps to the target (with a server: updates) over the seeds of `tune`. It is empty if not all of
these seeds reached the target.
"""

import csv
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

OPTIMIZERS: dict[str, Callable[[Iterable[Tensor], float], torch.optim.Optimizer]] = {
    "SGD": lambda params, lr: torch.optim.SGD(params, lr, fused=True),
    "momentum": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9, fused=True),
    "AdamW": lambda params, lr: torch.optim.AdamW(params, lr, fused=True),
}
"""The optimizers by their names. They use the synchronised gradient; if ranks train alone between
averages, each rank has its own optimizer. With `fused`, a step is one operator, so that AdamW does
not pass over the weights more often than necessary."""
GRID = (
    *(0.001, 0.0016, 0.0025, 0.004, 0.0063, 0.01, 0.016, 0.025, 0.04, 0.063),
    *(0.1, 0.16, 0.25, 0.4, 0.63, 1.0, 1.6, 2.5, 4.0),
)
"""The learning rates: five per decade, wide enough for all three optimizers."""
FILE = Path(__file__).with_name("settings.csv")


class Setting(NamedTuple):
    """An optimizer's name and its learning rate."""

    optimizer: str
    lr: float

    def optimizer_of(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of a model's parameters."""
        return OPTIMIZERS[self.optimizer](model.parameters(), self.lr)

    def __str__(self) -> str:
        return f"{self.optimizer}, {self.lr:g}"


Tried = Mapping[str, Mapping[Setting, float]]
"""Steps to the target by algorithm and setting; infinite if a seed did not reach it."""


def best(tries: Mapping[Setting, float]) -> Setting:
    """Return the setting with the fewest steps; of two equal ones, that with the smaller rate.

    Raises:
        ValueError: no setting reached the target.

    """
    if all(math.isinf(steps) for steps in tries.values()):
        raise ValueError(
            f"none of the {len(tries)} settings reached the target: allow more --steps, or a "
            "higher --target"
        )
    return min(tries, key=lambda setting: (tries[setting], setting.lr))


def write(tried: Tried, said: str, path: Path) -> None:
    """Write the tries below the lines of `said`; write nothing if an algorithm has no `best`."""
    rates = sorted({setting.lr for tries in tried.values() for setting in tries})
    lines: list[list[object]] = [["algorithm", "optimizer", *rates]]
    for name, tries in tried.items():
        best(tries)
        for optimizer in dict.fromkeys(setting.optimizer for setting in tries):
            steps = [tries[Setting(optimizer, lr)] for lr in rates]
            row = ["" if math.isinf(each) else f"{each:.1f}" for each in steps]
            lines.append([name, optimizer, *row])
    with path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"# {line}\n" for line in said.splitlines())
        csv.writer(file, lineterminator="\n").writerows(lines)


def read(path: Path = FILE) -> dict[str, dict[Setting, float]]:
    """Return the table that `write` has written; steps are rounded to a tenth."""
    lines = path.read_text(encoding="utf-8").splitlines()
    tried: dict[str, dict[Setting, float]] = {}
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        tries = tried.setdefault(row.pop("algorithm"), {})
        optimizer = row.pop("optimizer")
        for lr, steps in row.items():
            tries[Setting(optimizer, float(lr))] = float(steps or math.inf)
    return tried


@cache
def tuned(name: str) -> Setting:
    """Return the best setting of an algorithm.

    Raises:
        ValueError: the algorithm was not tuned.

    """
    tried = read()
    if name not in tried:
        raise ValueError(
            f"{name} has no setting in {FILE.name}: first run python -m course_lib.who_wins --tune "
            "--write"
        )
    return best(tried[name])
