"""The leaderboard: the order of the class, from what its verdicts say."""

from __future__ import annotations

from typing import Any

from autograder.commands.leaderboard import board, entry_of
from autograder.examination.verdict import CheckVerdict, Verdict


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


ENTRIES = [entry_of(name, verdicts, ["the race"]) for name, verdicts in CLASS.items()]


def test_places_follow_the_time_and_equal_times_share_one() -> None:
    assert board([]).as_text().endswith("none")
    rows = board(ENTRIES).rows
    assert [row[:3] for row in rows] == [
        *((1, "<b>eve</b>", "20.000"), (1, "=cmd()", "20.000"), (3, "slow", "30.000")),
        *(("", name, "") for name in ("absent", "crashed", "hidden", "missed")),
    ]
    notes = {row[1]: row[6] for row in rows}
    assert notes["absent"] == "not graded yet"
    assert notes["hidden"] == "it missed the target, or failed"
    assert notes["crashed"] == "Rank 0 raised ValueError"
    kept = {row[1]: row[7] for row in rows}
    assert kept["absent"] == "" and kept["missed"] == CLASS["missed"][0].key


def test_the_slowest_draw_counts_and_each_must_reach_the_target() -> None:
    (fast,), (slow,) = verdict(name="draw 1"), verdict(name="draw 2", seconds=0.03)
    (missed,) = verdict(name="draw 3", parts={"values": False}, reason="the loss is 2")
    assert entry_of("x", [fast, slow], ["draw 1", "draw 2"]).cost["seconds"] == 0.03
    draws = ["draw 1", "draw 2", "draw 3"]
    assert entry_of("x", [fast, slow, missed], draws).note == "the loss is 2"
    assert entry_of("x", [fast], ["draw 1", "draw 2"]).note == "not graded yet"
