"""Guesses: a choice among a few options; the run below it shows which option is right.

    idle = guess("four ranks, four micro-batches: what share of the time is idle?",
                 {"none": 0.0, "a quarter of the 75 %": 0.75 / 4, "43 %": 3 / 7},
                 mine=None)  # put the number of your option
    …                                                     # the run
    idle.score(simulate(gpipe(4, 4)).bubble, why=["…", "…", "…"])

Each option stands for a way of thinking, and gives the value that the run would show if the option
were right. No page states which option is right: the measured value decides, even after a reader
has changed the numbers above. As with `predict`, the first guess counts, and ``None`` means that
there is no guess yet. On the student's desk, each guess and each score is a line of
``predictions.jsonl``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from course_lib import diary
from course_lib.checking.predictions import FILE, agrees, plain, shown

Rule = float | str | Callable[[Any], object]
"""The value that a run shows if an option is right, or a function that tests the run's value."""
HOW_TO_GUESS = "Put the number of your option in place of None, as in mine=2."
_locked: dict[str, int] = {}
# The selectors begin with an element. Otherwise JupyterLab's own rules for output would win.
_STYLE = """<style>
div.course-guess { border-left: 3px solid var(--jp-brand-color1, #4a90d9); line-height: 1.45;
  color: var(--jp-content-font-color1, var(--pst-color-text-base, inherit));
  margin: .3em 0; max-width: 60em; padding: .1em 0 .1em .9em; }
div.course-guess p { margin: .3em 0; }
div.course-guess ol { margin: .3em 0; padding-left: 1.8em; }
div.course-guess li { margin: .25em 0; }
div.course-guess li.good::marker, div.course-guess span.good {
  color: var(--jp-success-color1, #388e3c); font-weight: bold; }
div.course-guess span.bad { color: var(--jp-error-color1, #e04848); font-weight: bold; }
div.course-guess .mine { border: 1px solid currentColor; border-radius: .6em; font-size: .85em;
  padding: 0 .5em; white-space: nowrap; }
div.course-guess .why { display: block; opacity: .85; }
div.course-guess summary { cursor: pointer; }
div.course-guess code { background: #8882; padding: .1em .4em; }
</style>"""


class Guess:
    """A question with numbered options, and the reader's guess.

    Attributes:
        question: the text of the question.
        options: the texts of the options.
        mine: the number of the guessed option, from 1 on; ``None``: no guess.
        actual: the value that the run showed, once it is known; else ``None``.

    """

    def __init__(self, question: str, choices: Mapping[str, Rule], mine: int | None) -> None:
        self.question = question
        self.options = tuple(choices)
        self.mine = mine
        self.actual: float | str | None = None
        self._rules = tuple(choices.values())
        self._why: Sequence[str] = ()
        self._holds: tuple[bool, ...] = ()

    def score(self, actual: Any, *, why: Sequence[str] = (), within: float = 0.05) -> Guess:
        """Decide by the run's value which option is right; show the guess, and record the result.

        Args:
            actual: the run's value: a number, a tensor of one element, or a text.
            why: a sentence for each option, in their order: why a wrong option is tempting, or why
                a right option holds. Those of the lectures are in reasons.json, because they would
                give the answer away in the source.
            within: relative error up to which a number counts as equal to the number of an option.

        Raises:
            ValueError: `why` does not have one sentence for each option.

        """
        if why and len(why) != len(self.options):
            raise ValueError(
                f"why must have one reason for each of the {len(self.options)} options, got "
                f"{len(why)}"
            )
        self.actual, self._why = plain(actual), why or _reasons().get(self.question, ())
        self._holds = tuple(
            bool(rule(self.actual)) if callable(rule) else agrees(rule, self.actual, within)
            for rule in self._rules
        )
        if self.right is not None:
            entry = {"actual": self.actual, "right": self.right, "of": len(self.options)}
            diary.keep(FILE, {"scored": self.question, **entry})
        _show(self)
        return self

    @property
    def right(self) -> bool | None:
        """Whether the guess was right; ``None`` without a guess, a run, or a right option."""
        if self.mine is None or not any(self._holds):
            return None
        return self._holds[self.mine - 1]

    def _verdict(self) -> str:
        """Return the state of the guess, or its result, in words."""
        if self.actual is None:
            if self.mine is None:
                return HOW_TO_GUESS
            return f"Your guess, option {self.mine}, is locked. The run below shows the answer."
        held = [str(i) for i, holds in enumerate(self._holds, 1) if holds]
        answer = f"The run shows {shown(self.actual)}: "
        if len(held) > 1:
            answer += f"options {' and '.join(held)} are right."
        else:
            answer += f"option {held[0]} is right." if held else "no option says that."
        if self.right is None:
            return answer
        return f"{answer} You guessed option {self.mine}: {'right' if self.right else 'not right'}."

    def __repr__(self) -> str:
        return f"<Guess {self.mine or 'not made yet'}: {self.question}>"

    def __str__(self) -> str:
        lines = [self.question]
        for i, option in enumerate(self.options, 1):
            mark = ("✓ " if self._holds[i - 1] else "✗ ") if any(self._holds) else ""
            lines.append(f"  {mark}{i}. {option}{'  ← your guess' if i == self.mine else ''}")
            lines += [f"       {self._why[i - 1]}"] if self._why else []
        return "\n".join([*lines, self._verdict()])

    def _ipython_display_(self) -> None:
        """Show nothing as a cell's value, because `guess` and `score` have already shown it."""

    def _repr_html_(self) -> str:
        """Return the guess as HTML for a notebook; without a guess, the answer stays folded."""
        body = f"<p><strong>{escape(self.question)}</strong></p><ol>{self._items()}</ol>"
        body += f"<p>{escape(self._verdict())}</p>"
        if self.actual is not None and self.mine is None:
            asked = f"Answered by the run: <em>{escape(self.question)}</em>"
            body = f"<details><summary>{asked}</summary>{body}</details>"
        # Both classes prevent a dollar sign from being read as the start of a formula.
        kept = "course-guess tex2jax_ignore mathjax_ignore"
        return f'{_STYLE}<div class="{kept}">{body}</div>'

    def _items(self) -> str:
        items = []
        for i, option in enumerate(self.options, 1):
            good = any(self._holds) and self._holds[i - 1]
            mark = f'<span class="{"good" if good else "bad"}">{"✓" if good else "✗"}</span> '
            text = f"{mark if any(self._holds) else ''}{escape(option)}"
            text += ' <span class="mine">your guess</span>' if i == self.mine else ""
            text += f'<span class="why">{escape(self._why[i - 1])}</span>' if self._why else ""
            items.append(f"<li{' class=good' if good else ''}>{text}</li>")
        return "".join(items)


@cache
def _reasons() -> dict[str, list[str]]:
    """Return the lectures' questions with a reason for each option."""
    text = Path(__file__).with_name("reasons.json").read_text(encoding="utf-8")
    return {question: why for page in json.loads(text).values() for question, why in page.items()}


def guess(
    question: str, choices: Mapping[str, Rule] | Sequence[float | str], mine: int | None = None
) -> Guess:
    """Show a question with numbered options, and lock the guessed option; the first guess counts.

    Args:
        question: what is asked; a second guess at the same question does not count.
        choices: the text of each option → the value that the run shows if the option is right: a
            number, a text, or a function that is true for the run's value. In a list, each value
            is also the option's text.
        mine: the number of the guessed option, from 1 on; ``None``: no guess yet.

    If no option has the number `mine`, this prints which numbers there are, and locks nothing.

    Raises:
        ValueError: there are fewer than two options.

    """
    options = choices if isinstance(choices, Mapping) else {shown(each): each for each in choices}
    if len(options) < 2:
        raise ValueError(f"a guess needs two options or more, got {len(options)}")
    if mine is not None and (type(mine) is not int or not 1 <= mine <= len(options)):
        print(f"mine={mine!r} is no option. Put a number from 1 to {len(options)}, as in mine=2.")
        mine = None
    first = _locked.get(question, mine)
    made = Guess(question, options, first)
    if mine is not None and question not in _locked:
        _locked[question] = mine
        entry = {"guess": made.options[mine - 1], "of": len(options)}
        diary.keep(FILE, {"predicted": question, **entry})
    _show(made)
    if mine is not None and mine != first:
        print(f"Your first guess counts: {first}.")
    return made


def _show(made: Guess) -> None:
    """Show the present state of a guess: as HTML in a notebook, as text elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        print(made, flush=True)
        return
    from IPython.display import display

    display({"text/html": made._repr_html_(), "text/plain": str(made)}, raw=True)
