"""docs/who_wins.md still says what the code does: a row of its map, measured again."""

import math

import pytest

from course_lib.who_wins.algorithms import ALGORITHMS
from course_lib.who_wins.measure import time_steps
from course_lib.who_wins.problem import Problem, network_of
from course_lib.who_wins.winners import last_average
from tests.helpers import ROOT

LATENCY, BANDWIDTH = 20e-6, 100e3
LONG = ("1-bit", "top-k", "DiLoCo")
ROW = "20 µs, 100 kB/s"
IN_STEP = [name for name, algorithm in ALGORITHMS.items() if algorithm.prepare is not None]


def cells_of(line: str) -> list[str]:
    return [cell.strip(" *~") for cell in line.strip("|").split("|")]


def rows() -> list[list[str]]:
    page = (ROOT / "docs" / "who_wins.md").read_text(encoding="utf-8")
    return [cells_of(line) for line in page.splitlines() if line.startswith("|")]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.large) if n in LONG else n for n in IN_STEP]
)
def test_the_map_has_the_times_of_today(name: str) -> None:
    """Only the steps to the target, which take a training for each seed, are those of the page."""
    map_of = next(dict(zip(rows()[0], row, strict=True)) for row in rows() if row[0] == ROW)
    on_the_page = float(map_of[name].split()[0])
    steps = next(float(row[2].split()[0]) for row in rows() if row[0] == name)
    pace = time_steps(Problem(), name, network_of(LATENCY, BANDWIDTH))
    # The page gives the mean over seeds that take different numbers of steps, with three digits.
    before, after = pace.after(math.floor(steps)), pace.after(math.floor(steps) + 1)
    seconds = before + (steps % 1) * (after - before)
    end = last_average(Problem(), (LATENCY, BANDWIDTH)) if ALGORITHMS[name].differ else 0.0
    # Seconds rise with each meeting: one of the five seeds may need one more than the mean does.
    off = end / 5 if ALGORITHMS[name].period > 1 else 0.0
    seconds += end
    advice = "python -m course_lib.who_wins makes the page"
    assert on_the_page == pytest.approx(seconds, abs=0.02 * seconds + off), advice
