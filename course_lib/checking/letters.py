"""Questions with a letter for an answer: program and judges, which do not hold the letters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from course_lib.checking.answers import Kind, sees
from course_lib.checking.cases import Case, Expectation, Observed, Wrong
from course_lib.checking.judges import Judge
from course_lib.checking.on_ranks.given import Given
from course_lib.ranks import Trace


def answers_program(answer: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Ask for the answers, a dict from question to letter."""
    answers = answer()
    if not isinstance(answers, dict):
        said = f"the answer is {type(answers).__name__} {answers!r:.40}"
        raise TypeError(f"{said}, expected a dict from question to letter")
    for question, letter in answers.items():
        if not isinstance(question, str) or not isinstance(letter, str):
            told = f"{question!r:.40}: {letter!r:.40}"
            raise TypeError(f"the answers have {told}, expected texts, as in 'exhibit_1': 'A'")
    return {"answers": answers}


def _is_dict_of_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(letter, str) for letter in value.values())


def are_letters(questions: Sequence[str], choices: Mapping[str, str]) -> Judge:
    """Judge that each of the questions has one of the letters that are the keys of `choices`."""
    letters = list(choices)

    @sees({"answers": Kind("a dict from question to letter", _is_dict_of_texts)})
    def judge(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
        for value in values:
            answers = value["answers"]
            if set(answers) != set(questions):
                raise Wrong(
                    f"the answers are for {', '.join(map(str, answers)) or 'nothing'}, expected "
                    f"one for each of {', '.join(questions)}"
                )
            for question, letter in answers.items():
                if letter not in letters:
                    raise Wrong(
                        f"{question}: {letter!r:.40} is none of the letters {letters[0]} to "
                        f"{letters[-1]}"
                    )

    return judge


def digest(question: str, letter: str) -> str:
    """Return the digest of an answer: to spare people its sight, not to keep a secret."""
    return hashlib.sha256(f"diagnosis of {question}: {letter}".encode()).hexdigest()[:12]


def is_right(question: str, right: str, choices: Mapping[str, str], hint: str) -> Expectation:
    """Expect the letter with this digest; the question's points are a part of their own."""

    def test(case: Case, observed: Observed, trace: Trace) -> None:
        letter = observed.outputs[0]["value"]["answers"][question]
        if digest(question, letter) != right:
            raise Wrong(f"{question}: not {letter} ({choices[letter]})", hint)

    return Expectation(test, question)
