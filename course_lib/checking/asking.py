"""`ask`: a question with a place for the answer, which is locked before a run decides it.

    sent = ask("bytes that a rank sends", None)                        # a number, in place of None
    idle = ask("what share of the time is idle?", None, options={"none": 0.0, "43 %": 3 / 7})
    owner = ask("which rank owns row i of 12?", lambda i, K: ..., cases=[{"i": 5, "K": 4}])
    …                                                                  # the run
    sent.score(trace.bytes_sent(0))
    idle.score(simulate(gpipe(4, 4)).bubble)
    owner.score(lambda i, K: owners[K][i])

Readers who answer before they look learn more from the result, even if the answer is wrong. An
answer is optional, and nothing depends on it. No page says which answer is right: the run decides,
also after a reader has changed its numbers. On the student's desk, each answer and each score is
one line of ``predictions.jsonl``.
"""

from __future__ import annotations

import json
import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import torch

from course_lib import diary
from course_lib.checking.box import box, mark
from course_lib.ranks.for_graders import in_notebook

Rule = float | str | Callable[[Any], object]
"""The value that a run shows if an option is right, or a function that tests the run's value."""
HOW_TO_CHOOSE = "Put the number of your option in place of None."
_TO_DO = {
    "number": "Put a number in place of None.",
    "option": HOW_TO_CHOOSE,
    "line": "Not filled in yet: put your line in place of the dots.",
}
_locked: dict[str, Any] = {}


class Question:
    """A question, the reader's answer, and what the run showed.

    Attributes:
        text: the question.
        kind: ``number``, ``option`` or ``line``: what is asked for.
        options: the texts of the options.
        answer: a number, the number of an option from 1 on, or a function; None: no answer.
        actual: the value that the run showed, once it is known; else None.
        right: whether the answer was right; None without an answer or a run.

    """

    def __init__(
        self,
        text: str,
        answer: Any,
        options: Mapping[str, Rule],
        cases: Sequence[Mapping[str, Any]],
    ) -> None:
        self.text, self.answer, self.options = text, answer, tuple(options)
        self.kind = "option" if options else "line" if cases else "number"
        self.actual: float | str | None = None
        self.right: bool | None = None
        self._rules, self._cases = tuple(options.values()), cases
        self._holds: tuple[bool, ...] = ()
        self._reasons: Sequence[str] = ()
        self._verdict = _TO_DO[self.kind]
        if answer is not None and self.kind == "number":
            self._verdict = f"You answer {shown(answer)}; your answer is locked."
        elif answer is not None and self.kind == "option":
            self._verdict = f"Your answer, option {answer}, is locked. The run below decides."

    def score(self, actual: Any, *, within: float = 0.05) -> Question:
        """Compare the answer with the run, show and record the result, and return the question.

        Args:
            actual: the run's value: a number, a tensor of one element, or a text; for a line, a
                function with its arguments that returns the right value.
            within: relative error up to which a number is right.

        Why a wrong option is tempting, or a right one holds, is in reasons.json for the lectures'
        questions: in the source, it would give the answer away.

        """
        if self.kind == "line":
            self._score_line(actual)
        else:
            self.actual = plain(actual)
            if self.kind == "number":
                self._score_number(self.actual, within)
            else:
                self._score_option(self.actual, within)
                self._reasons = _reasons_of_lectures().get(self.text, ())
        if self.right is not None:
            entry = {"scored": self.text, "actual": self.actual, "right": self.right}
            diary.keep(diary.PREDICTIONS, entry)
        _show(self)
        return self

    def _score_number(self, actual: float | str, within: float) -> None:
        self._verdict = f"The run shows {shown(actual)}."
        if self.answer is None:
            return
        self.right = agrees(self.answer, actual, within)
        judgement = "right" if self.right else _how_far(self.answer, actual)
        self._verdict += f" You answered {shown(self.answer)}: {judgement}."

    def _score_option(self, actual: float | str, within: float) -> None:
        self._holds = tuple(
            bool(rule(actual)) if callable(rule) else agrees(rule, actual, within)
            for rule in self._rules
        )
        numbers = [str(number) for number, holds in enumerate(self._holds, 1) if holds]
        self._verdict = f"The run shows {shown(actual)}: "
        if len(numbers) > 1:
            self._verdict += f"options {' and '.join(numbers)} are right."
        else:
            self._verdict += f"option {numbers[0]} is right." if numbers else "no option says that."
        if self.answer is not None and numbers:
            self.right = self._holds[self.answer - 1]
            judgement = "right" if self.right else "not right"
            self._verdict += f" You answered option {self.answer}: {judgement}."

    def _score_line(self, truth: Callable[..., Any]) -> None:
        complaints: list[str] = []
        for case in self._cases:
            arguments = ", ".join(f"{name}={value!r}" for name, value in case.items())
            expected, complaint = truth(**case), ""
            try:
                value = self.answer(**case)
                if value is ...:
                    return
                if not _same(value, expected):
                    complaint = f"gives {_short(value)}; right is {_short(expected)}."
            except Exception as error:
                complaint = f"raises {type(error).__name__}: {error}"
            complaints += [f"With {arguments} your line {complaint}"] if complaint else []
        self.right, total = not complaints, len(self._cases)
        self._verdict = f"✓ Right in all {total} cases."
        if complaints:
            right = total - len(complaints)
            self._verdict = f"✗ Right in {right} of {total} cases. {complaints[0]}"

    def __repr__(self) -> str:
        return f"<Question: {self.text}>"

    def __str__(self) -> str:
        lines = [self.text]
        for i, option in enumerate(self.options, 1):
            tick = ("✓ " if self._holds[i - 1] else "✗ ") if any(self._holds) else ""
            lines.append(f"  {tick}{i}. {option}{'  ← your answer' if i == self.answer else ''}")
            lines += [f"       {self._reasons[i - 1]}"] if self._reasons else []
        return "\n".join([*lines, self._verdict])

    def _ipython_display_(self) -> None:
        """Show nothing as a cell's value, because `ask` and `score` have already shown it."""

    def _repr_html_(self) -> str:
        """Return the question as HTML; without an answer, what decides an option stays folded."""
        items = f"<ol>{self._items()}</ol>" if self.options else ""
        body = f"<p><strong>{escape(self.text)}</strong></p>{items}<p>{escape(self._verdict)}</p>"
        if self.actual is not None and self.answer is None:
            summary = f"Answered by the run: <em>{escape(self.text)}</em>"
            body = f"<details><summary>{summary}</summary>{body}</details>"
        return box("guess", body)

    def _items(self) -> str:
        items = []
        for i, option in enumerate(self.options, 1):
            good = any(self._holds) and self._holds[i - 1]
            text = f"{mark(good)} {escape(option)}" if any(self._holds) else escape(option)
            text += ' <span class="mine">your answer</span>' if i == self.answer else ""
            if self._reasons:
                text += f'<span class="why">{escape(self._reasons[i - 1])}</span>'
            items.append(f"<li{' class=good' if good else ''}>{text}</li>")
        return "".join(items)


def ask(
    question: str,
    answer: Any = None,
    *,
    options: Mapping[str, Rule] | Sequence[float | str] | None = None,
    cases: Iterable[Mapping[str, Any]] | None = None,
) -> Question:
    """Show a question and lock the answer; the first one counts, until the kernel is restarted.

    A question for a line is shown when it is scored.

    Args:
        question: what is asked, with its unit; each question has only one answer.
        answer: a number; with `options`, the number of an option, from 1 on; with `cases`, a line
            of code as a function. None, and a line that returns ``...``, are no answer yet. A line
            is not locked: try until it is right.
        options: the text of each option → the value that the run shows if the option is right: a
            number, a text, or a function that is true for the run's value. In a list, each value
            is also the option's text.
        cases: the arguments of a line in each case, the simplest first.

    An answer that is none of these is said, and locks nothing.

    """
    if cases is not None:
        return Question(question, answer, {}, [dict(case) for case in cases])
    if isinstance(options, Mapping):
        rules = options
    else:
        rules = {shown(option): option for option in options or ()}
    answer = _checked(answer, len(rules))
    first = _locked.get(question, answer)
    new_question = Question(question, first, rules, ())
    if first is not None and question not in _locked:
        _locked[question] = first
        guess = new_question.options[first - 1] if rules else first
        diary.keep(diary.PREDICTIONS, {"predicted": question, "guess": guess})
    _show(new_question)
    if answer not in (None, first):
        print(f"Your first answer counts: {shown(first)}.")
    return new_question


def _checked(answer: Any, options: int) -> Any:
    """Return an answer that can be locked, or None after saying why it cannot."""
    if answer is None:
        return None
    if options:
        if type(answer) is int and 1 <= answer <= options:
            return answer
        print(f"{answer!r} is no option. Put a number from 1 to {options}.")
        return None
    value = plain(answer)
    if isinstance(value, str):
        print(f"The answer is a number, and {value!r} is a text. Nothing is locked yet.")
        return None
    return value


@cache
def _reasons_of_lectures() -> dict[str, list[str]]:
    """Return the lectures' questions with a reason for each option."""
    text = Path(__file__).with_name("reasons.json").read_text(encoding="utf-8")
    return dict(ChainMap(*json.loads(text).values()))


def agrees(answer: float | str, actual: float | str, within: float) -> bool:
    """Return whether two texts, or two numbers up to the relative error `within`, are equal."""
    if isinstance(answer, str) or isinstance(actual, str):
        return str(answer).strip().lower() == str(actual).strip().lower()
    return math.isclose(answer, actual, rel_tol=within)


def _how_far(answer: float, actual: float | str) -> str:
    ratio = answer / actual if not isinstance(actual, str) and actual else 0
    if ratio <= 0:
        return "not right"
    size, factor = ("large", ratio) if ratio > 1 else ("small", 1 / ratio)
    return f"{factor:.3g} times too {size}"


def plain(value: Any) -> float | str:
    """Return a number, a tensor of one element, or a text as a value that a record can hold."""
    if isinstance(value, str):
        return value
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"an answer must be a number or a text, got {type(value).__name__}")
    return value


def shown(value: float | str | None) -> str:
    """Return a value as readable text."""
    if isinstance(value, str) or value is None:
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _same(value: Any, expected: Any) -> bool:
    """Return whether two values are the same; numbers may differ by rounding."""
    value, expected = _listed(value), _listed(expected)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same, value, expected))
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return math.isclose(value, expected, rel_tol=1e-4, abs_tol=1e-9)
    return bool(value == expected)


def _listed(value: Any) -> Any:
    """Return tensors, sets, tuples and ranges as lists, and other values as they are."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple | range) else value


def _short(value: Any) -> str:
    text = repr(_listed(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _show(question: Question) -> None:
    """Show the present state of a question: as HTML in a notebook, as text elsewhere."""
    if not in_notebook():
        print(question, flush=True)
        return
    from IPython.display import display

    display({"text/html": question._repr_html_(), "text/plain": str(question)}, raw=True)
