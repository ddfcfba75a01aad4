"""A check is data: cases, a program that runs on every rank, and a judge.

The three parts run in different places, and only plain values (tensors, numbers, text, lists and
dicts of them) pass between them:

    inputs(case, generator)   where the verdict is made: draws one input per rank
    program(function, mine)   on every rank: calls the student's function with this rank's input
    judge(case, inputs, outputs)   where the verdict is made: raises `Wrong`, or is content

So the same check runs in a notebook, and in the autograder with the ranks in a sandbox that never
sees another rank's input, an expected value or a hidden case.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from course_lib.checking.wire import Plain


class Wrong(Exception):
    """A judge's finding: what is wrong, and a hint about the mistake that it looks like.

    Attributes:
        message: which rank, which element, expected and got.
        hint: one sentence, or empty.

    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True)
class Case:
    """One situation in which a student's function must be right.

    Attributes:
        name: what a person reads, for example ``3 ranks, 10 rows``.
        world_size: number of ranks.
        parameters: whatever `Check.inputs` needs to draw the inputs.

    """

    name: str
    world_size: int
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """What one task asks for, in a form that a machine can examine.

    Attributes:
        function: name of the student's function.
        program: runs on every rank, as ``program(function, mine)``; returns a plain value.
        inputs: ``inputs(case, generator)`` draws one plain value per rank.
        judge: ``judge(case, inputs, outputs)`` raises `Wrong`; both lists are in rank order.
        cases: the public cases.
        seconds: time limit of one case.

    """

    function: str
    program: Callable[[Callable[..., Any], Plain], Plain]
    inputs: Callable[[Case, torch.Generator], Sequence[Plain]]
    judge: Callable[[Case, Sequence[Any], Sequence[Any]], None]
    cases: tuple[Case, ...]
    seconds: float = 20.0


def case_generator(seed: str, check: str, case: Case) -> torch.Generator:
    """Return the random numbers of one case: the same for the same seed, check and case."""
    digest = hashlib.sha256(f"{seed}/{check}/{case.name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
