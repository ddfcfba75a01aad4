"""``autograder leaderboard``: the board of the capstone's race, from the verdicts of the class.

`autograder grade` has run every submission's race on the grader's own network, with a virtual
clock. This command only reads what the verdicts say, and writes a page and a table.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from autograder.course import Folders, handed_out
from autograder.files import write_whole
from autograder.foreign_text import no_formula, printable
from autograder.pool.book import current
from autograder.pool.class_list import NothingToGrade, students
from autograder.web_page import web_page
from course_lib.capstone import Race
from course_lib.checking.local import load_module

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
        place: from 1; equal times share a place; 0 for none.

    """

    name: str
    note: str = ""
    seconds: float = 0.0
    computed: float = 0.0
    sent: int = 0
    rounds: int = 0
    place: int = 0


def entries_of(found: Mapping[str, Sequence[Any]], case: str) -> list[Entry]:
    """Return the entries in the board's order.

    Args:
        found: student → the verdicts that count.
        case: name of the race's case.

    """
    timed, others = [], []
    for name, verdicts in found.items():
        checks = [check for verdict in verdicts for check in verdict.checks if check.task == TASK]
        results = [each for check in checks for each in check.cases if each["name"] == case]
        if not results:
            others.append(Entry(name, "not graded yet"))
            continue
        result = results[0]
        cost = result.get("cost", {})
        if not cost or not result["parts"].get("values", result["passed"]):
            why = "it missed the target, or failed" if result["hidden"] else result["reason"]
            others.append(Entry(name, why or "this verdict has no time"))
            continue
        numbers = cost["seconds"], cost["computed"], int(cost["sent"]), int(cost["rounds"])
        timed.append(Entry(name, "", *numbers))
    timed.sort(key=lambda entry: (entry.seconds, entry.sent, entry.name))
    seconds = [entry.seconds for entry in timed]
    placed = [Entry(*(e.name, e.note, e.seconds, e.computed, e.sent, e.rounds),
                    place=1 + seconds.index(e.seconds)) for e in timed]  # fmt: skip
    return placed + sorted(others, key=lambda entry: entry.name)


def _honours(entry: Entry, entries: Sequence[Entry]) -> str:
    timed = [each for each in entries if each.place]
    best = {
        "fewest bytes": entry.sent == min(each.sent for each in timed),
        "fewest rounds": entry.rounds == min(each.rounds for each in timed),
        "least computing": entry.computed == min(each.computed for each in timed),
    }
    return ", ".join(name for name, has in best.items() if has)


def page(entries: Sequence[Entry], race: Race, title: str) -> str:
    """Return the board as one page that fetches nothing and has no script."""
    longest = max((entry.seconds for entry in entries if entry.place), default=1.0)
    rows = []
    for e in entries:
        name = f"<td>{escape(printable(e.name))}"
        if not e.place:
            note = escape(printable(e.note)[:300])
            rows.append(f'<tr><td class="n">–</td>{name}</td><td colspan="5">{note}</td></tr>')
            continue
        width, part = 100 * e.seconds / longest, 100 * e.computed / e.seconds
        bar = (
            f'<div class="bar" aria-hidden="true" style="width:{width:.1f}%">'
            f'<div class="all" style="width:{part:.1f}%"></div></div>'
        )
        cells = (f"{1e3 * e.seconds:.3f}", f"{1e3 * e.computed:.3f}", f"{e.sent:,}", e.rounds)
        numbers = "".join(f'<td class="n">{each}</td>' for each in cells)
        honours = _honours(e, entries)
        rows.append(
            f'<tr><td class="n">{e.place}</td>{name}{bar}</td>{numbers}<td>{honours}</td></tr>'
        )
    titles = ("place", "name", "time, ms", "gradients, ms", "bytes sent", "rounds", "")
    head = "".join(f'<th scope="col">{each}</th>' for each in titles)
    about = (
        f"{race.world_size} ranks, with a latency of {1e6 * race.latency:g} µs and a bandwidth of "
        f"{race.bandwidth / 1e6:g} MB/s between them, train a network of {race.features}, "
        f"{race.hidden} and {race.classes} units until its loss is at most {race.target:g}."
    )
    body = f"""<p>{escape(about)}</p>
<table><caption>The time is virtual: the same on every machine. A bar shows the time; its left part
is the time of the gradients. The bytes are those of the rank that sends most.</caption>
<thead><tr>{head}</tr></thead><tbody>
{"".join(rows)}
</tbody></table>"""
    return web_page(title, body if entries else "<p>There is no submission yet.</p>")


def table(entries: Sequence[Entry]) -> str:
    """Return the board as comma-separated values, with the seconds to the last digit."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["place", "name", "seconds", "computed", "bytes_sent", "rounds", "note"])
    for e in entries:
        numbers = [e.seconds, e.computed, e.sent, e.rounds] if e.place else [""] * 4
        texts = no_formula(printable(e.name)), no_formula(printable(e.note))
        writer.writerow([e.place or "", texts[0], *numbers, texts[1]])
    return out.getvalue()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--final", action="store_true", help="the race on the hidden network and model"
    )
    parser.add_argument(
        "--to", type=Path, help="folder of the board (default: grading/leaderboard)"
    )


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Write the board; return the exit status."""
    folders = Folders.at(root)
    source = folders.source / ASSIGNMENT
    case = (
        load_module(source / "hidden.py", handed_out(source)).FINAL
        if arguments.final
        else load_module(handed_out(source) / "checks.py").RACE
    )
    try:
        there = students(folders, ASSIGNMENT)
    except NothingToGrade as error:
        print(f"autograder leaderboard: {error}", file=sys.stderr)
        return 2
    found = {name: list(current(folders, ASSIGNMENT, name).values()) for name in there}
    entries = entries_of(found, case.name)
    target = arguments.to or folders.data / "leaderboard"
    stem = "final" if arguments.final else "leaderboard"
    title = "The race: " + ("final results" if arguments.final else "results so far")
    write_whole(target / f"{stem}.html", page(entries, Race.of(case.parameters), title))
    write_whole(target / f"{stem}.csv", table(entries))
    timed = sum(entry.place > 0 for entry in entries)
    print(
        f"{timed} of {len(entries)} entries reached the target; the results are in "
        f"{target / stem}.html and {stem}.csv"
    )
    return 0
