"""Show how far you are in each assignment, from the desk's diary.

That is the points of the last run of each check, and how many predictions were right.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from course_lib.diary import CHECKS, PREDICTIONS, in_lecture, kept
from course_lib.installed import find_course
from course_lib.learner import _course
from course_lib.learner.start import add_desk, desk_of

_EXPLAINED = (
    "Points are those of the last run of each check. They do not include a grader's hidden cases, "
    "nor answers that a person or the grader judges. A check that a lecture calls gives no points."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_desk(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table; return the exit status."""
    course = find_course()
    desk = desk_of(arguments, course)
    checks, predictions = kept(CHECKS, desk), kept(PREDICTIONS, desk)
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
    titles = sorted({_title(entry) for entry in (*last.values(), *predictions)})
    width = max(map(len, (*titles, "elsewhere")))
    lines = [f"{'':{width}}   points  predicted right"]
    earned_of_all, most_of_all = 0.0, 0.0
    for title in titles:
        tasks = [t for t in _course.tasks(course, title) if t.checked] if title in names else []
        tasks = [t for t in tasks if not last.get(f"{title}/{t.name}", {}).get("open")]
        last_runs = [(t, last[f"{title}/{t.name}"]) for t in tasks if f"{title}/{t.name}" in last]
        earned = sum(task.points * float(entry["fraction"]) for task, entry in last_runs)
        possible = sum(task.points for task in tasks)
        earned_of_all, most_of_all = earned_of_all + earned, most_of_all + possible
        foretold_here = [entry for entry in predictions if _title(entry) == title]
        name = "elsewhere" if title == "None" else title
        points, foretold = _points(earned, possible), _foretold(foretold_here)
        lines.append(f"{name:{width}}  {points:>7}  {foretold:>15}".rstrip())
    sums = _points(earned_of_all, most_of_all)
    lines.append(f"{'together':{width}}  {sums:>7}  {_foretold(predictions):>15}".rstrip())
    return [*lines, "", *textwrap.wrap(_EXPLAINED, 88)]


def _points(earned: float, possible: float) -> str:
    return f"{earned:g}/{possible:g}" if possible else ""


def _title(entry: dict[str, Any]) -> str:
    """Return the assignment or lecture that an entry belongs to."""
    if "checked" in entry:
        return str(entry["checked"]).partition("/")[0]
    return str(entry.get("notebook"))


def _foretold(entries: Iterable[dict[str, Any]]) -> str:
    """Return how many predictions were right; only the first score of each counts."""
    scored: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in entries:
        if "scored" in entry:
            scored.setdefault((_title(entry), str(entry["scored"])), entry)
    right = [bool(entry.get("right")) for entry in scored.values()]
    return f"{sum(right)} of {len(right)}" if right else ""
