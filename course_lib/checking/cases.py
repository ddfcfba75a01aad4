"""A check is data: cases, a program that runs on every rank, a judge, and expectations.

The parts run in different places, and only plain values (tensors, numbers, text, lists and dicts
of them) pass between them:

    inputs(case, generator)   where the verdict is made: draws one input per rank
    program(function, own)   on every rank: calls the student's function with this rank's input
    judge(case, inputs, outputs)   where the verdict is made: raises `Wrong` if a value is wrong
    expects   where the verdict is made: look at what was sent, not at the values

So the same check runs in a notebook and in the autograder. In the autograder, each rank is in a
sandbox that never sees another rank's input, an expected value or a hidden case. `by_reference`
and `by_judge` make checks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from course_lib.checking.on_ranks.given import without
from course_lib.limits import CASE_SECONDS
from course_lib.ranks import Network, Trace
from course_lib.ranks.wire import Plain

NETWORK = Network(latency=20e-6, bandwidth=10e9)
"""The network of a check on simulated ranks, here and in the grader: 20 µs and 10 GB/s. A send
waits for its receive, so a program that may deadlock always does."""

VALUES, COMMUNICATION = "values", "communication"


class AuthorError(RuntimeError):
    """A check itself is broken, so no student may lose points for it."""


class Wrong(Exception):
    """A judge's finding: what is wrong, and a hint about the likely mistake.

    Attributes:
        message: which rank, which element, expected and got.
        mistakes: a known mistake that could be the reason → its hint if the finding looks like it,
            else empty.
        otherwise: the hint if no known mistake is named.
        detail: more lines, for example a table of what was sent; or empty.

    """

    def __init__(
        self,
        message: str,
        hint: str = "",
        detail: str = "",
        *,
        mistakes: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.otherwise = hint
        self.mistakes = dict(mistakes or {})
        self.detail = detail

    @property
    def hint(self) -> str:
        """The first hint that fits, until `run_check.agreed` has seen all cases; or empty."""
        return next((hint for hint in self.mistakes.values() if hint), self.otherwise)


@dataclass(frozen=True)
class Form:
    """The form of a case's arguments; a right function does not depend on it.

    Attributes:
        groups: the process groups, each a list of ranks; every rank is in one of them. Empty: all
            ranks are one group, and ``group=None`` stands for it.
        dtype: the dtype of all floating-point tensors.
        layout: the layout of all tensors in memory: ``contiguous``, ``transposed`` (only tensors
            of two or more dimensions) or ``strided`` (every second number of longer rows).
        iterable: the type of a collection of arguments: ``list``, ``generator`` or ``tuple``.
        training: whether a model is in training mode.

    """

    groups: tuple[tuple[int, ...], ...] = ()
    dtype: str = "float32"
    layout: str = "contiguous"
    iterable: str = "list"
    training: bool = True


class InGroups:
    """Ranks that work in the groups of a form."""

    world_size: int
    form: Form

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The process groups that the function works in: the form's groups, or all ranks."""
        return self.form.groups or (tuple(range(self.world_size)),)

    def members(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group that `rank` is in, in order."""
        return next(members for members in self.groups if rank in members)


@dataclass(frozen=True)
class Case(InGroups):
    """One situation in which a student's function must be right.

    Attributes:
        name: a readable name, for example ``3 ranks, 10 rows``.
        world_size: number of ranks.
        parameters: everything that `Check.inputs` needs to draw the inputs.
        form: the form of the arguments.
        network: the network of the virtual clock.
        after: a case that the same ranks run before this one, to show whether the function keeps
            something from one call to the next. Neither its values nor its communication are
            judged.
        decides: the parts of the points that the case decides about; empty: all of them.
        in_short: why an answer may be wrong here, in words that reveal nothing of the inputs.
        difficulty: how hard it is to find a mistake in the case: the number of its features, its
            ranks, and the digits in the count of its numbers. Plain cases have small tuples.

    """

    name: str
    world_size: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    form: Form = Form()
    network: Network = NETWORK
    after: Case | None = None
    decides: tuple[str, ...] = ()
    in_short: str = ""
    difficulty: tuple[int, ...] = ()

    def given(self, own_inputs: Sequence[Any], seed: int) -> list[Any]:
        """Return what the ranks get: the form of the case, a seed, and an input of their own."""
        form = {**vars(self.form), "seed": seed}
        return [{"form": form, "own": own_input} for own_input in own_inputs]


def own_of(inputs: Sequence[Any]) -> list[Any]:
    """Return the ranks' own inputs, from what `Case.given` has made of them."""
    return [given["own"] for given in inputs]


@dataclass(frozen=True)
class Observed:
    """The outcome of a run of one case: the outputs, and the communication that led to them.

    Attributes:
        outputs: one plain value per rank.
        trace: every operation of the case; ``None`` if nothing was recorded.
        network: the network of the virtual clock that gave the trace's times; ``None`` on real
            ranks, whose times mean nothing to a check.
        touched: one sentence for each use of an operation's buffer before its ``wait()``, with the
            rank; known only on simulated ranks. The ranks report this themselves, but such a
            report can only make a result worse.
        inputs: the plain values that the ranks were given, in rank order.

    """

    outputs: Sequence[Any]
    trace: Trace | None = None
    network: Network | None = None
    touched: Sequence[str] = ()
    inputs: Sequence[Any] = ()


@dataclass(frozen=True)
class Expectation:
    """A demand on a case's communication; the functions of `expectations` make them.

    Attributes:
        test: ``test(case, observed, trace)`` raises `Wrong` if the demand is not met.
        part: the part of the points that the demand decides about.

    """

    test: Callable[[Case, Observed, Trace], None]
    part: str = COMMUNICATION


@dataclass(frozen=True)
class Check:
    """The demands of one task, in a form that a program can check.

    Attributes:
        function: name of the student's function.
        program: runs on every rank, as ``program(function, own)``; returns a plain value.
        inputs: ``inputs(case, generator)`` draws one plain value per rank.
        judge: ``judge(case, inputs, outputs)`` raises `Wrong`; both lists are in rank order.
        cases: the public cases.
        seconds: time limit of one case; ``None``: `limits.CASE_SECONDS`.
        expects: the demands on the communication of every case.
        worth: part → its share of the points, for example ``{"values": 3, "communication": 1}``.
            By default there is one part: all or nothing.
        computes: ``computes(case, inputs)`` returns, for each rank, the computation that the
            program declares by calls of `course_lib.ranks.compute`: seconds of a call → number of
            such calls. The grader ignores any other time that a rank declares, and a case fails if
            some of this time is missing. By default a check does not use that time.
        answers: ``answers(own, question)`` answers a question that the program asks, and returns
            the answer and its virtual seconds. In the grader the examiner calls it, outside the
            sandbox.
        withheld: keys of the input that only `answers` sees, and no student's code in a sandbox.
        only_on: the ranks whose program calls the student's function; empty: all ranks. In the
            grader, no code of the student is on the others.
        prepare: ``prepare(case, inputs)`` is called before the ranks start: it finds out what is
            right there, and raises `AuthorError` if it cannot.
        hidden: ``hidden(secret)`` draws the cases that a class's secret gives.
        drawn: ``drawn(seed)`` draws the case of a seed; None if cases are listed.
        only_form: whether this check looks only at the form of an answer, which the grader judges.

    """

    function: str
    program: Callable[[Callable[..., Any], Plain], Plain]
    inputs: Callable[[Case, torch.Generator], Sequence[Plain]]
    judge: Callable[[Case, Sequence[Any], Sequence[Any]], None]
    cases: tuple[Case, ...]
    seconds: float | None = None
    expects: tuple[Expectation, ...] = ()
    worth: Mapping[str, float] = field(default_factory=dict)
    computes: Callable[[Case, Sequence[Any]], Sequence[Mapping[float, int]]] | None = None
    answers: Callable[[Any, Any], tuple[Plain, float]] | None = None
    withheld: tuple[str, ...] = ()
    only_on: tuple[int, ...] = ()
    prepare: Callable[[Case, Sequence[Any]], Any] = lambda *_: None
    hidden: Callable[[str], tuple[Case, ...]] = lambda _: ()
    drawn: Callable[[int], Case] | None = None
    only_form: bool = False

    def case_seconds(self, default: float = CASE_SECONDS) -> float:
        """Return the time limit of one case; `default` if the check has no limit of its own."""
        return default if self.seconds is None else self.seconds

    def for_the_rank(self, rank_input: Any) -> Any:
        """Return a rank's input without what is withheld."""
        if not self.withheld:
            return rank_input
        return {**rank_input, "own": without(rank_input["own"], self.withheld)}


def case_generator(seed: str, check: str, case: Case) -> torch.Generator:
    """Return the random generator of one case: the same for the same seed, check and case."""
    digest = hashlib.sha256(f"{seed}/{check}/{case.name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def drawn_seed(generator: torch.Generator) -> int:
    """Draw the seed of the ranks' own generators."""
    return int(torch.randint(2**31, (), generator=generator))
