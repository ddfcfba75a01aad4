"""Results on disk survive a kill half-way through a line, and nothing else goes unnoticed."""

from pathlib import Path

import pytest

from course_lib.who_wins.records import Records


def test_what_was_added_is_there_the_next_time(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "results.jsonl"
    records = Records(path)
    records.add({"a": 1, "b": [0.1, 2]}, {"steps": 3})
    records.add({"a": 2}, None)
    again = Records(path)
    assert len(again) == 2
    assert again[{"b": [0.1, 2], "a": 1}] == {"steps": 3}
    assert {"a": 2} in again and again[{"a": 2}] is None
    assert {"a": 3} not in again


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_broken_last_line_is_dropped(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    records = Records(path)
    records.add({"a": 1}, 1.5)
    records.add({"a": 2}, 2.5)
    path.write_text(path.read_text()[:-cut])
    again = Records(path)
    assert len(again) == 1 and again[{"a": 1}] == 1.5
    again.add({"a": 2}, 3.5)  # on a line of its own
    assert Records(path)[{"a": 2}] == 3.5


def test_a_file_that_is_none_of_ours_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("hello\nworld\n")
    with pytest.raises(ValueError, match=r"line 1 is not a result.*--folder"):
        Records(path)
    assert path.read_text() == "hello\nworld\n"
