"""Turn a training step into the bars of a timeline: forward, backward, all-reduces, update."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from course_lib.figures._shown import Span

if TYPE_CHECKING:
    from course_lib.ranks import Trace

_LANES = {"F": "forward", "B": "backward", "U": "update"}


def step_spans(marks: Sequence[tuple[str, float]], trace: Trace) -> list[Span]:
    """Return what rank 0 did in a step, in ms from its start, for `timelines`.

    `marks` are pairs `(name, clock())` of rank 0. Each one ends what began with the mark before.
    Names begin with F, B or U, for forward, backward and update; "" stands for time that is not
    drawn, and is also the name of the first mark. The all-reduces after the last barrier of `trace`
    are drawn as g1, g2, …, each from the moment when the one before it is over.
    """
    first, spans = marks[0][1], []
    for (_, begin), (name, end) in pairwise(marks):
        if name:
            spans.append((0, _LANES[name[0]], 1e3 * (begin - first), 1e3 * (end - first), name))
    events = [event for event in trace.events if event.rank == 0]
    free = max((event.end for event in events if event.kind == "barrier"), default=first)
    calls = [event for event in events if event.kind == "all_reduce" and event.end > free]
    zero = free
    for number, call in enumerate(calls, 1):
        begin, free = max(call.start, free), call.end
        spans.append((0, "all-reduce", 1e3 * (begin - zero), 1e3 * (free - zero), f"g{number}"))
    return sorted(spans, key=lambda span: span[2])
