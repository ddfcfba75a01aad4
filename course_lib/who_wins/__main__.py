"""The command line: ``python -m course_lib.who_wins``."""

import argparse
import itertools
import sys
from collections.abc import Sequence

from course_lib.cores import usable_cores
from course_lib.who_wins.algorithms import ALGORITHMS
from course_lib.who_wins.problem import Problem
from course_lib.who_wins.report import assumptions, map_table, steps_table
from course_lib.who_wins.sweep import jobs_of, run
from course_lib.who_wins.winners import cells_of, steps_of

_EXAMPLES = """\
examples:
  python -m course_lib.who_wins                           # the whole map, in minutes
  python -m course_lib.who_wins --straggler 2 --algorithms flat asynchronous "local SGD"
  python -m course_lib.who_wins --latencies 1e-3 --bandwidths 1e5 1e6 1e7
"""

LATENCIES = (20e-6, 5e-3, 20e-3)
BANDWIDTHS = (30e3, 100e3, 1e6, 10e6)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        _map(options)
    except ValueError as error:
        print(f"who_wins: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m course_lib.who_wins",
        description="Find out which algorithm reaches a target loss first, on which network.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--latencies", type=float, nargs="+", default=LATENCIES, help="of the network, in seconds")
    add("--bandwidths", type=float, nargs="+", default=BANDWIDTHS,
        help="of a worker's link, in bytes per second")  # fmt: skip
    add("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), metavar="NAME",
        help=f"algorithms among {', '.join(ALGORITHMS)}")  # fmt: skip
    add("--seeds", type=int, default=5, help="number of seeds per algorithm (default: 5)")
    add("--straggler", type=float, default=1.0, help="factor by which worker 1 is slower")
    add("--processes", type=int, default=usable_cores(),
        help="number of training runs at the same time")  # fmt: skip
    return parser


def _map(options: argparse.Namespace) -> None:
    problem = Problem(straggler=options.straggler)
    seeds = range(options.seeds)
    names = [name for name in ALGORITHMS if name in options.algorithms]
    places = list(itertools.product(sorted(options.latencies), sorted(options.bandwidths)))
    results = run(jobs_of(names, places, seeds, problem), options.processes, _show_progress)
    steps = steps_of(names, seeds, problem, results)
    cells = cells_of(names, places, seeds, problem, results)
    print(assumptions(problem, seeds), map_table(cells), steps_table(steps), sep="\n\n")


def _show_progress(count: int, total: int) -> None:
    end = "\n" if count == total or not sys.stderr.isatty() else "\r"
    print(f"{count} of {total} runs", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
