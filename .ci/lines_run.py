"""Print how many lines the tests ran in each package, for `make coverage`; fail below `FLOOR`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

FLOOR = 90
HOLDS = (
    "course_lib/checking",
    "course_lib/capstone",
    "course_lib/ranks/simulated",
    "autograder/examination",
    "autograder/passes",
    "autograder/sandbox",
)
"""The floor holds for these packages: they decide grades, or the network that decides them."""


def main() -> int:
    """Print the table and the files below the floor; return 1 if a package of `HOLDS` is below."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lines.json")
        command = [sys.executable, "-m", "coverage", "json", "--quiet", "-o", str(path)]
        subprocess.run(command, check=True)
        files = json.loads(path.read_text())["files"]
    packages: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    below = []
    for name, coverage in files.items():
        count, run = coverage["summary"]["num_statements"], coverage["summary"]["covered_lines"]
        total = packages[str(Path(name).parent)]
        total[0] += count
        total[1] += run
        if 100 * run < FLOOR * count and str(Path(name).parent) in HOLDS:
            below.append(f"{name}: {100 * run // count} %, without {_ranges(coverage)}")
    print("\n| package | statements | % run |\n|---|---|---|")
    failed = []
    for package in sorted(packages, key=lambda package: (package not in HOLDS, package)):
        count, run = packages[package]
        print(f"| `{package}` | {count} | {100 * run // max(1, count)} |")
        if package in HOLDS and 100 * run < FLOOR * count:
            failed.append(package)
    print(f"\nFiles below {FLOOR} %:", *below or ["none"], sep="\n  ")
    if failed:
        print(f"\nBelow the floor of {FLOOR} %: {', '.join(failed)}")
    return bool(failed)


def _ranges(coverage: dict[str, list[int]]) -> str:
    lines, ranges = coverage["missing_lines"], list[list[int]]()
    for line in lines:
        if ranges and line == ranges[-1][1] + 1:
            ranges[-1][1] = line
        else:
            ranges.append([line, line])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in ranges)


if __name__ == "__main__":
    sys.exit(main())
