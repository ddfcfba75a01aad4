r"""Copy submissions to grading/submitted: from nbgrader's exchange, from a folder, or from a zip.

A folder has one folder or notebook per student. The zip is that of all submissions that Moodle,
Canvas or Gradescope makes. Unsafe files are refused. A table says what was refused and why, and who
is late. You can collect as often as you like: the latest submission counts, and earlier ones are
kept in grading/earlier.

For example::

  autograder collect 02_data_parallel_sgd exchange
  autograder collect 02_data_parallel_sgd ~/Downloads/submissions.zip --roster canvas_grades.csv
  autograder collect 02_data_parallel_sgd COMP4901Y-hw2.zip --roster worksheet.csv \
      --due "2026-11-20 23:59" --timezone Asia/Hong_Kong
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from autograder.collection import times
from autograder.collection.collecting import Collected, collect
from autograder.collection.formats import FORMATS
from autograder.commands import add_assignment
from autograder.course import Folders, load_config
from autograder.files import write_whole
from autograder.tables import csv_text, format_rows
from course_lib.ranks.explain.words import counted


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_assignment(parser)
    parser.add_argument("source", help="'exchange', or the path of a folder or a zip")
    parser.add_argument(
        "--from",
        dest="format",
        choices=FORMATS,
        default="",
        help="format of the source (default: recognised by the names of its files)",
    )
    parser.add_argument(
        "--roster",
        type=Path,
        metavar="CSV",
        help="class list: Canvas's grade export, Moodle's grading worksheet, or your own with a "
        "column student_id; it is kept in grading/roster.csv for next time",
    )
    parser.add_argument(
        "--due",
        metavar="TIME",
        help='deadline, such as "2026-11-20 23:59 +0800"; it is written into the gradebook '
        "(default: the deadline in the gradebook)",
    )
    parser.add_argument(
        "--timezone",
        metavar="ZONE",
        help="the course's time zone, such as Asia/Hong_Kong. Times without a zone are read in it, "
        "and all times are shown in it; grading/timezone keeps it for next time (default: times "
        "are shown in UTC)",
    )


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Collect for the command line; return 0, or 1 if somebody's submission was refused."""
    data = Folders.at(root).data
    name = arguments.timezone
    zone = times.keep_zone(data, name) if name else times.course_zone(data)
    due = times.read_time(arguments.due, zone) if arguments.due else None
    collected = collect(
        root,
        arguments.assignment,
        arguments.source,
        format=arguments.format,
        roster=arguments.roster,
        due=due,
        retime=bool(arguments.timezone),
    )
    if due:
        times.book_due(load_config(root), arguments.assignment, due)
    _report(root, arguments.assignment, collected)
    return int(any(not refusal.path for refusal in collected.refused))


def _report(root: Path, assignment: str, collected: Collected) -> None:
    lines = [
        (r.student, r.name, r.action, times.shown(r.time, collected.zone), r.late or "", r.notes)
        for r in sorted(collected.rows, key=lambda row: row.student)
    ]
    lines += [(e.student, "", f"refused: {e.reason}", "", "", e.path) for e in collected.refused]
    if shown_lines := [line for line in lines if line[2] not in _ORDINARY or any(line[4:])]:
        print(format_rows(_HEADER, shown_lines) + "\n")
    print(_summary(collected))
    if 0 < len(collected.absent) <= 20:
        print(f"no submission from: {', '.join(collected.absent)}")
    absent = [(name, "", "nothing submitted", "", "", "") for name in collected.absent]
    path = Folders.at(root).data / "collected" / f"{assignment}.csv"
    write_whole(path, csv_text(_HEADER, [*lines, *absent]), "utf-8-sig")
    print(f"the whole table: {path}; next: autograder grade {assignment}")


def _summary(collected: Collected) -> str:
    counts = Counter(row.action for row in collected.rows)
    actions = ", ".join(f"{count} {action}" for action, count in counts.items()) or "nothing taken"
    late = sum(row.late > 0 for row in collected.rows)
    submissions = sum(not refusal.path for refusal in collected.refused)
    kinds = ((submissions, "submission"), (len(collected.refused) - submissions, "file"))
    refused = " and ".join(counted(count, kind) for count, kind in kinds if count) or "nothing"
    parts = [f"{collected.format}: {actions}", f"{late} late", f"{refused} refused"]
    if collected.absent:
        parts.append(f"{counted(len(collected.absent), 'student')} submitted nothing")
    return "; ".join(parts)


_HEADER = ("student", "name", "what", "handed in", "days late", "file, notes")
_ORDINARY = {"taken", "unchanged"}
