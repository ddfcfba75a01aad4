"""``course progress``: points, predictions and time, from the desk's diary."""

from __future__ import annotations

import argparse
import itertools
import sys
import textwrap
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from course_lib.diary import CHECKS, PREDICTIONS, in_lecture, kept
from course_lib.installed import find_course
from course_lib.learner import _course
from course_lib.learner.start import add_desk, desk_of

DESCRIPTION = (
    "Show how far you are in each assignment: the points of the last run of each check, how many "
    "predictions and guesses were right, and the recorded time."
)
PAUSE = 30 * 60
"""A gap of this many seconds between two records counts as a pause."""
_EXPLAINED = (
    "Points are those of the last run of each check. They do not include a grader's hidden cases, "
    "nor answers that a person reads. A check that a lecture calls gives no points. The number in "
    "parentheses says how many guesses would be right by chance. The time is "
    "the sum of the gaps between two recorded checks or predictions; gaps of half an hour or more "
    "do not count."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "assignment", nargs="?", metavar="ASSIGNMENT", help="only this one (default: all)"
    )
    add_desk(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table; return the exit status."""
    course = find_course()
    desk = desk_of(arguments, course)
    checks, predictions = kept(CHECKS, desk), kept(PREDICTIONS, desk)
    if arguments.assignment:
        try:
            only = _course.find(course, arguments.assignment)
        except _course.Unknown as error:
            print(f"course progress: {error}", file=sys.stderr)
            return 2
        checks = [entry for entry in checks if _title(entry) == only]
        predictions = [entry for entry in predictions if _title(entry) == only]
    if not checks and not predictions:
        print("Nothing is recorded yet. Run a check or make a prediction in one of your notebooks.")
        print(f"Your notebooks: {desk}. Get one with `course start ASSIGNMENT`. The assignments:")
        print("  " + "\n  ".join(_course.names(course)))
        return 0
    print("\n".join(table(course, checks, predictions)))
    return 0


def table(course: Path, checks: list[Any], predictions: list[Any]) -> list[str]:
    """Return the lines to show, one for each assignment or lecture with a record."""
    last = {entry.get("checked"): entry for entry in checks if not in_lecture(entry)}
    names = _course.names(course)
    titles = sorted({_title(entry) for entry in (*checks, *predictions)})
    width = max(map(len, (*titles, "elsewhere")))
    lines = [f"{'':{width}}   points  predicted right  guessed right   time"]
    total, spent = [0.0, 0.0], 0
    for title in titles:
        tasks = _course.tasks(course, title) if title in names else []
        found = {t.name: last[f"{title}/{t.name}"] for t in tasks if f"{title}/{t.name}" in last}
        mine = [entry for entry in predictions if _title(entry) == title]
        asked = [entry for entry in checks if _title(entry) == title]
        earned = sum(t.points * float(found[t.name]["fraction"]) for t in tasks if t.name in found)
        most = sum(t.points for t in tasks if t.checked)
        total = [total[0] + earned, total[1] + most]
        points = f"{earned:g}/{most:g}" if tasks else ""
        name = "elsewhere" if title == "None" else title
        minutes = _minutes([*mine, *asked])
        spent += minutes
        lines.append(f"{name:{width}}  {points:>7}  {_foretold(mine)}  {_time(minutes)}")
    sums = f"{total[0]:g}/{total[1]:g}" if total[1] else ""
    lines.append(f"{'together':{width}}  {sums:>7}  {_foretold(predictions)}  {_time(spent)}")
    return [*lines, "", *textwrap.wrap(_EXPLAINED, 88)]


def _title(entry: dict[str, Any]) -> str:
    """Return the assignment or lecture that an entry belongs to."""
    if "checked" in entry and not in_lecture(entry):
        return str(entry["checked"]).partition("/")[0]
    return str(entry.get("notebook"))


def _foretold(entries: Iterable[dict[str, Any]]) -> str:
    """Return the columns of predictions and of guesses; only the first score of each counts."""
    scored: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in entries:
        if "scored" in entry:
            scored.setdefault((_title(entry), str(entry["scored"])), entry)
    # The entry of a guess has the number of its options, under "of".
    options = [each["of"] for each in scored.values() if isinstance(each.get("of"), int)]
    guesses = [bool(each.get("right")) for each in scored.values() if "of" in each]
    numbers = [bool(each.get("right")) for each in scored.values() if "of" not in each]
    foretold = f"{sum(numbers)} of {len(numbers)}" if numbers else ""
    chance = sum(1 / max(each, 1) for each in options)
    guessed = f"{sum(guesses)} of {len(guesses)} ({chance:.1f})" if guesses else ""
    return f"{foretold:>15}  {guessed:>13}"


def _minutes(entries: Iterable[dict[str, Any]]) -> int:
    """Return the time between records, without pauses."""
    moments = sorted(moment for entry in entries if (moment := _moment(entry)) is not None)
    gaps = (later - earlier for earlier, later in itertools.pairwise(moments))
    return round(sum(gap for gap in gaps if gap < PAUSE) / 60)


def _time(minutes: int) -> str:
    hours, left = divmod(minutes, 60)
    return f"{hours} h {left:2} min" if hours else f"{left} min"


def _moment(entry: dict[str, Any]) -> float | None:
    try:
        return datetime.strptime(entry["time"], "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (KeyError, TypeError, ValueError):
        return None
