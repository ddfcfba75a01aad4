"""Questions on a student's own run, which only who understands the code can answer in a minute.

The questions are about the trace of the student's solution in a case that is drawn for this
student. The grader draws the same case from the student's id, runs the submitted code and computes
the right answers from what it carried itself. Nothing that the notebook says counts.

An author writes which task is asked about, how a case is drawn, and which kinds of questions fit:

    "defend_data_parallel": defence(
        "data_parallel",
        drawn_chain,
        [bytes_handed_over("all_reduce"), time_waiting, half_the_bandwidth],
    )

A kind of question is a function of a `Run`, so a new one takes ten lines.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from course_lib.checking.answers import NUMBER, Kind, sees
from course_lib.checking.cases import Case, Check, Observed, Wrong, case_generator
from course_lib.checking.expectations import operations
from course_lib.checking.loading import find_check
from course_lib.checking.local import LocalRunner
from course_lib.checking.on_ranks.given import Given
from course_lib.checking.predictions import agrees, shown
from course_lib.checking.run_check import Runner
from course_lib.checking.task import task
from course_lib.ranks import Event, Network, Trace

QUESTIONS = 3
SETS = (1, 2)
"""A student answers the first set, or the second one for half of the points."""
NEARLY = 0.02
"""Relative error up to which an answer in microseconds is right."""


@dataclass(frozen=True)
class Run:
    """What the questions are about.

    Attributes:
        case: the case that was drawn.
        trace: the messages of the student's solution in it.
        on: runs the solution once more, on another network.

    """

    case: Case
    trace: Trace
    on: Callable[[Network], Trace]


@dataclass(frozen=True)
class Question:
    """A question whose answer is a number.

    Attributes:
        text: the question, with the unit of its answer.
        right: the answer.
        shows: what in the trace it comes from, for a student who was wrong.
        within: relative error up to which an answer is right.

    """

    text: str
    right: float
    shows: str
    within: float = 0.0


Asks = Callable[[Run, torch.Generator], Question]


@dataclass(frozen=True)
class Defence(Check):
    """A check whose cases are questions; in a notebook, it only looks at the form of the answers.

    Attributes:
        of: the task that is asked about.
        draw: draws a case of this task.
        asks: the kinds of questions, at least `QUESTIONS` of them.

    """

    of: str = ""
    draw: Callable[[torch.Generator], Case] = lambda _: Case("", 1)
    asks: tuple[Asks, ...] = ()

    def questions(
        self, about: Check, run: Runner, student: str, number: int
    ) -> tuple[Case, list[Question]]:
        """Run the student's solution in the student's case, and return the case and the questions.

        Args:
            about: the check of the task `of`.
            run: runs its cases with the student's solution.
            student: the student's id.
            number: which set.

        Raises:
            RanksError: the solution fails in this case.

        """
        seed = f"{unicodedata.normalize('NFC', student).strip().casefold()}, set {number}"
        generator = case_generator(seed, self.function, Case(self.of, 1))
        case = self.draw(generator)

        def on(network: Network) -> Trace:
            inputs = about.inputs(case, case_generator(seed, self.of, case))
            observed = run(about, replace(case, network=network), inputs)
            assert isinstance(observed, Observed) and observed.trace is not None
            return observed.trace

        found = Run(case, on(case.network), on)
        order = torch.randperm(len(self.asks), generator=generator).tolist()[:QUESTIONS]
        return case, [self.asks[i](found, generator) for i in order]

    def asked(self, about: Check, run: Runner, student: str) -> Check:
        """Return the check with the student's questions as its cases."""
        sets = [self.questions(about, run, student, number)[1] for number in SETS]
        return replace(self, cases=tuple(_cases(sets)))


def defence(of: str, draw: Callable[[torch.Generator], Case], asks: Sequence[Asks]) -> Defence:
    """Return the check of a task in which a student answers questions on the solution of `of`.

    The student's function is ``defend_…()``. It returns the number of the set, 1 or 2, and a list
    of three numbers.
    """
    check = task(
        f"defend_{of}",
        inputs=lambda case, generator: [{}],
        program=_answer,
        judges=[_right_answers],
        cases=[Case("the form of the answers; the grader judges the numbers", 1)],
        worth={part: 1.0 for i in range(QUESTIONS) for part in _parts(i)},
    )
    return Defence(**vars(check), of=of, draw=draw, asks=tuple(asks))


def _parts(i: int) -> tuple[str, str]:
    return f"question {i + 1}", f"question {i + 1} in set 1"


def _cases(sets: Sequence[Sequence[Question]]) -> list[Case]:
    cases = []
    for i, questions in enumerate(zip(*sets, strict=True)):
        for part, most in zip(_parts(i), (SETS[-1], SETS[0]), strict=True):
            asked = {"number": i, "questions": questions, "most": most}
            cases.append(Case(part, 1, asked, decides=(part,)))
    return cases


def _answer(answers: Callable[[], Any], own: Any, given: Given) -> Any:
    return answers()


def _is_answers(value: Any) -> bool:
    match value:
        case [int() as number, [*answers]]:
            written = all(each is None or NUMBER.test(each) for each in answers)
            return number in SETS and len(answers) == QUESTIONS and written
    return False


_ANSWERS = Kind("the set, 1 or 2, and a list of three numbers: (1, [96, 3, 12.5])", _is_answers)


@sees(_ANSWERS)
def _right_answers(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    number, answers = values[0]
    if not case.parameters:
        if None in answers:
            raise Wrong(f"answer {answers.index(None) + 1} is not written yet")
        return
    i = case.parameters["number"]
    question, answer = case.parameters["questions"][number - 1], answers[i]
    if answer is None:
        raise Wrong(f"question {i + 1} has no answer")
    if not agrees(float(answer), question.right, max(question.within, 1e-9)):
        raise Wrong(
            f"you answer {shown(float(answer))}, but your own run shows {shown(question.right)}. "
            f"The question: {question.text} {question.shows}"
        )
    if number > case.parameters["most"]:
        raise Wrong("the answer is right, and it is in the second set: half of the points")


def defend(
    name: str, function: Callable[..., Any], student: str | None = None, *, draw: int = 1
) -> None:
    """Print three questions on your own solution. Write your answers where the task says.

    Args:
        name: the task, for example ``05_bucketing_and_overlap/data_parallel``.
        function: your solution; it should pass its check.
        student: your id, as your course knows it: the grader asks the same questions. Without an
            id the questions are for practice, and their answers are printed below them.
        draw: the set: 1, or 2 for half of the points. For practice, any number.

    Raises:
        LookupError: there are no questions on this task.
        RanksError: your solution fails in the case that was drawn.

    """
    full, about = find_check(name)
    assignment, _, short = full.partition("/")
    _, check = find_check(f"{assignment}/defend_{short}")
    assert isinstance(check, Defence)
    if student is not None and draw not in SETS:
        raise ValueError(f"there are sets {SETS[0]} and {SETS[-1]}, got draw={draw}")
    with LocalRunner(function, "simulated", echo=None) as run:
        case, questions = check.questions(about, run, student or "practice", draw)
    print(f"Questions for {student or 'practice'}, set {draw}, on your {short}:\n{case.name}")
    for i, question in enumerate(questions, 1):
        print(f"{i}. {question.text}")
    if student is None:
        for i, question in enumerate(questions, 1):
            print(f"   answer {i}: {shown(question.right)}. {question.shows}")


# Kinds of questions -----------------------------------------------------------------------------


def bytes_handed_over(*kinds: str) -> Asks:
    """Ask for the bytes of one of a rank's operations of these kinds, by default of all kinds."""

    def asks(run: Run, generator: torch.Generator) -> Question:
        rank = _number(run.case.world_size, generator)
        events = operations(run.trace, rank, kinds or None)
        i = _number(len(events), generator)
        named = " or ".join(kinds) or "communication"
        return Question(
            f"Number {i + 1} of the {named} calls of rank {rank}: how many bytes has its tensor?",
            events[i].bytes,
            f"It is {_named(events[i])}.",
        )

    return asks


def computed_before(kind: str) -> Asks:
    """Ask how long a rank had computed when it launched one of its operations."""

    def asks(run: Run, generator: torch.Generator) -> Question:
        rank = _number(run.case.world_size, generator)
        events = operations(run.trace, rank, [kind])
        i = _number(len(events), generator)
        spent = _computed(run.trace, rank, events[i].start)
        return Question(
            f"Rank {rank} launches its {kind} number {i + 1}. How many µs has it computed before?",
            1e6 * spent,
            f"It is {_named(events[i])}, launched at {1e6 * events[i].start:.4g} µs.",
            NEARLY,
        )

    return asks


def end_of_operation(run: Run, generator: torch.Generator) -> Question:
    """Ask when one of a rank's operations ends."""
    rank = _number(run.case.world_size, generator)
    events = operations(run.trace, rank)
    i = _number(len(events), generator)
    return Question(
        f"When does communication call number {i + 1} of rank {rank} end, in µs from the first "
        "start?",
        1e6 * events[i].end,
        f"It is {_named(events[i])}, from {1e6 * events[i].start:.4g} µs on.",
        NEARLY,
    )


def time_waiting(run: Run, generator: torch.Generator) -> Question:
    """Ask how long a rank computes nothing before its last operation ends."""
    rank = _number(run.case.world_size, generator)
    end = max(event.end for event in run.trace.events if event.rank == rank)
    spent = _computed(run.trace, rank, end)
    return Question(
        f"How many µs does rank {rank} only wait, until its last operation has ended?",
        1e6 * (end - spent),
        f"It ends at {1e6 * end:.4g} µs and computes for {1e6 * spent:.4g} µs.",
        NEARLY,
    )


def half_the_bandwidth(run: Run, generator: torch.Generator) -> Question:
    """Ask when the last rank ends if the network has half of the bandwidth."""
    network = run.case.network
    slower = run.on(replace(network, bandwidth=network.bandwidth / 2))
    return Question(
        "When does the last rank end, in µs from the first start, if the bandwidth is halved?",
        1e6 * slower.makespan,
        f"With the whole bandwidth it ends at {1e6 * run.trace.makespan:.4g} µs.",
        NEARLY,
    )


def sent_in_all(run: Run, generator: torch.Generator) -> Question:
    """Ask how many bytes a rank sends in messages."""
    rank = _number(run.case.world_size, generator)
    events = operations(run.trace, rank, ["send"])
    return Question(
        f"How many bytes does rank {rank} send in all its messages together?",
        sum(event.bytes for event in events),
        f"It sends {len(events)} messages: {_sizes(events)}.",
    )


def _named(event: Event) -> str:
    where = f" ({event.where})" if event.where else ""
    return f"{event.kind}, {event.bytes} B{where}"


def _sizes(events: Sequence[Event]) -> str:
    return ", ".join(f"{event.bytes} B to rank {event.peer}" for event in events[:8])


def _computed(trace: Trace, rank: int, until: float) -> float:
    """Return the seconds that a rank has computed until this time."""
    return sum(
        min(event.end, until) - event.start
        for event in trace.events
        if event.kind == "compute" and event.rank == rank and event.start < until
    )


def drawn_network(generator: torch.Generator) -> tuple[Network, str]:
    """Draw a network on which small tensors take time; return it, and in words."""
    network = Network(
        latency=1e-6 * one_of(generator, 2, 3, 5), bandwidth=1e6 * one_of(generator, 40, 50, 80)
    )
    return network, (
        f"A message takes {1e6 * network.latency:.0f} µs + bytes / "
        f"({1e-6 * network.bandwidth:.0f} MB/s)"
    )


def one_of(generator: torch.Generator, *values: Any) -> Any:
    """Draw one of the values."""
    return values[_number(len(values), generator)]


def _number(below: int, generator: torch.Generator) -> int:
    return int(torch.randint(below, (), generator=generator))
