"""Describe the machine of a benchmark and how busy it was, and publish the results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def facts() -> dict[str, Any]:
    """Return the facts about this machine that a reader needs to compare numbers."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "gpus": gpus,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def sentence(made_by: str) -> str:
    """Return the facts as a line under a title."""
    machine = facts()
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    return (
        f"{machine['cores']} cores ({machine['processor']}), {gpus}, torch {machine['torch']}, "
        f"Python {machine['python']}. Made by `{made_by}`."
    )


def arguments(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return a parser of the options of every benchmark, described by the first line of `doc`.

    The options are ``--rounds``, with the default `rounds`, and ``--write``.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=rounds, help="number of rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--write", action="store_true", help="also write the results to benchmarks/results/"
    )
    return parser


def publish(name: str, markdown: str, series: Mapping[str, Sequence[float]], write: bool) -> None:
    """Print the text; if `write`, also to ``results/<name>.md``, and summaries to ``.json``.

    `series` is name → the values of the rounds; a name ends with the unit in parentheses.
    """
    print(markdown)
    if write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.md").write_text(markdown.rstrip() + "\n")
        summaries = {name: summary(values) for name, values in series.items()}
        (RESULTS / f"{name}.json").write_text(one_line_each(facts(), summaries))


def ratios(series: Mapping[str, Sequence[float]], name: str, to: str) -> list[float]:
    """Return the ratio of one series to another, round by round."""
    return [a / b for a, b in zip(series[name], series[to], strict=True)]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return a series' rounds, median, lowest and highest value, in four digits."""
    digits = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {"rounds": len(values)} | {
        statistic: float(f"{x:.4g}") for statistic, x in digits.items()
    }


def one_line_each(machine: Mapping[str, Any], summaries: Mapping[str, Mapping[str, float]]) -> str:
    """Return JSON with a line for every series, so that a diff can be read."""

    def line(name: str, value: Mapping[str, Any]) -> str:
        return f"{json.dumps(name, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"

    lines = ",\n  ".join(line(name, numbers) for name, numbers in summaries.items())
    return f'{{\n {line("machine", machine)},\n "series": {{\n  {lines}\n }}\n}}\n'


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
