"""Questions on a student's own run: made here from the submitted code and the student's id.

The run is that of the submitted code; its calls went over the examiner's fabric. Which of its lines
makes a call, a rank says itself, and nothing can check that. A lie only changes this student's own
questions and the right answers to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from autograder.examination.submission import Submission, Taken
from course_lib.checking.asking import shown
from course_lib.checking.cases import Case, Check, Wrong
from course_lib.checking.defence import (
    SETS,
    Defence,
    Question,
    answers_to,
    named,
    numbers_of,
    parts_of,
)
from course_lib.ranks.explain.errors import RanksError


def asked(
    defence: Defence,
    about: Check,
    passed: bool,
    submission: Submission,
    function: Taken | None,
    student: str,
) -> Check:
    """Return the check with this student's questions as its cases.

    Args:
        defence: the check of the answers.
        about: the check of the task that is asked about.
        passed: whether the submission has all points of that task.
        submission: runs the task's solution for the questions.
        function: that solution, as the notebook handed it over.
        student: the student's id.

    Raises:
        MachineFailure: the machine failed.

    """
    if not passed:
        return _none(
            defence, f"questions are asked only about a {defence.of} that passes its check"
        )
    run = submission.runner(None, function)
    try:
        sets = [defence.questions(about, run, student, number)[2] for number in SETS]
        return with_questions(defence, sets)
    except Wrong as refusal:
        return _none(defence, refusal.message)
    except RanksError as error:
        return _none(
            defence, f"your {defence.of} fails in the case of your questions: {error.summary}"
        )


def with_questions(defence: Defence, sets: Sequence[Sequence[Question]]) -> Check:
    """Return a check whose cases are these sets of questions."""
    cases = []
    for i, versions in enumerate(zip(*sets, strict=True)):
        for part, last_set in zip(parts_of(i), reversed(SETS), strict=True):
            parameters = {"number": i, "asked": versions, "most": last_set}
            cases.append(Case(part, 1, parameters, decides=(part,)))
    return answers_to(defence.of, _judge, cases)


def _judge(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    number, answers = values[0]
    i = case.parameters["number"]
    question = case.parameters["asked"][number - 1]
    if answers[i] is None:
        raise Wrong(f"question {i + 1} has no answer")
    answer = numbers_of(answers[i])
    if not question.is_right(answer):
        raise Wrong(
            f"you answer {_shown(answer)}, but your own run shows {_shown(question.right)}. The "
            f"question: {question.text} The calls are: {'; '.join(map(named, question.calls))}."
        )
    if number > case.parameters["most"]:
        raise Wrong("the answer is right, and it is in the second set: half of the points")


def _shown(numbers: Iterable[float]) -> str:
    return ", ".join(map(shown, numbers))


def _none(defence: Defence, reason: str) -> Check:
    def refuse(case: Case, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        raise Wrong(reason)

    cases = (Case("your questions", 1),)
    return replace(defence, cases=cases, judge=refuse, only_form=False)
