"""Time how long the lectures take, from the first cell to the last in a fresh kernel.

    python benchmarks/lectures.py [--rounds 3] [--write]

The time includes the start of the kernel. So a student who runs all cells waits as long as this.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from machine import BusyElsewhere, arguments, publish, sentence
from nbclient import NotebookClient

LECTURES = Path(__file__).parents[1] / "lectures"
TARGET = 60.0
"""Target: seconds for each lecture."""


def execute(name: str) -> float:
    """Execute a copy of a lecture; return the seconds."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = shutil.copytree(LECTURES, Path(scratch) / "lectures")
        notebook = nbformat.read(folder / f"{name}.ipynb", as_version=4)
        start = time.perf_counter()
        NotebookClient(notebook, resources={"metadata": {"path": str(folder)}}).execute()
        return time.perf_counter() - start


def main() -> None:
    """Print the table; with ``--write``, also to ``benchmarks/results/lectures.*``."""
    options = arguments(__doc__, rounds=3).parse_args()
    names = sorted(path.stem for path in LECTURES.glob("[0-9]*.ipynb"))
    series: dict[str, list[float]] = {name: [] for name in names}
    busy = BusyElsewhere()
    for _ in range(options.rounds):
        for name in names:
            series[name].append(execute(name))
    print(f"others used {100 * busy.share():.0f} %", file=sys.stderr)
    rows = [
        f"| {name} | {statistics.median(seconds):.1f} | {min(seconds):.1f} – {max(seconds):.1f} "
        f"| {TARGET:g} |"
        for name, seconds in series.items()
    ]
    text = "\n".join(
        [
            "# Lectures, executed",
            "",
            f"Seconds, medians of {options.rounds} rounds. "
            + sentence("python benchmarks/lectures.py"),
            "",
            "| lecture | seconds | lowest – highest | target |",
            "|---|---|---|---|",
            *rows,
        ]
    )
    named = {f"{name} (s)": seconds for name, seconds in series.items()}
    publish("lectures", text, named, options.write)


if __name__ == "__main__":
    main()
