"""The command line: ``python -m course_lib.who_wins``."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from course_lib.who_wins.algorithms import ALGORITHMS, COMPARED_BY_BAGUA
from course_lib.who_wins.problem import Problem
from course_lib.who_wins.records import Records
from course_lib.who_wins.report import as_json, assumptions, bagua_text, map_table, steps_table
from course_lib.who_wins.settings import FILE, write
from course_lib.who_wins.sweep import Place, jobs_of, run
from course_lib.who_wins.tune import conditions, tune, tuned_table
from course_lib.who_wins.winners import cells_of, steps_of, updates_of

_EXAMPLES = """\
examples:
  python -m course_lib.who_wins --figure map.png          # the whole map, in minutes
  python -m course_lib.who_wins --quick                   # only the corners of the map, two seeds
  python -m course_lib.who_wins --straggler 2 --algorithms flat asynchronous "local SGD"
  python -m course_lib.who_wins --latencies 1e-3 --bandwidths 1e5 1e6 1e7 --json
  python -m course_lib.who_wins --tune                    # try all settings again

  An interrupted run continues where it was: its results are in --folder.
"""

LATENCIES = (20e-6, 5e-3, 20e-3)
BANDWIDTHS = (30e3, 100e3, 1e6, 10e6)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        return _map(options)
    except (ValueError, OSError) as error:
        print(f"who_wins: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    default = Problem()
    parser = argparse.ArgumentParser(
        prog="python -m course_lib.who_wins",
        description="Find out which algorithm reaches a target loss first, on which network.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="the four corners of the map, with two seeds")
    add("--latencies", type=float, nargs="+", help="latencies of the network, in seconds")
    add(
        "--bandwidths",
        type=float,
        nargs="+",
        help="bandwidths of a worker's link, bytes per second",
    )
    add("--algorithms", nargs="+", choices=ALGORITHMS, metavar="NAME",
        help=f"algorithms among {', '.join(ALGORITHMS)}")  # fmt: skip
    add("--seeds", type=int, help="number of seeds per algorithm (default: 5; with --quick: 2)")
    add(
        "--workers",
        type=int,
        default=default.workers,
        help="ranks that compute (default: %(default)s)",
    )
    add(
        "--target",
        type=float,
        default=default.target,
        help="the loss to reach (default: %(default)s)",
    )
    add(
        "--steps",
        type=int,
        default=default.steps,
        help="give up after so many steps (default: %(default)s)",
    )
    add("--straggler", type=float, default=1.0, help="factor by which worker 1 is slower")
    add(
        "--processes",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="number of training runs at the same time",
    )
    add(
        "--folder",
        type=Path,
        default=Path("work/who_wins"),
        help="folder for the results (default: %(default)s)",
    )
    add(
        "--tune",
        action="store_true",
        help="instead of the map, try settings of each algorithm, and print a table",
    )
    add("--write", action="store_true", help=f"also write the results of --tune to {FILE.name}")
    add("--figure", type=Path, help="draw the map to this file")
    add("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _say(text: str) -> None:
    sys.stderr.write(text if sys.stderr.isatty() else text.replace("\r", "").rstrip() + "\n")
    sys.stderr.flush()


def _map(options: argparse.Namespace) -> int:
    problem = Problem(
        workers=options.workers,
        target=options.target,
        straggler=options.straggler,
        steps=options.steps,
    )
    count = (2 if options.quick else 5) if options.seeds is None else options.seeds
    if min(count, options.processes) < 1:
        raise ValueError("--seeds and --processes must be at least 1")
    seeds = range(count)
    names = [name for name in ALGORITHMS if name in (options.algorithms or ALGORITHMS)]
    records = Records(options.folder / "results.jsonl")
    if options.write and not (options.tune and len(names) == len(ALGORITHMS)):
        raise ValueError("use --write only with --tune and without --algorithms")
    if options.tune:
        tried = tune(names, problem, records, options.processes, _say)
        if options.write:
            said = f"python -m course_lib.who_wins --tune --write\n{conditions(problem)}"
            write(tried, said, FILE)
        print(conditions(problem), tuned_table(tried), sep="\n\n")
        return 0
    places = _places(options)
    run(jobs_of(names, places, seeds, problem), records, options.processes, _say)
    steps = steps_of(names, seeds, problem, records)
    updates = updates_of(names, places, seeds, problem, records)
    cells = cells_of(names, places, seeds, problem, records)
    if options.figure:
        from course_lib.who_wins.figure import map_figure

        map_figure(cells, panels_of(names)).savefig(options.figure, dpi=100)
    if options.json:
        print(json.dumps(as_json(cells, steps), indent=2))
        return 0
    print(assumptions(problem, seeds), map_table(cells), sep="\n\n", end="\n\n")
    print(steps_table(steps, updates), end="\n\n")
    if len(set(names) & set(COMPARED_BY_BAGUA)) > 1:
        print(
            "Compared with the paper on BAGUA (only the families of algorithms in that paper):",
            bagua_text(cells),
            sep="\n\n",
        )
    return 0


def _places(options: argparse.Namespace) -> list[Place]:
    latencies = options.latencies or (_ends(LATENCIES) if options.quick else LATENCIES)
    bandwidths = options.bandwidths or (_ends(BANDWIDTHS) if options.quick else BANDWIDTHS)
    if min(latencies) < 0 or min(bandwidths) <= 0:
        raise ValueError("latencies must be 0 s or more, bandwidths above 0 bytes/s")
    return [(latency, bandwidth) for latency in sorted(set(latencies))
            for bandwidth in sorted(set(bandwidths))]  # fmt: skip


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return values[0], values[-1]


def panels_of(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the figure's panels: one with all algorithms, one with those that BAGUA compares."""
    panels = {"all": list(names)}
    known = [name for name in names if name in COMPARED_BY_BAGUA]
    if 1 < len(known) < len(names):
        panels["the families in BAGUA's paper"] = known
    return panels


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted: run the same command to continue from here", file=sys.stderr)
        sys.exit(130)
