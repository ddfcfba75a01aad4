"""The order of entries, the page, the table, and the file between two runs."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from autograder.leaderboard.entries import (
    DISQUALIFIED,
    FAILED,
    TIMED,
    UNFINISHED,
    Entry,
    Store,
    ranked,
)
from autograder.leaderboard.page import page, table
from autograder.leaderboard.timing import Unreadable, sources_of
from autograder.leaderboard.timing import read_released as read
from course_lib.capstone import Race
from tests.helpers.course_folders import RELEASED


def timed(name: str, seconds: float, **more: object) -> Entry:
    return Entry(name, "d", TIMED, seconds=seconds, light=seconds / 4, sent=100, **more)  # type: ignore[arg-type]


HOSTILE = '<script>alert(1)</script>"&\u202e'
ENTRIES = ranked(
    [
        timed("slow", 0.4),
        Entry("cheat", "d", DISQUALIFIED, "9 bytes come from <nowhere>"),
        timed("b", 0.02),
        timed("a", 0.02),
        timed(HOSTILE, 0.03),
        Entry("near", "d", UNFINISHED, "a loss of 0.3", seconds=0.1, light=0.1, loss=0.3),
        Entry("far", "d", UNFINISHED, "a loss of 2", seconds=0.01, light=0.01, loss=2.0),
        Entry("=1+1", "d", FAILED, " @SUM(1)"),
    ]
)


def test_equal_scores_share_a_place_and_the_next_one_is_left_out() -> None:
    places = [(entry.name, entry.place) for entry in ENTRIES]
    assert places[:4] == [("a", 1), ("b", 1), (HOSTILE, 3), ("slow", 4)]


def test_who_has_no_score_is_kept_behind_in_the_order_of_what_came_nearest() -> None:
    assert [entry.name for entry in ENTRIES[4:]] == ["near", "far", "cheat", "=1+1"]
    assert all(entry.place == 0 for entry in ENTRIES[4:])


def test_the_page_is_one_file_that_shows_names_as_text() -> None:
    text = page(ENTRIES, Race(), "The race", 3)
    assert "<script" not in text and "\u202e" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&quot;&amp;\N{REPLACEMENT CHARACTER}" in text
    assert "disqualified: 9 bytes come from &lt;nowhere&gt;" in text
    assert not re.search(r"https?:|//|@import|url\(|\bsrc=|\bon\w+=", text)
    assert "prefers-color-scheme: dark" in text and 'lang="en"' in text
    assert "F<sub>k</sub>/φ" in text and "5e+10" in text and "1.25e+08" in text

    class Rows(HTMLParser):
        rows = 0

        def handle_starttag(self, tag: str, attrs: object) -> None:
            self.rows += tag == "tr"

    parser = Rows()
    parser.feed(text)
    assert parser.rows == 1 + len(ENTRIES)
    assert "There is no submission yet" in page([], Race(), "The race", 1)


def test_the_table_gives_every_digit_and_no_formula() -> None:
    rows = list(csv.DictReader(io.StringIO(table(ENTRIES))))
    assert [float(row["seconds"]) for row in rows[:2]] == [0.02, 0.02]
    assert rows[0]["distance"] == "4.0"
    assert rows[-1]["name"] == "'=1+1" and rows[-1]["note"] == "' @SUM(1)"
    assert not rows[-1]["seconds"] and not rows[-1]["place"]


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "board.json", "one")
    for entry in ENTRIES:
        store.keep(entry)
    again = Store(tmp_path / "board.json", "two")
    assert again.seed == "one"
    assert list(again.entries.values()) == ENTRIES
    (tmp_path / "board.json").write_text("{}")
    with pytest.raises(ValueError, match="--again"):
        Store(tmp_path / "board.json", "three")


def test_who_ran_out_of_time_is_known_until_there_is_more(tmp_path: Path) -> None:
    Store(tmp_path / "board.json", "one").keep(Entry("late", "d", FAILED, ran_out=60.0))
    store = Store(tmp_path / "board.json", "two")
    assert store.known("late", "d", 60.0) == store.known("late", "d", 30.0) == store.entries["late"]
    assert store.known("late", "d", 61.0) is None
    store.keep(Entry("broken", "d", FAILED, "no such name"))
    assert store.known("broken", "d", 600.0) is not None
    assert store.known("broken", "another", 60.0) is None and store.known("new", "d", 60.0) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"\xff\xfe", b"[" * 10**5, b'{"cells": 3}', b'{"cells": [1, {"source": 5}]}'],
)
def test_what_is_no_notebook_is_an_entry_without_code(tmp_path: Path, content: bytes) -> None:
    released = read(RELEASED / "10_capstone" / "10_capstone.ipynb")
    path = tmp_path / "10_capstone.ipynb"
    path.write_bytes(content)
    try:
        sources = sources_of(path, released)
    except Unreadable:
        return
    assert any("NotImplementedError" in source for _, source in sources)


def test_links_are_not_followed(tmp_path: Path) -> None:
    released = read(RELEASED / "10_capstone" / "10_capstone.ipynb")
    (tmp_path / "real").write_text(json.dumps({"cells": []}))
    (tmp_path / "link.ipynb").symlink_to(tmp_path / "real")
    with pytest.raises(Unreadable):
        sources_of(tmp_path / "link.ipynb", released)
