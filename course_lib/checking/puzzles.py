"""Puzzles: the reader fills in one line of an algorithm, and it is checked at once.

    puzzle(
        "Which chunk does a rank send in a step of the ring?",
        lambda rank, step, K: ...,                 # your line, in place of the dots
        truth=lambda rank, step, K: sent[K][rank][step],     # from the run above
        cases=[{"rank": r, "step": s, "K": 4} for r in range(4) for s in range(3)],
    )

`truth` uses what the page has run, or calls the reference implementation. So the author does not
have to write down the answer's formula, and a page with different numbers has a different answer.
In a lecture, the line is ``...``. The answer and its reason are below it, in ``<details>``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch


class Puzzle:
    """The result of a reader's line in all cases.

    Attributes:
        question: what the line should return.
        total: the number of cases.
        right: the number of cases in which the line is right; ``None``: it is not filled in.

    """

    def __init__(self, question: str, total: int, right: int | None, wrong: str) -> None:
        self.question = question
        self.total = total
        self.right = right
        self._wrong = wrong

    @property
    def solved(self) -> bool:
        """Whether the line is right in all cases."""
        return self.right == self.total

    def __repr__(self) -> str:
        if self.right is None:
            return f"{self.question}\n  Not filled in yet: put your line in place of the dots."
        if self.solved:
            return f"{self.question}\n  ✓ Right in all {self.total} cases."
        return f"{self.question}\n  ✗ Right in {self.right} of {self.total} cases. {self._wrong}"


def puzzle(
    question: str,
    mine: Callable[..., Any],
    *,
    truth: Callable[..., Any],
    cases: Iterable[Mapping[str, Any]],
) -> Puzzle:
    """Compare the reader's line with the right value in each case, and return the result.

    Args:
        question: what the line should return.
        mine: the line, as a function; it gets the arguments of each case by keyword. A line that
            returns ``...`` is not filled in.
        truth: returns the right value of a case: a number, a text, a tensor, or a list of these.
        cases: the arguments of each case, the simplest first.

    Raises:
        ValueError: there are no cases.

    """
    given = [dict(case) for case in cases]
    if not given:
        raise ValueError("a puzzle needs cases, as in cases=[{'rank': 0}, {'rank': 1}]")
    right, wrong = 0, ""
    for case in given:
        where = ", ".join(f"{name}={value!r}" for name, value in case.items())
        expected = truth(**case)
        try:
            said = mine(**case)
        except Exception as error:
            wrong = wrong or f"With {where} your line raises {type(error).__name__}: {error}"
            continue
        if said is ...:
            return Puzzle(question, len(given), None, "")
        if _same(said, expected):
            right += 1
        else:
            wrong = (
                wrong
                or f"With {where} your line gives {_short(said)}; right is {_short(expected)}."
            )
    return Puzzle(question, len(given), right, wrong)


def _same(said: Any, expected: Any) -> bool:
    """Return whether two values are the same; numbers may differ by rounding."""
    said, expected = _plain(said), _plain(expected)
    if isinstance(said, list) and isinstance(expected, list):
        return len(said) == len(expected) and all(map(_same, said, expected))
    if isinstance(said, int | float) and isinstance(expected, int | float):
        return math.isclose(said, expected, rel_tol=1e-4, abs_tol=1e-9)
    return bool(said == expected)


def _plain(value: Any) -> Any:
    """Return tensors, sets, tuples and ranges as lists, and other values as they are."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple | range) else value


def _short(value: Any) -> str:
    text = repr(_plain(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
