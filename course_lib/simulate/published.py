"""Runs that others have measured and published, beside the formulas.

    >>> from course_lib.simulate.published import load
    >>> runs = load()

The file ``published_runs.csv`` has a line per run: model, layout, the reported number and its unit,
the source, the settings that the source does not give (`guessed`), and the reason if the run is not
counted (`excluded`). Runs of one `group` share people, programs and machines. An error is signed:
+10 % means that the predicted time is a tenth too long.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from course_lib.simulate.cluster import CLUSTERS
from course_lib.simulate.layout import Layout
from course_lib.simulate.step_time import seconds_by_cause
from course_lib.simulate.transformer import Transformer

FILE = Path(__file__).with_name("published_runs.csv")

UNITS = ("s", "tokens/s", "TFLOP/s", "TFLOP/s with recomputation")
"""Seconds of a step; tokens per second and device; 10¹² operations per second and device, counted
for the model alone, or with full recomputation's second forward, as D. Narayanan et al. do."""


@dataclass(frozen=True)
class Run:
    """A published run: model, cluster, layout, and the measured number."""

    name: str
    model: Transformer
    cluster: str
    layout: Layout
    reported: float
    unit: str
    guessed: str
    """The settings that the source does not give, and the values used for them."""
    excluded: str
    """Why the run is not counted; empty if it is."""

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

    @cached_property
    def predicted(self) -> float:
        """The seconds of a step by the formulas."""
        return sum(seconds_by_cause(self.model, CLUSTERS[self.cluster], self.layout))

    @property
    def error(self) -> float:
        """The signed error: predicted over measured, minus 1."""
        return self.predicted / self.seconds - 1


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
                what = f"the column {error} is missing"
                raise ValueError(f"{path.name}, line {number}: {what}") from error
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
