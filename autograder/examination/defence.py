"""Questions on a student's own run: made here from the submitted code and the student's id.

The right answers are computed here, outside the sandbox, and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from autograder.examination.submission import Submission, Taken
from course_lib.checking.asking import agrees, shown
from course_lib.checking.cases import Case, Check, Observed, Wrong
from course_lib.checking.defence import (
    QUESTIONS,
    SETS,
    Defence,
    Question,
    answers_to,
    calls_of,
    lines_in,
    named,
    numbers_of,
    parts_of,
)
from course_lib.ranks.explain.errors import RanksError
from course_lib.ranks.trace.trace import Trace

NEARLY = 0.02
"""Relative error up to which an answer in microseconds is right."""
_DEF = re.compile(r"\bdef\s+(\w+)")


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
    runner = submission.runner(None, function)

    def run(check: Check, case: Case, inputs: Sequence[Any]) -> Observed:
        observed = runner(check, case, inputs)
        assert isinstance(observed, Observed) and observed.trace is not None
        return replace(observed, trace=_believed(observed.trace, submission.sources))

    try:
        sets = [defence.questions(about, run, student, number)[1:] for number in SETS]
        return with_questions(defence, sets)
    except Wrong as refusal:
        return _none(defence, refusal.message)
    except RanksError as error:
        return _none(
            defence, f"your {defence.of} fails in the case of your questions: {error.summary}"
        )


def with_questions(defence: Defence, sets: Sequence[tuple[Trace, Sequence[Question]]]) -> Check:
    """Return a check whose cases are these sets of questions, each on its trace."""
    cases = []
    for i in range(QUESTIONS):
        asked_by_set = [
            (questions[i], *answer_to(questions[i], trace)) for trace, questions in sets
        ]
        for part, last_set in zip(parts_of(i), (SETS[-1], SETS[0]), strict=True):
            parameters = {"number": i, "asked": asked_by_set, "most": last_set}
            cases.append(Case(part, 1, parameters, decides=(part,)))
    return answers_to(defence.of, _judge, cases)


def answer_to(question: Question, trace: Trace) -> tuple[list[float], str]:
    """Return the numbers of the right answer, and in words which calls they come from."""
    calls, about = calls_of(trace, question.rank), question.about
    match question.asks:
        case "after":
            ends = [calls[int(i)].end for i in about]
            chosen_calls = [next(call for call in calls if call.start >= end) for end in ends]
        case "before":
            chosen_calls = [[call for call in calls if call.start < time][-1] for time in about]
        case _:
            chosen_calls = [calls[int(i)] for i in about]
    right: list[float]
    match question.asks:
        case "bytes":
            right = [call.bytes for call in chosen_calls]
        case "end":
            right = [1e6 * call.end for call in chosen_calls]
        case _:
            right = [line for call in chosen_calls for line in lines_in(call, question.functions)]
    return right, f"The calls are: {'; '.join(map(named, chosen_calls))}."


def is_right(question: Question, right: Sequence[float], answer: Sequence[float]) -> bool:
    """Return whether these numbers answer the question."""
    near = NEARLY if question.asks == "end" else 1e-9
    return len(answer) == len(right) and all(
        agrees(float(number), target, near) for number, target in zip(answer, right, strict=True)
    )


def _judge(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    number, answers = values[0]
    i = case.parameters["number"]
    question, right, shows = case.parameters["asked"][number - 1]
    if answers[i] is None:
        raise Wrong(f"question {i + 1} has no answer")
    answer = numbers_of(answers[i])
    if not is_right(question, right, answer):
        raise Wrong(
            f"you answer {_shown(answer)}, but your own run shows {_shown(right)}. "
            f"The question: {question.text} {shows}"
        )
    if number > case.parameters["most"]:
        raise Wrong("the answer is right, and it is in the second set: half of the points")


def _shown(numbers: Iterable[float]) -> str:
    return ", ".join(map(shown, numbers))


def _believed(trace: Trace, sources: Sequence[str]) -> Trace:
    """Return the trace with only the lines that a submitted function can have.

    A student's process says itself which of its lines runs, and nothing here can check that. A lie
    only changes this student's own questions, or the right answers to them; no other student and
    no other task depends on it. A line that is in no submitted function is nothing to ask about.
    """
    cells = [(set(_DEF.findall(source)), 1 + source.count("\n")) for source in sources]

    def exists(function: str, line: int) -> bool:
        name = function.rpartition(".")[2]
        return any(name in names and line <= length for names, length in cells)

    events = [
        event._replace(lines=tuple(pair for pair in event.lines if exists(*pair)))
        for event in trace.events
    ]
    return Trace(events, trace.world_size, network=trace.network)


def _none(defence: Defence, reason: str) -> Check:
    def refuse(case: Case, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        raise Wrong(reason)

    cases = (Case("your questions", 1),)
    return replace(defence, cases=cases, judge=refuse, only_form=False)
