"""A check is data: cases, a program that runs on every rank, a judge, and expectations.

The parts run in different places, and only plain values (tensors, numbers, text, lists and dicts
of them) pass between them:

    inputs(case, generator)   where the verdict is made: draws one input per rank
    program(function, mine)   on every rank: calls the student's function with this rank's input
    judge(case, inputs, outputs)   where the verdict is made: raises `Wrong`, or is content
    expects   likewise: look at what was sent, not at what came out

So the same check runs in a notebook, and in the autograder with the ranks in a sandbox that never
sees another rank's input, an expected value or a hidden case. `task` makes one from less.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from course_lib.checking.on_ranks.wire import Plain
from course_lib.ranks import Network, Trace

NETWORK = Network(latency=20e-6, bandwidth=10e9)
"""The network of a check on simulated ranks, here and in the grader: 20 µs and 10 GB/s. No send
leaves before its receive, so that a program that may deadlock does."""

VALUES, COMMUNICATION = "values", "communication"


class Wrong(Exception):
    """A judge's finding: what is wrong, and a hint about the mistake that it looks like.

    Attributes:
        message: which rank, which element, expected and got.
        hint: one sentence, or empty.
        known: a known mistake that could be the reason → its hint if this looks like it, else
            empty. The first hint among them is `hint`, until `causes.agreed` has seen all cases.
        otherwise: the hint where no known mistake is named.
        detail: more lines, for example a table of what was sent; or empty.
        expected: the value that should have come out, where the message is about one value.
        got: the value in its place.

    """

    def __init__(
        self,
        message: str,
        hint: str = "",
        detail: str = "",
        *,
        expected: str = "",
        got: str = "",
        known: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.otherwise = hint
        self.known = dict(known or {})
        self.hint = next((each for each in self.known.values() if each), hint)
        self.detail = detail
        self.expected = expected
        self.got = got

    def besides(self, hint: str = "", known: Mapping[str, str] | None = None) -> Wrong:
        """Return the same finding with more known mistakes before its own, and with a hint.

        The hint is for a finding that has none for the case that no known mistake is named.
        """
        return Wrong(
            self.message,
            self.otherwise or hint,
            self.detail,
            expected=self.expected,
            got=self.got,
            known={**(known or {}), **self.known},
        )

    def otherwise_said(self, hint: str) -> Wrong:
        """Return the same finding with another hint, if any, where no known mistake is named."""
        changed = self.besides()
        changed.otherwise = hint or self.otherwise
        changed.hint = next((each for each in self.known.values() if each), changed.otherwise)
        return changed


@dataclass(frozen=True)
class Form:
    """In which form a case's arguments come: what a right function does not depend on.

    Attributes:
        groups: the process groups, each a list of ranks; every rank is in one of them. Empty: all
            ranks are one group, and ``group=None`` stands for it.
        dtype: of all floating-point tensors.
        layout: of all tensors in memory: ``contiguous``, ``transposed`` (those of two or more
            dimensions) or ``strided``: every second number of longer rows.
        iterable: what several things come as: ``list``, ``generator`` or ``tuple``.
        training: whether a model comes in training mode.

    """

    groups: tuple[tuple[int, ...], ...] = ()
    dtype: str = "float32"
    layout: str = "contiguous"
    iterable: str = "list"
    training: bool = True


@dataclass(frozen=True)
class Case:
    """One situation in which a student's function must be right.

    Attributes:
        name: what a person reads, for example ``3 ranks, 10 rows``.
        world_size: number of ranks.
        parameters: whatever `Check.inputs` needs to draw the inputs.
        form: in which form the arguments come.
        network: of the virtual clock.
        after: a case that the same ranks go through before it, so that what is kept from one call
            to the next shows. Neither its values are judged, nor what is sent for them.

    """

    name: str
    world_size: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    form: Form = Form()
    network: Network = NETWORK
    after: Case | None = None

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The process groups that the function works in: all ranks, or the form's."""
        return self.form.groups or (tuple(range(self.world_size)),)

    def members(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group that `rank` is in, in order."""
        return next(members for members in self.groups if rank in members)

    @property
    def itemsize(self) -> int:
        """Bytes of one floating-point number of the case."""
        return int(getattr(torch, self.form.dtype).itemsize)


@dataclass(frozen=True)
class Observed:
    """The outcome of a run of one case: the outputs, and the communication behind them.

    Attributes:
        outputs: one plain value per rank.
        trace: every operation of the case; ``None`` where nothing was recorded.
        network: of the virtual clock that the trace's times are of; ``None`` on real ranks, whose
            times mean nothing to a check.
        touched: which ranks used the buffer of an operation before its ``wait()``, a sentence each;
            known on simulated ranks alone. A rank's own word: it can only lose by it.

    """

    outputs: Sequence[Any]
    trace: Trace | None = None
    network: Network | None = None
    touched: Sequence[str] = ()


@dataclass(frozen=True)
class Expectation:
    """A demand on a case's communication; `expectations` makes them.

    Attributes:
        test: ``test(case, observed, trace)`` raises `Wrong`, or is content.
        part: the part of the points that it decides about.
        counts_memory: whether the ranks must count the memory of their tensors for it.

    """

    test: Callable[[Case, Observed, Trace], None]
    part: str = COMMUNICATION
    counts_memory: bool = False


@dataclass(frozen=True)
class Check:
    """One task's demands, in a form that a machine can examine.

    Attributes:
        function: name of the student's function.
        program: runs on every rank, as ``program(function, mine)``; returns a plain value.
        inputs: ``inputs(case, generator)`` draws one plain value per rank.
        judge: ``judge(case, inputs, outputs)`` raises `Wrong`; both lists are in rank order.
        cases: the public cases.
        seconds: time limit of one case; ``None``: the table's, `limits.CASE_SECONDS`.
        expects: what the communication of every case must be like.
        worth: part → its share of the points, for example ``{"values": 3, "communication": 1}``.
            By default there is one part: all or nothing.
        computes: ``computes(mine)``: of the program with this input, seconds → how often it says
            that it computes so long (`course_lib.ranks.compute`). Nothing else that a rank says of
            its time counts in the grader, and a case in which some of it is missing has failed. By
            default a check has no use for that time.

    """

    function: str
    program: Callable[[Callable[..., Any], Plain], Plain]
    inputs: Callable[[Case, torch.Generator], Sequence[Plain]]
    judge: Callable[[Case, Sequence[Any], Sequence[Any]], None]
    cases: tuple[Case, ...]
    seconds: float | None = None
    expects: tuple[Expectation, ...] = ()
    worth: Mapping[str, float] = field(default_factory=dict)
    computes: Callable[[Any], Mapping[float, int]] | None = None


def case_generator(seed: str, check: str, case: Case) -> torch.Generator:
    """Return the random numbers of one case: the same for the same seed, check and case."""
    digest = hashlib.sha256(f"{seed}/{check}/{case.name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
