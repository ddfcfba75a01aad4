"""Who holds which elements: program and judge for contiguous shards, the longer ones first.

The judge looks for what is wrong and does not compute what is right: students can read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from course_lib.checking.answers import WHOLE, Kind, sees
from course_lib.checking.cases import Case, Wrong
from course_lib.checking.on_ranks.given import Given

Bounds = tuple[int, int]


def bounds_program(shard_bounds: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Ask for the bounds of every rank, for each pair (length, world size) of ``questions``.

    One rank is enough: nothing is communicated. The last one is asked about first, so that nothing
    can be kept from the rank before.
    """

    def bounds(length: int, k: int, rank: int) -> Any:
        found = shard_bounds(length, k, rank)
        if isinstance(found, slice | range) and found.step not in (None, 1):
            asked = _asked(length, k).format(rank)
            raise TypeError(f"{asked} is {found}: a shard is contiguous, from start to stop")
        return found.tolist() if isinstance(found, np.ndarray) else found

    return {
        _asked(length, k): [bounds(length, k, rank) for rank in reversed(range(k))][::-1]
        for length, k in mine["questions"]
    }


def _asked(length: int, k: int) -> str:
    return f"shard_bounds({length}, {k}, {{}})"


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(WHOLE.test, value))


_BOUNDS = Kind("two whole numbers (start, stop)", _is_pair, "pairs of whole numbers")


@sees(lambda case, inputs, rank: {_asked(n, k): [_BOUNDS] * k for n, k in inputs[0]["questions"]})
def balanced_shards(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge bounds (start, stop): all elements once, in order, sizes that differ by one at most."""
    for length, k in inputs[0]["questions"]:
        _judge(f"shard_bounds({length}, {k}, rank)", length, k, values[0][_asked(length, k)])


def _judge(asked: str, length: int, k: int, answer: Sequence[Any]) -> None:
    at = 0
    for rank, (start, stop) in enumerate(answer):
        if start == stop:
            continue  # wherever it says that nothing lies
        if start != at:
            other = f"but rank {rank - 1} stopped at {at}" if rank else "expected 0"
            what = "is skipped" if start > at else "is held twice"
            raise Wrong(
                f"{asked}: rank {rank} starts at {start}, {other}",
                _if_inclusive(answer, length) or f"Element {min(start, at)} {what}.",
            )
        if stop < start:
            raise Wrong(f"{asked}: rank {rank} stops at {stop}, before its start {start}")
        at = stop
    if at > length:
        raise Wrong(f"{asked}: the last rank stops at {at}, beyond the end")
    if at < length:
        lost = f"{asked}: {length - at} of {length} elements belong to nobody"
        hint = _if_inclusive(answer, length) or "What does the integer division leave over?"
        raise Wrong(lost, hint)
    sizes = [stop - start for start, stop in answer]
    if max(sizes) - min(sizes) > 1 or sizes != sorted(sizes, reverse=True):
        raise Wrong(
            f"{asked}: the shards have sizes {sizes}",
            "Sizes may differ by one at most, and the first ranks take the extra elements.",
        )


def _if_inclusive(answer: Sequence[Bounds], length: int) -> str:
    """Return a hint if every stop is the last element and not the one behind it."""
    stops = [0, *(stop + 1 for _, stop in answer)]
    if [start for start, _ in answer] == stops[:-1] and stops[-1] == length:
        return "A stop is not part of its shard: [start, stop), as in x[start:stop]."
    return ""
