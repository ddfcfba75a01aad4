"""Predictions: locked, scored, kept on the desk, never in the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from course_lib.checking import predict, predictions

pytestmark = pytest.mark.every_case


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(predictions, "_locked", {})


def test_the_first_guess_counts(capsys: Any) -> None:
    assert (
        repr(predict("bytes", 3_000_000))
        == "bytes: you predict 3,000,000; your prediction is locked"
    )
    again = predict("bytes", 4)
    assert again.guess == 3_000_000
    assert "Your first prediction counts: 3,000,000." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("guess", "actual", "words"),
    [
        (100, 101, "right"),
        (100, torch.tensor(100.0), "right"),
        (200, 100, "2 times too large"),
        (50, 100, "2 times too small"),
        (-1, 100, "not right"),
        (1, 0, "not right"),
    ],
)
def test_a_guess_is_scored_against_what_was_run(guess: Any, actual: Any, words: str) -> None:
    scored = predict("q", guess).score(actual)
    assert repr(scored).endswith(f": {words}")
    assert scored.right is (words == "right")


def test_the_desk_keeps_a_record(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / ".desk").mkdir()
    lecture = tmp_path / "lectures" / "01"
    lecture.mkdir(parents=True)
    monkeypatch.chdir(lecture)
    predict("steps", 10).score(12)
    predict("nothing", None).score(3)
    with (tmp_path / ".desk" / predictions.FILE).open("a") as file:
        file.write("{ cut")
    first, second = predictions.record()
    assert (first["predicted"], first["guess"]) == ("steps", 10)
    assert (second["scored"], second["actual"], second["right"]) == ("steps", 12, False)
