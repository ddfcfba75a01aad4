"""Guesses: locked, answered by what was run alone, kept on the desk, never in the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from course_lib.checking import guess, guesses, predictions
from course_lib.diary import PREDICTIONS

pytestmark = pytest.mark.every_case
IDLE = {"none": 0.0, "a quarter": 0.25, "more than half": lambda share: share > 0.5}
WHY = ["Pieces fill it.", "One in four.", "It has to fill and to drain."]


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(guesses, "_locked", {})


@pytest.mark.parametrize("mine", [1, 2, 3])
@pytest.mark.parametrize(
    ("actual", "holds"),
    [(0.0, 1), (0, 1), (torch.tensor(0.25), 2), (0.26, 2), (0.9, 3), (0.4, None)],
)
def test_what_was_run_decides(mine: int, actual: Any, holds: int | None) -> None:
    scored = guess("idle?", IDLE, mine=mine).score(actual, why=WHY)
    assert scored.right is (None if holds is None else mine == holds)
    assert ("no option says that" if holds is None else f"✓ {holds}. ") in str(scored)
    for told in (str(scored), scored._repr_html_()):
        assert told.count("✓") == (holds is not None)
        assert all(reason in told for reason in WHY)


def test_a_list_of_values_is_its_own_options(capsys: Any) -> None:
    first = guess("who is first?", ["ring", "direct"], mine=2)
    assert "  2. direct  ← your guess" in capsys.readouterr().out
    assert first.score("Direct").right
    assert guess("how many?", [4, 7, 64], mine=3).score(64).right


def test_the_first_guess_counts(capsys: Any) -> None:
    assert guess("idle?", IDLE).mine is None  # that locks nothing
    assert guess("idle?", IDLE, mine=2).mine == 2
    assert guess("idle?", IDLE, mine=3).mine == 2
    assert "Your first guess counts: 2." in capsys.readouterr().out
    assert guess("idle?", IDLE).mine == 2


def test_without_a_guess_the_run_still_answers_and_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / ".desk").mkdir()
    told = guess("idle?", IDLE).score(0.25)
    assert told.right is None and "The run shows 0.25: option 2 is right." in str(told)
    assert "<details>" in told._repr_html_()  # folded, until a reader looks
    assert predictions.record() == []


@pytest.mark.parametrize("mine", [0, 4, -1, "2", 1.0, True])
def test_a_number_that_no_option_has_is_said_and_locks_nothing(mine: Any, capsys: Any) -> None:
    assert guess("idle?", IDLE, mine=mine).mine is None
    assert "is no option. Put a number from 1 to 3, as in mine=2." in capsys.readouterr().out
    assert guess("idle?", IDLE, mine=2).mine == 2


def test_the_desk_keeps_it(tmp_path: Path) -> None:
    (tmp_path / ".desk").mkdir()
    guess("idle?", IDLE, mine=2).score(0.25)
    first, second = predictions.record()
    assert (first["predicted"], first["guess"], first["of"]) == ("idle?", "a quarter", 3)
    assert (second["scored"], second["right"], second["of"]) == ("idle?", True, 3)
    assert (tmp_path / ".desk" / PREDICTIONS).is_file()
