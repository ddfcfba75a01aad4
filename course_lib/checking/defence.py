"""Questions on the lines of a student's own code, which nobody can answer without reading it.

The questions are about the trace of the student's solution in a case that is drawn for this
student. The grader draws the same case from the student's id, runs the submitted code and computes
the right answers from what it carried itself. Nothing that the notebook says counts, and nothing
here knows an answer: `autograder.examination.defence` does, where no student's code is.

An author writes which task is asked about, and how a case is drawn:

    "defend_data_parallel": defence("data_parallel", drawn_chain)

A kind of question is a function of a `Trace`, so a new one takes ten lines, and one for its answer.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from course_lib.checking.answers import describe, is_number
from course_lib.checking.cases import Case, Check, Observed, Wrong, case_generator
from course_lib.checking.communication import operations
from course_lib.checking.judges import Test, by_judge
from course_lib.checking.loading import find_check
from course_lib.checking.local import LocalRunner
from course_lib.checking.run_check import Runner
from course_lib.ranks import Event, Network, Trace

QUESTIONS = 3
SETS = (1, 2)
"""A student answers the first set, or the second one for half of the points."""
_AT_ONCE = 3
"""For how many calls a question asks: one line alone would be easy to guess or to copy."""


@dataclass(frozen=True)
class Question:
    """A question whose answer is a number, or a few of them; what its text says, and no more.

    Attributes:
        text: the question, with the unit of its answer.
        asks: what is asked of each of the calls: its ``bytes``, its ``end``, the ``lines`` that
            make it, or those of the first call ``after`` its end, or of the last one ``before`` a
            time.
        rank: whose calls.
        about: the calls, counted from 0 as in `calls_of`; for ``before``, the times in seconds.
        functions: the functions whose lines are asked for.

    """

    text: str
    asks: Literal["bytes", "end", "lines", "after", "before"]
    rank: int
    about: tuple[float, ...]
    functions: tuple[str, ...] = ()


Asks = Callable[[Trace, torch.Generator], Question]


@dataclass(frozen=True)
class Defence(Check):
    """A check whose cases are questions; in a notebook, it only looks at the form of the answers.

    Attributes:
        of: the task that is asked about.
        draw: draws a case of this task, and the ranks' inputs in it.

    """

    of: str = ""
    draw: Callable[[torch.Generator], tuple[Case, Sequence[Any]]] = lambda _: (Case("", 1), [])

    def questions(
        self, about: Check, run: Runner, student: str, number: int
    ) -> tuple[Case, Trace, list[Question]]:
        """Run the student's solution in the student's case; return case, trace and questions.

        Args:
            about: the check of the task `of`.
            run: runs its cases with the student's solution.
            student: the student's id; empty: for practice.
            number: which set.

        Raises:
            RanksError: the solution fails in this case.
            Wrong: no named function of the student communicates in it.

        """
        seed = f"{unicodedata.normalize('NFC', student).strip().casefold()}, set {number}"
        seed = seed if student else f"practice {number}"  # no id gives this seed
        generator = case_generator(seed, self.function, Case(self.of, 1))
        case, own_inputs = self.draw(generator)
        observed = run(about, case, case.given(own_inputs, 0))
        assert isinstance(observed, Observed) and observed.trace is not None
        kinds = kinds_for(observed.trace)
        order = torch.randperm(QUESTIONS, generator=generator).tolist()
        return case, observed.trace, [kinds[i](observed.trace, generator) for i in order]


def defence(of: str, draw: Callable[[torch.Generator], tuple[Case, Sequence[Any]]]) -> Defence:
    """Return the check of a task in which a student answers questions on the solution of `of`.

    The student's function is ``defend_…()``. It returns the number of the set, 1 or 2, and a list
    of three answers: numbers, or lists of them.
    """
    form = Case("the form of the answers", 1)
    check = answers_to(of, _all_written, [form])
    return Defence(**{**vars(check), "only_form": True}, of=of, draw=draw)


def answers_to(of: str, judge: Test, cases: Sequence[Case]) -> Check:
    """Return the check of the answers about `of`; the judge sees only those in the right form."""

    def judged(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
        if not _is_answers(values[0]):
            raise Wrong(f"the answer is {describe(values[0])}, expected {FORM}")
        judge(case, inputs, values)

    return by_judge(
        f"defend_{of}",
        inputs=lambda case, generator: [{}],
        program=lambda answers, inputs, case: answers(),
        judge=judged,
        cases=cases,
        worth={part: 1.0 for i in range(QUESTIONS) for part in parts_of(i)},
    )


def parts_of(i: int) -> tuple[str, str]:
    """Return the parts of the points that the answer to question `i`, from 0, earns."""
    return f"question {i + 1}", f"question {i + 1} in set 1"


def _is_answers(value: Any) -> bool:
    match value:
        case [int() as number, [*answers]]:
            written = all(map(is_number, itertools.chain(*map(numbers_of, answers))))
            return number in SETS and len(answers) == QUESTIONS and written
    return False


def numbers_of(answer: Any) -> list[Any]:
    """Return the numbers of an answer: none if it is not written yet."""
    match answer:
        case None:
            return []
        case [*numbers]:
            return numbers
    return [answer]


FORM = "the set, 1 or 2, and a list of three answers: (1, [[4, 4, 9], [7, 3], 12.5])"


def _all_written(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    _, answers = values[0]
    if None in answers:
        raise Wrong(f"answer {answers.index(None) + 1} is not written yet")


def defend(
    name: str, function: Callable[..., Any], student: str | None = None, *, draw: int = 1
) -> None:
    """Print three questions on your own solution. Write your answers where the task says.

    Args:
        name: the task, for example ``05_bucketing_and_overlap/data_parallel``.
        function: your solution; it should pass its check.
        student: your id, as your course knows it: the grader asks the same questions. Without an
            id the questions are for practice, and the run that answers them is printed below.
        draw: the set: 1, or 2 for half of the points. For practice, any number.

    Raises:
        LookupError: there are no questions on this task.
        RanksError: your solution fails in the case that was drawn.
        Wrong: no function that you wrote with ``def`` communicates in it.

    """
    full, about = find_check(name)
    assignment, _, short = full.partition("/")
    _, check = find_check(f"{assignment}/defend_{short}")
    assert isinstance(check, Defence)
    if student is not None and draw not in SETS:
        raise ValueError(f"there are sets {SETS[0]} and {SETS[-1]}, got draw={draw}")
    with LocalRunner(function, "simulated", echo=None) as run:
        case, trace, questions = check.questions(about, run, student or "", draw)
    print(f"Questions for {student or 'practice'}, set {draw}, on your {short}:")
    print(f"{case.name}\n{WORDS}")
    for i, question in enumerate(questions, 1):
        print(f"{i}. {question.text}")
    for rank in sorted({question.rank for question in questions}) if student is None else ():
        print(f"The answers are in the calls of rank {rank} in this run:")
        for i, call in enumerate(calls_of(trace, rank), 1):
            print(f"   {i}. {named(call)}")


# Kinds of questions -----------------------------------------------------------------------------

WORDS = """\
The calls of a rank are its calls of torch.distributed, counted from 1; isend and irecv are two.
A line makes a call also if the call is in a function that the line calls.
Line 1 is the first line of the function that is named. A call over several lines is on its first.
Answer [4, 7, 4] if line 4 makes the first one asked for, line 7 the second and line 4 the third.\
"""
"""What the questions mean, for all of them together."""


def kinds_for(trace: Trace) -> tuple[Asks, Asks, Asks]:
    """Return the kinds of questions to ask.

    If the same lines make all calls, only one question asks for lines: a neighbour who wrote the
    same code has the same answer.
    """
    if _alike(event for event in trace.operations if event.lines):
        return lines_of_calls, bytes_of_call, end_of_call
    return lines_of_calls, lines_after_calls, lines_before


def lines_of_calls(trace: Trace, generator: torch.Generator) -> Question:
    """Ask which lines make some of a rank's calls."""
    rank, calls = _drawn(trace, generator)
    functions, chosen = _chosen(calls, generator)
    calls_in_words = f"{_in_words(f'call {i + 1}' for i in chosen)} of rank {rank}"
    return Question(_which_lines(functions, calls_in_words), "lines", rank, chosen, functions)


def lines_after_calls(trace: Trace, generator: torch.Generator) -> Question:
    """Ask which lines make the first calls that are launched when earlier ones have ended."""
    rank, calls = _drawn(trace, generator)
    after = {
        i: next(later for later in calls if later.start >= call.end)
        for i, call in enumerate(calls)
        if call.end <= calls[-1].start
    }
    if _alike(after.values()):
        return lines_of_calls(trace, generator)
    functions, chosen = _chosen([*after.values()], generator)
    ended = tuple(list(after)[i] for i in chosen)
    ends = _in_words(f"of call {i + 1}" for i in ended)
    calls_in_words = f"the first call that rank {rank} starts after the end {ends}"
    return Question(_which_lines(functions, calls_in_words), "after", rank, ended, functions)


def lines_before(trace: Trace, generator: torch.Generator) -> Question:
    """Ask which lines make the last calls that a rank starts before some times."""
    rank, calls = _drawn(trace, generator)
    until = [*(call.start for call in calls[1:]), calls[-1].end]
    last = [i for i, call in enumerate(calls) if call.start < until[i]]
    if _alike(calls[i] for i in last):
        return lines_of_calls(trace, generator)
    functions, chosen = _chosen([calls[i] for i in last], generator)
    times = tuple((calls[last[i]].start + until[last[i]]) / 2 for i in chosen)
    limits = _in_words(f"before {1e6 * time:.4g} µs" for time in times)
    calls_in_words = f"the last call that rank {rank} starts {limits}, from the first start on"
    return Question(_which_lines(functions, calls_in_words), "before", rank, times, functions)


def _alike(calls: Iterable[Event]) -> bool:
    """Return whether the same lines make all these calls."""
    return len({call.lines for call in calls}) < 2


def _chosen(
    calls: Sequence[Event], generator: torch.Generator
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Draw functions of which one makes each call, and up to three places of calls they make.

    They are one function, or all functions at one depth, such as a hook and ``finish`` that both
    call the same helper. Never are two of them running at once, so every call has one line. Those
    whose lines differ are preferred.
    """
    depth = min(len(call.lines) for call in calls)
    groups: set[tuple[str, ...]] = {(name,) for call in calls for name, _ in call.lines}
    groups |= {tuple(sorted({call.lines[i][0] for call in calls})) for i in range(-depth, depth)}
    lines = {group: [lines_in(call, group) for call in calls] for group in sorted(groups)}
    clear = [group for group in lines if all(len(call_lines) < 2 for call_lines in lines[group])]
    differing = [group for group in clear if len({*itertools.chain(*lines[group])}) > 1]
    group: tuple[str, ...] = one_of(generator, *(differing or clear))
    places = [i for i, call_lines in enumerate(lines[group]) if call_lines]
    order = torch.randperm(len(places), generator=generator).tolist()
    return group, tuple(places[i] for i in order[:_AT_ONCE])


def lines_in(call: Event, functions: Collection[str]) -> list[int]:
    """Return the lines of these functions that make a call."""
    return [line for name, line in call.lines if name in functions]


def _which_lines(functions: Sequence[str], calls_in_words: str) -> str:
    names = " or ".join(f"`{name}`" for name in functions)
    return f"Which lines of {names} make {calls_in_words}?"


def _in_words(phrases: Iterable[str]) -> str:
    *first, last = phrases
    return f"{', '.join(first)} and {last}" if first else last


def bytes_of_call(trace: Trace, generator: torch.Generator) -> Question:
    """Ask how many bytes one of a rank's calls has."""
    i, rank, call = _one_call(trace, generator)
    text = f"How many bytes has {call}? A recv has those that it receives."
    return Question(text, "bytes", rank, (i,))


def end_of_call(trace: Trace, generator: torch.Generator) -> Question:
    """Ask when one of a rank's calls ends."""
    i, rank, call = _one_call(trace, generator)
    return Question(f"When does {call} end, in µs from the first start?", "end", rank, (i,))


def _one_call(trace: Trace, generator: torch.Generator) -> tuple[int, int, str]:
    """Draw one of a rank's calls; return its number, the rank, and the call in words."""
    rank, calls = _drawn(trace, generator)
    i = _number(len(calls), generator)
    return i, rank, f"call {i + 1} of rank {rank}"


def _drawn(trace: Trace, generator: torch.Generator) -> tuple[int, list[Event]]:
    """Draw a rank, and return its calls that functions of the student make, as launched."""
    rank = _number(trace.world_size, generator)
    calls = calls_of(trace, rank)
    if not calls:
        raise Wrong(
            f"rank {rank} makes no call of torch.distributed in a function that a cell of your "
            "notebook defines with def, so there is nothing to ask"
        )
    return rank, calls


def calls_of(trace: Trace, rank: int) -> list[Event]:
    """Return a rank's calls that functions of the student make, as launched."""
    calls = (event for event in operations(trace, rank) if event.lines)
    return sorted(calls, key=lambda call: (call.start, call.turn))


def named(call: Event) -> str:
    """Return a call in words."""
    lines = ", ".join(f"line {line} of {name}" for name, line in call.lines)
    times = f"from {1e6 * call.start:.4g} to {1e6 * call.end:.4g} µs"
    return f"{call.kind}, {call.bytes} B, {times} ({lines})"


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
