"""Write the leaderboard of the capstone from the verdicts of the class.

It has place, virtual time, bytes and rounds of communication. Run `autograder grade 10_capstone`
first. The board names the students of the class list. Those who missed the target stay on it, with
the reason and without a place. The last column names the files in grading/graded/10_capstone/NAME
that keep an entry's source (.ipynb), seed and verdict (.json), also after the student has handed in
something else.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from autograder.collection.roster import kept_roster
from autograder.course import Folders, handed_out
from autograder.examination.verdict import Verdict
from autograder.files import write_whole
from autograder.pool.book import current
from autograder.pool.class_list import students
from autograder.tables import Row, Table, csv_text, web_page
from course_lib.checking.loading import load_module

ASSIGNMENT, TASK = "10_capstone", "train"


class Entry(NamedTuple):
    """One student on the board.

    Attributes:
        name: the student's name.
        note: why there is no time; empty if there is one.
        cost: of the race: ``seconds`` on the virtual clock; ``computed``, seconds of the gradients
            of the rank with the most; ``sent``, bytes of the rank that sends most; ``rounds``,
            operations of rank 0. Empty if there is no time.
        key: of its verdict, `Verdict.key`; empty if there is none.

    """

    name: str
    note: str
    cost: Mapping[str, float]
    key: str


def entry_of(name: str, verdicts: Sequence[Verdict], cases: Sequence[str]) -> Entry:
    """Return a student's entry: the slowest of its races, or the first that missed.

    Args:
        name: the student.
        verdicts: those that count.
        cases: names of the race's cases, one for each draw of the data.

    """
    entries = [_entry_of_case(name, verdicts, case) for case in cases]
    missed = [entry for entry in entries if entry.note]
    return missed[0] if missed else max(entries, key=lambda entry: entry.cost["seconds"])


def _entry_of_case(name: str, verdicts: Sequence[Verdict], case: str) -> Entry:
    results = [
        (result, verdict.key)
        for verdict in verdicts
        for check in verdict.checks
        if check.task == TASK
        for result in check.cases
        if result["name"] == case
    ]
    if not results:
        return Entry(name, "not graded yet", {}, "")
    ((result, key),) = results
    cost = result.get("cost", {})
    if cost and result["parts"].get("values", result["passed"]):
        return Entry(name, "", cost, key)
    reason = "it missed the target, or failed" if result["hidden"] else result["reason"]
    return Entry(name, reason or "this verdict has no time", {}, key)


def board(entries: Sequence[Entry]) -> Table:
    """Return the entries in order; equal times share a place."""
    timed = sorted(
        (e for e in entries if not e.note),
        key=lambda e: (e.cost["seconds"], e.cost["sent"], e.name),
    )
    times = [entry.cost["seconds"] for entry in timed]
    rows: list[Row] = [
        (
            *(1 + times.index(e.cost["seconds"]), e.name),
            *(f"{1e3 * e.cost[key]:.3f}" for key in ("seconds", "computed")),
            *(int(e.cost["sent"]), int(e.cost["rounds"]), "", e.key),
        )
        for e in timed
    ]
    rows += sorted(("", e.name, "", "", "", "", e.note, e.key) for e in entries if e.note)
    costs = ("time, ms", "gradients, ms", "bytes sent", "rounds")
    header = ("place", "name", *costs, "note", "kept as")
    title = "Time on the grader's virtual clock, the same on every machine"
    return Table(title, header, rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--final", action="store_true", help="the race on the hidden network and model"
    )


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Write the board; return the exit status."""
    folders = Folders.at(root)
    source, roster = folders.source / ASSIGNMENT, kept_roster(folders.data)
    cases = (
        load_module(source / "hidden.py", handed_out(source)).FINAL
        if arguments.final
        else (load_module(handed_out(source) / "checks.py").RACE,)
    )
    entries = [
        entry_of(
            name, list(current(folders, ASSIGNMENT, name).values()), [case.name for case in cases]
        )
        for name in students(folders, ASSIGNMENT)
        if roster.has(name)
    ]
    target = folders.data / "leaderboard"
    stem = "final" if arguments.final else "leaderboard"
    title = "The race: " + ("final results" if arguments.final else "results so far")
    table = board(entries)
    timed = sum(not entry.note for entry in entries)
    summary = f"{timed} of {len(entries)} entries reached the target"
    write_whole(target / f"{stem}.html", web_page(title, f"{summary}.", [table]))
    write_whole(target / f"{stem}.csv", csv_text(table.header, table.rows))
    print(table.as_text())
    print(f"{summary}; the results are in {target / stem}.html and {stem}.csv")
    return 0
