"""The checks of this assignment. They are handed out: read them if a message is not enough.

A check has a reference in `course_lib`, a program that calls a function on a rank, and a draw that
makes a case from a seed. A program gets only its rank's input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from course_lib.checking import Allowed, Draw, Given, by_reference

# Task 1: to the next rank -------------------------------------------------------------------------


def run_rotate(rotate: Callable[..., Any], own: Any, given: Given) -> Any:
    """Call ``rotate(x, group=group)`` on a rank; the keys are the words of the report."""
    return {"neighbour's tensor": rotate(own["x"], group=given.group)}


def draw_rotate(d: Draw) -> list[Any]:
    """Draw a tensor for every rank: what is unusual has words, which name the case."""
    shape = d.one_of((3, 2), (4,), (2, 1, 3))
    shape = d.maybe("one number", (), shape)
    shape = d.maybe("no numbers", (0, 2), shape, one_in=6)
    overflow = d.rank("rank {} has an inf or a NaN")

    def tensor_of(rank: int) -> Any:
        tensor = d.exact(*shape)
        return d.not_finite(tensor) if rank == overflow else tensor

    return [{"x": tensor_of(rank)} for rank in d.ranks]


def of_the_right(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
    """Return what the mistake gives member `me` of a group, from the inputs of all members."""
    return {"neighbour's tensor": inputs[(me + 1) % len(inputs)]["x"]}


CHECKS = {
    "rotate": by_reference(
        "rotate",
        seeds=(2, 3, 8, 9, 11, 22, 28, 34, 41),
        reference="course_lib.collectives:rotate",
        program=run_rotate,
        draw=draw_rotate,
        mistakes={"the right neighbour's: the direction is wrong": of_the_right},
        exact=True,  # nothing is rounded, so every bit counts
        allowed=Allowed(time=1.02, hint="Send and receive at the same time, once each."),
        worth={"values": 3, "communication": 1},
    )
}
