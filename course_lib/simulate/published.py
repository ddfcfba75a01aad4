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


@dataclass(frozen=True)
class Run:
    """A published run: model, cluster, layout, and the measured number."""

    name: str
    model: Transformer
    cluster: str
    layout: Layout
    reported: float
    unit: str
    """``s``: seconds of a step; ``tokens/s``: tokens per second and device; ``TFLOP/s``: 10¹²
    operations per second and device, counted for the model alone; ``TFLOP/s with recomputation``:
    also those of full recomputation's second forward, as D. Narayanan et al. count."""
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


def load() -> list[Run]:
    """Return the runs of the file."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return [
            Run(
                line["run"],
                Transformer(**_numbers(Transformer, line)),
                line["cluster"],
                Layout(**_numbers(Layout, line)),
                float(line["reported"]),
                line["unit"],
                line["guessed"],
                line["excluded"],
            )
            for line in csv.DictReader(file)
        ]


def _numbers(kind: type, line: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a dataclass for which a line has a value."""
    return {
        field.name: text if field.name == "recompute" else number_of(text)
        for field in fields(kind)
        if (text := line.get(field.name, ""))
    }


def number_of(text: str) -> float:
    """Return the number that a text has; an integer if it is whole."""
    value = float(text)
    return int(value) if value.is_integer() else value
