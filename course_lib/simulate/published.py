"""Runs that others have measured and published, and the errors of the formulas.

    >>> from course_lib.simulate.published import load, validate
    >>> runs = load()

The file ``published_runs.csv`` has a line per run: model, layout, the reported number and its unit,
the source, and the assumptions about facts that the source does not give. `validate` fits the
constants of `Reached` to every second run and predicts the others. The error is signed: +10 % means
that the predicted time is a tenth too long.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from course_lib.simulate.cluster import CLUSTERS, Cluster, Reached
from course_lib.simulate.layout import Layout
from course_lib.simulate.step_time import estimate
from course_lib.simulate.transformer import Transformer

FILE = Path(__file__).with_name("published_runs.csv")

UNITS = ("s", "tokens/s", "TFLOP/s", "TFLOP/s with recomputation")
"""Seconds of a step; tokens per second and device; 10¹² operations per second and device, counted
for the model alone, or with full recomputation's second forward, as D. Narayanan et al. do."""


class Fit(NamedTuple):
    """The shares that programs reach, by device: `A100` and `H100` differ in `matmul` only."""

    shared: Reached
    matmul: Mapping[str, float]

    def on(self, cluster: Cluster) -> Cluster:
        """Return the cluster with the shares that programs reach on it."""
        return replace(cluster, reached=replace(self.shared, matmul=self.matmul[device(cluster)]))


@dataclass(frozen=True)
class Run:
    """A published run: model, cluster, layout, and the measured number."""

    name: str
    model: Transformer
    cluster: str
    layout: Layout
    reported: float
    unit: str
    source: str
    assumed: str

    @property
    def seconds(self) -> float:
        """The seconds of a step that follow from what was reported."""
        if self.unit == "s":
            return self.reported
        if self.unit == "tokens/s":
            tokens = self.layout.batch * self.model.sequence
            return tokens / self.layout.ranks / self.reported
        flops = self.model.model_flops(self.layout.batch)
        if self.unit == "TFLOP/s with recomputation":
            layers, _ = self.model.layer_flops(self.layout.batch)
            flops += self.model.layers * layers
        return flops / self.layout.ranks / (self.reported * 1e12)


class Prediction(NamedTuple):
    """A run and the formulas' prediction of it."""

    run: Run
    seconds: float
    fitted: bool
    """Whether the constants were fitted to this run, among others."""

    @property
    def error(self) -> float:
        """The signed error: predicted over measured, minus 1."""
        return self.seconds / self.run.seconds - 1


class Validation(NamedTuple):
    """The fitted constants, and all runs with their predictions, in the order of the file."""

    fit: Fit
    predictions: list[Prediction]

    @property
    def median(self) -> float:
        """The median absolute error of the runs that were not used to fit."""
        return median(abs(each.error) for each in self.predictions if not each.fitted)

    @property
    def worst(self) -> Prediction:
        """The prediction with the largest error, among runs that were not used to fit."""
        unseen = (each for each in self.predictions if not each.fitted)
        return max(unseen, key=lambda each: abs(each.error))


def device(cluster: Cluster) -> str:
    """Return which of the two devices a cluster has."""
    return "H100" if cluster.device.flops > 500e12 else "A100"


def load(path: Path = FILE) -> list[Run]:
    """Return the runs of a file.

    Raises:
        ValueError: a line is not a valid run; the message has its number and the reason.

    """
    runs = []
    with path.open(newline="", encoding="utf-8") as file:
        for number, line in enumerate(csv.DictReader(file), 2):
            try:
                runs.append(_run(line))
            except KeyError as error:
                told = f"the column {error} is missing"
                raise ValueError(f"{path.name}, line {number}: {told}") from error
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path.name}, line {number}: {error}") from error
    return runs


def _run(line: Mapping[str, str]) -> Run:
    if line["cluster"] not in CLUSTERS:
        raise ValueError(f"there is no cluster {line['cluster']!r}, only {', '.join(CLUSTERS)}")
    if line["unit"] not in UNITS:
        raise ValueError(f"there is no unit {line['unit']!r}, only {', '.join(UNITS)}")
    return Run(
        line["run"],
        Transformer(**_numbers(Transformer, line)),
        line["cluster"],
        Layout(**_numbers(Layout, line)),
        float(line["reported"]),
        line["unit"],
        line["source"],
        line["assumed"],
    )


def _numbers(kind: type, line: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a dataclass for which a line has a value."""
    words = ("schedule", "recompute")
    return {
        field.name: text if field.name in words else int(text)
        for field in fields(kind)
        if (text := line.get(field.name, ""))
    }


def predict(run: Run, fit: Fit) -> float:
    """Return the seconds of a step of a run, by the formulas."""
    return estimate(run.model, fit.on(CLUSTERS[run.cluster]), run.layout).seconds


START = Fit(Reached(0.75, 3.0, 0.7, 0.6, 0.9, 0.005), {"A100": 0.75, "H100": 0.75})
"""The start of `fit`: reasonable guesses."""
BOUNDS = {
    "matmul A100": (0.3, 1.0),
    "matmul H100": (0.3, 1.0),
    "traffic": (1.0, 8.0),
    "inside": (0.2, 0.9),
    "between": (0.2, 0.9),
    "hidden": (0.0, 1.0),
    "waiting": (0.0, 0.03),
}
"""Limits of the constants: beyond them, a constant would lose its meaning."""


def fit(runs: Sequence[Run], rounds: int = 40) -> Fit:
    """Return the constants with the least sum of |log predicted/measured| over the runs.

    It uses the absolute error, so that a run that does not fit the formulas has little influence.
    Each constant in turn is moved up or down, by less in every round. This needs no gradient, and
    the result is the same everywhere.
    """

    def loss(values: Mapping[str, float]) -> float:
        made = _made(values)
        return sum(abs(math.log(predict(run, made) / run.seconds)) for run in runs)

    values = {
        "matmul A100": START.matmul["A100"],
        "matmul H100": START.matmul["H100"],
        **{name: getattr(START.shared, name) for name in BOUNDS if " " not in name},
    }
    best, step = loss(values), 0.25
    for _ in range(rounds):
        before = best
        for name, (least, most) in BOUNDS.items():
            for sign in (1, -1):
                moved = values[name] + sign * step * (most - least)
                tried = {**values, name: min(max(moved, least), most)}
                if (found := loss(tried)) < best:
                    values, best = tried, found
                    break
        step = step if best < before else step / 2
        if step < 1e-3:
            break
    return _made(values)


def _made(values: Mapping[str, float]) -> Fit:
    shared = {name: value for name, value in values.items() if " " not in name}
    matmul = {name: values[f"matmul {name}"] for name in ("A100", "H100")}
    return Fit(Reached(matmul["A100"], **shared), matmul)


def validate(runs: Sequence[Run] | None = None) -> Validation:
    """Fit the constants to every second run, and predict all."""
    runs = load() if runs is None else runs
    found = fit(runs[::2])
    predictions = [
        Prediction(run, predict(run, found), place % 2 == 0) for place, run in enumerate(runs)
    ]
    return Validation(found, predictions)
