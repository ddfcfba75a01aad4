"""Describe the machine of a benchmark and how busy it was, and publish the results."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def sentence(made_by: str) -> str:
    """Return a line with what a reader needs to know of this machine to compare numbers."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return (
        f"{os.cpu_count()} cores ({_processor()}), {', '.join(gpus) or 'no GPU'}, "
        f"torch {torch.__version__}, Python {platform.python_version()}. Made by `{made_by}`."
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


def publish(name: str, markdown: str, write: bool) -> None:
    """Print the text; if `write`, also to ``results/<name>.md``."""
    print(markdown)
    if write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.md").write_text(markdown.rstrip() + "\n")


def ratios(series: Mapping[str, Sequence[float]], name: str, to: str) -> list[float]:
    """Return the ratio of one series to another, round by round."""
    return [a / b for a, b in zip(series[name], series[to], strict=True)]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
