"""Settings: the same optimizers and learning rates were tried for every algorithm.

The tries and their results are in ``settings.csv`` in this folder, which was made with
`measure.train` and `measure.train_with_server`, for each setting and each of three seeds. Each row
is an algorithm with an optimizer, each column a learning rate. Each number is the mean steps to the
target (with a server: updates) over the seeds. It is empty if not all of these seeds reached the
target.
"""

import csv
import math
from collections.abc import Callable, Iterable
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
FILE = Path(__file__).with_name("settings.csv")


class Setting(NamedTuple):
    """An optimizer's name and its learning rate."""

    optimizer: str
    lr: float

    def optimizer_of(self, params: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Return the optimizer of some parameters."""
        return OPTIMIZERS[self.optimizer](params, self.lr)

    def __str__(self) -> str:
        return f"{self.optimizer}, {self.lr:g}"


def read() -> dict[str, dict[Setting, float]]:
    """Return the steps to the target by algorithm and setting; infinite if it was not reached."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    tried: dict[str, dict[Setting, float]] = {}
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        tries = tried.setdefault(row.pop("algorithm"), {})
        optimizer = row.pop("optimizer")
        for lr, steps in row.items():
            tries[Setting(optimizer, float(lr))] = float(steps or math.inf)
    return tried


@cache
def tuned(name: str) -> Setting:
    """Return the setting of an algorithm that took the fewest steps; of two, the smaller rate."""
    tries = read()[name]
    return min(tries, key=lambda setting: (tries[setting], setting.lr))
