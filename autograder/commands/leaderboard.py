"""``autograder leaderboard``: the board of the capstone's race, from the verdicts of the class.

`autograder grade` has run every submission's race on the grader's own network, with a virtual
clock. This command only reads what the verdicts say, and writes a page and a table.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from autograder.course import Folders, handed_out
from autograder.examination.verdict import Verdict
from autograder.files import write_whole
from autograder.pool.book import current
from autograder.pool.class_list import students
from autograder.tables import Row, Table, bar, csv_text
from autograder.web_page import web_page
from course_lib.capstone import Race
from course_lib.checking.loading import load_module

ASSIGNMENT, TASK = "10_capstone", "train"
DESCRIPTION = """\
Write the leaderboard of the capstone from the verdicts of the class: place, virtual time, bytes and
rounds of communication. Run `autograder grade 10_capstone` first. The board names students. Those
who missed the target stay on it, with the reason and without a place."""


@dataclass(frozen=True)
class Entry:
    """One student on the board.

    Attributes:
        name: the student's name.
        note: why there is no time; empty if there is one.
        seconds: virtual seconds of the race.
        computed: seconds of the gradients of the rank with the most.
        sent: bytes of the rank that sends most.
        rounds: number of operations of rank 0.

    """

    name: str
    note: str = ""
    seconds: float = math.inf
    computed: float = 0.0
    sent: int = 0
    rounds: int = 0


def entry_of(name: str, verdicts: Sequence[Verdict], case: str) -> Entry:
    """Return a student's entry.

    Args:
        name: the student.
        verdicts: those that count.
        case: name of the race's case.

    """
    checks = [check for verdict in verdicts for check in verdict.checks if check.task == TASK]
    results = [each for check in checks for each in check.cases if each["name"] == case]
    if not results:
        return Entry(name, "not graded yet")
    (result,) = results
    cost = result.get("cost", {})
    if not cost or not result["parts"].get("values", result["passed"]):
        why = "it missed the target, or failed" if result["hidden"] else result["reason"]
        return Entry(name, why or "this verdict has no time")
    return Entry(
        name,
        seconds=cost["seconds"],
        computed=cost["computed"],
        sent=int(cost["sent"]),
        rounds=int(cost["rounds"]),
    )


def board(entries: Sequence[Entry]) -> Table:
    """Return the entries in order; equal times share a place."""
    entries = sorted(entries, key=lambda entry: (entry.seconds, entry.sent, entry.name))
    times = [entry.seconds for entry in entries]
    timed = [entry for entry in entries if not entry.note]
    rows: list[Row] = []
    for e in entries:
        if e.note:
            rows.append(("", e.name, "", "", "", "", e.note, ""))
            continue
        rows.append(
            (
                *(1 + times.index(e.seconds), e.name),
                *(f"{1e3 * e.seconds:.3f}", f"{1e3 * e.computed:.3f}", e.sent, e.rounds),
                "",
                bar(e.seconds / timed[-1].seconds),
            )
        )
    header = ("place", "name", "time, ms", "gradients, ms", "bytes sent", "rounds", "note", "")
    title = "Time on the grader's virtual clock, the same on every machine"
    return Table(title, header, rows, "There is no submission yet.")


def about(race: Race) -> str:
    """Return a sentence on the race."""
    return (
        f"{race.world_size} ranks, with a latency of {1e6 * race.latency:g} µs and a bandwidth of "
        f"{race.bandwidth / 1e6:g} MB/s between them, train a network of {race.features}, "
        f"{race.hidden} and {race.classes} units until its loss is at most {race.target:g}."
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--final", action="store_true", help="the race on the hidden network and model"
    )


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Write the board; return the exit status."""
    folders = Folders.at(root)
    there, source = students(folders, ASSIGNMENT), folders.source / ASSIGNMENT
    case = (
        load_module(source / "hidden.py", handed_out(source)).FINAL
        if arguments.final
        else load_module(handed_out(source) / "checks.py").RACE
    )
    entries = [
        entry_of(name, list(current(folders, ASSIGNMENT, name).values()), case.name)
        for name in there
    ]
    target = folders.data / "leaderboard"
    stem = "final" if arguments.final else "leaderboard"
    title = "The race: " + ("final results" if arguments.final else "results so far")
    table = board(entries)
    body = f"<p>{escape(about(Race.of(case.parameters)))}</p>\n{table.as_html()}"
    write_whole(target / f"{stem}.html", web_page(title, body))
    write_whole(target / f"{stem}.csv", csv_text(table.header[:-1], [r[:-1] for r in table.rows]))
    timed = sum(not entry.note for entry in entries)
    print(table.as_text())
    print(
        f"{timed} of {len(entries)} entries reached the target; the results are in "
        f"{target / stem}.html and {stem}.csv"
    )
    return 0
