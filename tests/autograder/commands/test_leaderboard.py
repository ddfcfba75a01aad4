"""The leaderboard: the order of the class, from what its verdicts say."""

from __future__ import annotations

import csv
import io
from typing import Any

from autograder.commands.leaderboard import entries_of, page, table
from autograder.examination.verdict import CheckVerdict, Verdict
from course_lib.capstone import Race


def verdict(**changed: Any) -> list[Verdict]:
    cost = {"seconds": 0.02, "computed": 0.01, "sent": 4000, "rounds": 6}
    cost |= {name: changed.pop(name) for name in list(changed) if name in cost}
    case = {
        "name": "the race",
        "passed": False,
        "hidden": False,
        "reason": "training takes 20 ms",
        "parts": {"values": True, "all together": False},
        "cost": cost,
        **changed,
    }
    check = CheckVerdict("10_capstone/train", 0.0, 11.0, "", [case])
    return [Verdict("10_capstone", "x", "10_capstone", "seed", "", [check])]


CLASS = {
    "slow": verdict(seconds=0.03, rounds=4),
    "=cmd()": verdict(),
    "<b>eve</b>": verdict(sent=3000),
    "missed": verdict(seconds=0.001, parts={"values": False}, reason="the loss is 2 & more"),
    "crashed": verdict(parts={}, cost={}, reason="Rank 0 raised ValueError"),
    "hidden": verdict(parts={}, hidden=True, reason="a secret"),
    "absent": [],
}


def test_places_follow_the_time_and_equal_times_share_one() -> None:
    entries = entries_of(CLASS, "the race")
    assert [(each.place, each.name) for each in entries] == [
        *((1, "<b>eve</b>"), (1, "=cmd()"), (3, "slow")),
        *((0, "absent"), (0, "crashed"), (0, "hidden"), (0, "missed")),
    ]
    notes = {each.name: each.note for each in entries}
    assert notes["absent"] == "not graded yet"
    assert notes["hidden"] == "it missed the target, or failed"
    assert notes["crashed"] == "Rank 0 raised ValueError"


def test_the_page_shows_texts_as_texts_and_who_has_the_fewest() -> None:
    shown = page(entries_of(CLASS, "the race"), Race(), "The race")
    assert "<b>eve" not in shown and "&lt;b&gt;eve&lt;/b&gt;" in shown and "2 &amp; more" in shown
    row = {name: shown.split(name)[1].split("</tr>")[0] for name in ("slow", "eve&lt;", "=cmd")}
    assert "fewest rounds" in row["slow"] and "30.000" in row["slow"]
    assert "fewest bytes" in row["eve&lt;"] and "fewest" not in row["=cmd"]
    assert "There is no submission yet" in page([], Race(), "The race")


def test_the_table_is_safe_in_a_spreadsheet_and_exact() -> None:
    rows = list(csv.DictReader(io.StringIO(table(entries_of(CLASS, "the race")))))
    assert [row["place"] for row in rows] == ["1", "1", "3", "", "", "", ""]
    assert rows[1]["name"] == "'=cmd()" and float(rows[2]["seconds"]) == 0.03
    assert rows[-1]["seconds"] == "" and rows[-1]["note"] == "the loss is 2 & more"
