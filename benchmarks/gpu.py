"""Run everything that needs an NVIDIA GPU, in one call of at most nine minutes: `make gpu`.

    python benchmarks/gpu.py [--out FOLDER]    # results go to benchmarks/results/gpu/
    python benchmarks/gpu.py --emulated        # every part on the CPU: tries the script, no GPU

This needs the checkout and a PyTorch for CUDA, 2.8 or newer. If pytest, Triton or nbgrader are
missing, the parts that use them say so. The most valuable parts run first. Each part is a process
with its own time limit, and `LIMIT` ends the whole run. Each row is written as soon as it is known,
and the report after each part. So a run that is interrupted keeps its results so far.

The functions of the parts are in `gpu_parts`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import gpu_parts
import torch
from machine import RESULTS, sentence

ROOT = Path(__file__).parent.parent

LIMIT = 540.0
"""Seconds of the whole run."""


@dataclass(frozen=True)
class Part:
    """A part of the run.

    Attributes:
        name: the name of its files.
        limit: the seconds that it may take.
        rows: the function of `gpu_parts` that yields its results.
        title: the title of its section in the report.

    """

    name: str
    limit: float
    rows: gpu_parts.Rows
    title: str


PARTS = (
    Part("facts", 30, gpu_parts.facts, "The machine"),
    Part("kernels", 90, gpu_parts.kernels, "Triton's kernels, compiled and run"),
    Part("one_rank", 90, gpu_parts.one_rank, "One rank: DDP, hooks, mixed precision, memory"),
    Part("tests", 150, gpu_parts.tests, "Tests: 1, 2 and 4 ranks share the GPU"),
    Part("overlap", 40, gpu_parts.overlap, "Overlap of backward and copies, from events"),
    Part("grading", 150, gpu_parts.grading, "Submissions graded on real ranks"),
)


@dataclass
class Outcome:
    """How a part ended."""

    part: Part
    summary: str = "not started: no time was left"
    good: bool = False


def main() -> int:
    """Run the parts and write the report; return an exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--emulated", action="store_true", help="run every part on the CPU")
    names = [part.name for part in PARTS]
    parser.add_argument(
        "--only", metavar="PART", choices=names, help=f"run only one part: {', '.join(names)}"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return run_here(options.only, options.out, options.emulated)
    if not options.emulated and not torch.cuda.is_available():
        print(
            "make gpu: PyTorch sees no NVIDIA GPU here, so nothing was run. Use a machine with "
            "a GPU, or try the script on this CPU: python benchmarks/gpu.py --emulated"
        )
        return 0
    default = (
        Path(tempfile.mkdtemp(prefix="gpu_emulated_")) if options.emulated else RESULTS / "gpu"
    )
    folder: Path = options.out or default
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [Outcome(part) for part in PARTS if options.only in (None, part.name)]
    for outcome in chosen:
        rows_of(folder, outcome.part).unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the running part, too
    end = time.monotonic() + LIMIT
    for outcome in chosen:
        seconds = min(outcome.part.limit, end - time.monotonic())
        if seconds > 10:
            print(f"{outcome.part.name}: at most {seconds:.0f} s ...", flush=True)
            run_apart(outcome, folder, options.emulated, seconds)
            print(f"{outcome.part.name}: {outcome.summary}", flush=True)
        (folder / "report.md").write_text(report(chosen, folder, options.emulated))
    print(f"The report: {folder / 'report.md'}")
    return 0 if all(outcome.good for outcome in chosen) else 1


def run_apart(outcome: Outcome, folder: Path, emulated: bool, seconds: float) -> None:
    """Run a part in a separate process; end it with all its child processes after `seconds`.

    The part writes its rows to one file and its output to a different file.
    """
    command = [sys.executable, __file__, "--only", outcome.part.name, "--out", str(folder)]
    command += ["--child", *(["--emulated"] if emulated else [])]
    began = time.monotonic()
    log = folder / f"{outcome.part.name}.log"
    # A killed part cannot remove its own temporary files.
    with log.open("w") as output, tempfile.TemporaryDirectory(prefix="gpu_part_") as temporary:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | gpu_parts.environment(emulated) | {"TMPDIR": temporary},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_session(process.pid)
            process.wait()
    took = f"{time.monotonic() - began:.0f} s"
    last = (log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
    outcome.good = status in (0, NOT_THERE)
    outcome.summary = {
        None: f"reached its time limit and was ended after {took}. Its rows until then follow",
        0: f"done in {took}",
        NOT_THERE: f"not run: {last}",
    }.get(status, f"failed after {took}: {last}")


NOT_THERE = 3
"""Exit status of a part if the machine lacks something that the part needs."""


def end_session(session: int) -> None:
    """Kill every process that a part has left in its session."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                os.kill(int(entry.name), signal.SIGKILL)
        except (OSError, IndexError):
            continue


def run_here(name: str, folder: Path, emulated: bool) -> int:
    """Run a part in this process; return an exit status."""
    (part,) = [part for part in PARTS if part.name == name]
    place = gpu_parts.place(emulated)
    good = True
    with rows_of(folder, part).open("w") as file:
        try:
            for row in part.rows(place):
                good &= row.get("result") != "FAILED"
                file.write(json.dumps(row) + "\n")
                file.flush()
        except gpu_parts.NotThere as error:
            print(error)
            return NOT_THERE
        except Exception:
            traceback.print_exc()
            return 1
    if not good:
        print("at least one row says FAILED")
    return 0 if good else 1


def rows_of(folder: Path, part: Part) -> Path:
    """Return the file with the rows of a part, a line of JSON each."""
    return folder / f"{part.name}.jsonl"


def report(outcomes: list[Outcome], folder: Path, emulated: bool) -> str:
    """Return all results so far, in Markdown."""
    title = "# Emulated on the CPU: no number here is a GPU's" if emulated else "# On a GPU"
    lines = [title, sentence("make gpu" + " ARGS=--emulated" * emulated)]
    for outcome in outcomes:
        lines.append(f"## {outcome.part.title}\n\n`{outcome.part.name}`: {outcome.summary}.")
        path = rows_of(folder, outcome.part)
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        lines += [table(list(alike)) for _, alike in groupby(rows, key=lambda row: list(row))]
    return "\n\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of rows that have the same columns."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.3g}"
        return str(value).replace("|", "\\|").replace("\n", "<br>")

    lines = [f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}"]
    lines += [f"| {' | '.join(cell(value) for value in row.values())} |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
