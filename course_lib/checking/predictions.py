"""Predictions: a number, locked before the run that shows it, and compared with the run's value.

    bytes_sent = predict("bytes that a rank sends", 3_000_000)
    …                                                     # the run
    bytes_sent.score(trace.bytes_sent(0))

Readers who predict before they look learn more from the result, even if the prediction is wrong. A
prediction is optional, and nothing depends on it: ``predict("…", None)`` makes none yet. On the
student's desk, each prediction and each score is one line of ``predictions.jsonl``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from course_lib import diary

FILE = diary.PREDICTIONS
_locked: dict[str, Prediction] = {}


class Prediction:
    """A guess that is locked.

    Attributes:
        question: the text of the question.
        guess: a number; ``None``: no guess.
        actual: the value that the run showed, once it is known; else ``None``.

    """

    def __init__(self, question: str, guess: float | None) -> None:
        self.question = question
        self.guess = guess
        self.actual: float | str | None = None

    def score(self, actual: Any, *, within: float = 0.05) -> Prediction:
        """Compare the guess with the run's value, record the result, and return the prediction.

        Args:
            actual: the run's value: a number, a tensor of one element, or a text.
            within: relative error up to which a number is right.

        """
        self.actual = plain(actual)
        self._within = within
        if self.guess is not None:
            diary.keep(FILE, {"scored": self.question, "actual": self.actual, "right": self.right})
        return self

    @property
    def right(self) -> bool | None:
        """Whether the guess was right; ``None`` if there is no guess or nothing was run yet."""
        if self.guess is None or self.actual is None:
            return None
        return agrees(self.guess, self.actual, self._within)

    def __repr__(self) -> str:
        asked = f"{self.question}: "
        if self.actual is None:
            if self.guess is None:
                return f"{asked}no prediction yet (put one in place of None)"
            return f"{asked}you predict {shown(self.guess)}; your prediction is locked"
        if self.guess is None:
            return f"{asked}{shown(self.actual)} (you made no prediction)"
        words = "right" if self.right else self._how_far()
        return f"{asked}{shown(self.actual)}; you predicted {shown(self.guess)}: {words}"

    def _how_far(self) -> str:
        if isinstance(self.actual, str) or not self.actual:
            return "not right"
        assert self.guess is not None
        ratio = self.guess / self.actual
        if ratio <= 0:
            return "not right"
        size, factor = ("large", ratio) if ratio > 1 else ("small", 1 / ratio)
        return f"{factor:.3g} times too {size}"


def predict(question: str, guess: float | None) -> Prediction:
    """Lock a guess about the result of a run; the first guess counts.

    If the cell runs again with a different guess, this prints a message and keeps the first guess,
    until the kernel is restarted. A guess of ``None`` locks nothing, and neither does a text, which
    is answered by a sentence.

    Args:
        question: what is asked, with its unit; each question has only one prediction.
        guess: a number, or a tensor of one element.

    """
    value = None if guess is None else plain(guess)
    if isinstance(value, str):
        print(f"A prediction is a number, and {value!r} is a text. Nothing is locked yet.")
        value = None
    earlier = _locked.get(question)
    if earlier is None:
        made = Prediction(question, value)
        if value is not None:
            _locked[question] = made
            diary.keep(FILE, {"predicted": question, "guess": value})
        return made
    if value is not None and value != earlier.guess:
        print(f"Your first prediction counts: {shown(earlier.guess)}.")
    return earlier


def record() -> list[dict[str, Any]]:
    """Return the entries of the desk's file of predictions; empty without a desk."""
    desk = diary.find_desk(Path.cwd())
    return [] if desk is None else diary.kept(FILE, desk)


def agrees(guess: float | str, actual: float | str, within: float) -> bool:
    """Return whether two texts, or two numbers up to the relative error `within`, are equal."""
    if isinstance(guess, str) or isinstance(actual, str):
        return str(guess).strip().lower() == str(actual).strip().lower()
    return math.isclose(guess, actual, rel_tol=within)


def plain(value: Any) -> float | str:
    """Return a number, a tensor of one element, or a text as a value that a record can hold."""
    if isinstance(value, str):
        return value
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a prediction must be a number or a string, got {type(value).__name__}")
    return value


def shown(value: float | str | None) -> str:
    """Return a value as readable text."""
    if isinstance(value, str) or value is None:
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
