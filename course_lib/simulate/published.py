"""Runs that others have measured and published, and the errors of the formulas.

    >>> from course_lib.simulate.published import load, validate
    >>> runs = load()

The file ``published_runs.csv`` has a line per run: model, layout, the reported number and its unit,
the source, the settings that the source does not give (`guessed`), and the reason if the run is not
counted (`excluded`). `validate` predicts every run with constants that were fitted without the runs
of the same source. The error is signed: +10 % means that the predicted time is a tenth too long.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from course_lib.simulate.cluster import CLUSTERS, Cluster, Reached
from course_lib.simulate.layout import Layout
from course_lib.simulate.memory import memory_of
from course_lib.simulate.step_time import seconds_by_cause
from course_lib.simulate.transformer import Transformer

FILE = Path(__file__).with_name("published_runs.csv")

MEMORY_FILE = Path(__file__).with_name("published_memory.csv")

UNITS = ("s", "tokens/s", "TFLOP/s", "TFLOP/s with recomputation")
"""Seconds of a step; tokens per second and device; 10¹² operations per second and device, counted
for the model alone, or with full recomputation's second forward, as D. Narayanan et al. do."""


class Fit(NamedTuple):
    """The shares that programs reach; `matmul` differs between the devices, A100 and H100."""

    matmul: Mapping[str, float]
    shared: Mapping[str, float]

    def on(self, cluster: Cluster) -> Cluster:
        """Return the cluster with these shares."""
        matmul = self.matmul[device(cluster)]
        return replace(cluster, reached=replace(cluster.reached, matmul=matmul, **self.shared))

    @property
    def values(self) -> dict[str, float]:
        """The constants by name, as in `BOUNDS`."""
        return {**{f"matmul {name}": each for name, each in self.matmul.items()}, **self.shared}


@dataclass(frozen=True)
class Run:
    """A published run: model, cluster, layout, and the measured number."""

    name: str
    group: str
    """The source without the page: runs of one group share people, programs and machines."""
    model: Transformer
    cluster: str
    layout: Layout
    reported: float
    unit: str
    source: str
    guessed: str
    """The settings that the source does not give, and the values used for them."""
    excluded: str
    """Why the run is neither fitted nor counted; empty if it is."""

    @cached_property
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
    """A run, and two predictions of it by the formulas."""

    run: Run
    left_out: float
    """Seconds, with constants fitted without the runs of the same group."""
    fitted: float
    """Seconds, with constants fitted to all runs."""

    @property
    def error(self) -> float:
        """The signed error of `left_out`: predicted over measured, minus 1."""
        return self.left_out / self.run.seconds - 1

    @property
    def fitted_error(self) -> float:
        """The signed error of `fitted`."""
        return self.fitted / self.run.seconds - 1


class Validation(NamedTuple):
    """The constants fitted to all runs, and all runs with predictions, in the order of the file."""

    fit: Fit
    predictions: list[Prediction]

    @property
    def counted(self) -> list[Prediction]:
        """The predictions without those of excluded runs."""
        return [each for each in self.predictions if not each.run.excluded]

    def groups(self) -> dict[str, list[Prediction]]:
        """Return the counted predictions of each group."""
        found: dict[str, list[Prediction]] = {}
        for each in self.counted:
            found.setdefault(each.run.group, []).append(each)
        return found

    @property
    def median(self) -> float:
        """The median absolute error of the runs, each predicted without its own group."""
        return median(abs(each.error) for each in self.counted)

    @property
    def median_of_groups(self) -> float:
        """The median over the groups of each group's median absolute error."""
        groups = self.groups().values()
        return median(median(abs(each.error) for each in group) for group in groups)

    @property
    def worst(self) -> Prediction:
        """The counted prediction with the largest error."""
        return max(self.counted, key=lambda each: abs(each.error))


class Held(NamedTuple):
    """The memory of a device in a published run: reported by a source, and by the formulas."""

    run: Run
    part: str
    """``state``, ``activations`` or their ``total``."""
    reported: float
    predicted: float
    source: str

    @property
    def error(self) -> float:
        """The signed error: predicted over reported, minus 1."""
        return self.predicted / self.reported - 1


def held(runs: Sequence[Run] | None = None, path: Path = MEMORY_FILE) -> list[Held]:
    """Return the published memories of a file, with those of the formulas, in bytes."""
    named = {run.name: run for run in (load() if runs is None else runs)}
    found = []
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            run = named[line["run"]]
            memory = memory_of(run.model, run.layout)
            parts = {"state": memory.weights_and_state, "activations": memory.activations}
            predicted = parts.get(line["part"], memory.total)
            reported = float(line["gigabytes"]) * 1e9
            found.append(Held(run, line["part"], reported, predicted, line["source"]))
    return found


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
        line["group"],
        Transformer(**_numbers(Transformer, line)),
        line["cluster"],
        Layout(**_numbers(Layout, line)),
        float(line["reported"]),
        line["unit"],
        line["source"],
        line["guessed"],
        line["excluded"],
    )


def _numbers(kind: type, line: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a dataclass for which a line has a value."""
    words = ("schedule", "recompute")
    return {
        field.name: text if field.name in words else _number(text)
        for field in fields(kind)
        if (text := line.get(field.name, ""))
    }


def _number(text: str) -> float:
    return float(text) if "." in text else int(text)


def predict(run: Run, fit: Fit) -> float:
    """Return the seconds of a step of a run, by the formulas."""
    return sum(seconds_by_cause(run.model, fit.on(CLUSTERS[run.cluster]), run.layout))


BOUNDS = {
    "matmul A100": (0.3, 1.0),
    "matmul H100": (0.3, 1.0),
    "eager": (1.0, 12.0),
    "tensor_hidden": (0.0, 1.0),
    "memory": (0.5, 1.0),
    "inside": (0.3, 1.0),
    "between": (0.3, 1.0),
    "hidden": (0.5, 1.0),
}
"""Limits of the constants: beyond them, a constant would lose its meaning."""
FITTED = ("matmul A100", "matmul H100", "eager", "tensor_hidden")
"""The constants that the runs determine. `Reached` says where the others come from."""
_REACHED: dict[str, float] = asdict(Reached(0.75))
START = {name: _REACHED[name.split(" ")[0]] for name in BOUNDS}
"""Reasonable guesses for the fitted constants, and the values of the others."""


class Known:
    """A cache of predictions: most steps of a fit change the predictions of only a few runs."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[object, ...], float] = {}

    def of(self, run: Run, made: Fit) -> float:
        """Return the seconds of a step of a run; runs are identified by name."""
        shared = {
            name: value
            for name, value in made.shared.items()
            if (name != "eager" or run.layout.eager)
            and (name != "tensor_hidden" or run.layout.tensor_overlap)
        }
        key = run.name, made.matmul[device(CLUSTERS[run.cluster])], *shared.values()
        if key not in self.seconds:
            self.seconds[key] = predict(run, made)
        return self.seconds[key]


def loss(runs: Sequence[Run], made: Fit, known: Known | None = None) -> float:
    """Return the weighted mean over the groups of the mean |log predicted/measured| of their runs.

    It uses the absolute error, so that a run that does not fit the formulas has little influence.
    Runs of a group share a part of their error: n of them count as 2n / (n + 1) runs, at most two.
    """
    known = known or Known()
    groups: dict[str, list[float]] = {}
    for run in runs:
        error = abs(math.log(known.of(run, made) / run.seconds))
        groups.setdefault(run.group, []).append(error)
    weights = [2 * len(errors) / (len(errors) + 1) for errors in groups.values()]
    pairs = zip(weights, groups.values(), strict=True)
    return sum(weight * mean(errors) for weight, errors in pairs) / sum(weights)


def fit(
    runs: Sequence[Run],
    held: Mapping[str, float] | None = None,
    known: Known | None = None,
    rounds: int = 40,
) -> Fit:
    """Return the constants with the least `loss`; those in `held` keep these values.

    The constants in `FITTED` are moved up or down in turn, in ever smaller steps. This needs no
    gradient, and the result is the same on every machine.
    """
    held, known = held or {}, known or Known()
    values = {**START, **held}
    best, step = loss(runs, _made(values), known), 0.25
    for _ in range(rounds):
        before = best
        for name in FITTED:
            least, most = BOUNDS[name]
            for sign in (1, -1) if name not in held else ():
                moved = values[name] + sign * step * (most - least)
                tried = {**values, name: min(max(moved, least), most)}
                if (found := loss(runs, _made(tried), known)) < best:
                    values, best = tried, found
                    break
        step = step if best < before else step / 2
        if step < 8e-3:
            break
    return _made(values)


def _made(values: Mapping[str, float]) -> Fit:
    matmul = {name: values[f"matmul {name}"] for name in ("A100", "H100")}
    return Fit(matmul, {name: value for name, value in values.items() if " " not in name})


def validate(runs: Sequence[Run] | None = None) -> Validation:
    """Predict every run twice: with constants fitted to the other groups, and to all runs."""
    runs = load() if runs is None else runs
    counted = [run for run in runs if not run.excluded]
    known = Known()
    everything = fit(counted, known=known)
    without = {
        group: fit([run for run in counted if run.group != group], known=known)
        for group in {run.group: None for run in runs}
    }
    predictions = [
        Prediction(run, predict(run, without[run.group]), predict(run, everything)) for run in runs
    ]
    return Validation(everything, predictions)


def profile(
    runs: Sequence[Run] | None = None, points: int = 5
) -> dict[str, list[tuple[float, float]]]:
    """Return per constant pairs of a value and the loss, with all other constants fitted to it.

    A constant that the runs determine has a loss that rises on both sides of its minimum.
    """
    runs = [run for run in (load() if runs is None else runs) if not run.excluded]
    known = Known()
    found: dict[str, list[tuple[float, float]]] = {}
    for name, (least, most) in BOUNDS.items():
        values = [least + (most - least) * at / (points - 1) for at in range(points)]
        found[name] = [
            (value, loss(runs, fit(runs, {name: value}, known), known)) for value in values
        ]
    return found
