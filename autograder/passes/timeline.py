"""Draw a verdict's trace as a picture, from numbers that the grader recorded itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autograder.examination.verdict import KEPT, MAX_EVENTS


def timeline_of(trace: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return a PNG of what each rank did when, and the same in words.

    The PNG is empty if the trace has only sums and no ``events``, as before schema 4. Both are
    empty if it is no trace.

    Args:
        trace: as `autograder.examination.verdict.trace_summary` makes it.

    """
    try:
        if trace.get("events"):
            return _drawn(trace["events"], int(trace["world_size"]))
        return b"", _in_words(trace)
    except Exception:  # the picture is an extra: the report above it says what is wrong
        return b"", ""


def caption_of(trace: Mapping[str, Any]) -> str:
    """Return the caption of the picture, in a line."""
    case = f"in the case “{trace['case']}”" if trace.get("case") else "in it"
    part = f" Only the first {MAX_EVENTS} events are drawn." if trace.get("cut") else ""
    return (
        f"The first visible case that failed after something was sent: what each rank did {case}, "
        f"on the clock of the grader's network.{part}"
    )


def _drawn(events: list[Any], world_size: int) -> tuple[bytes, str]:
    from course_lib.ranks.trace.event import Event
    from course_lib.ranks.trace.figure import png_of
    from course_lib.ranks.trace.timeline import Timeline, draw_timelines

    found = []
    for each in events[:MAX_EVENTS]:
        fields = dict(zip(KEPT, each, strict=True))
        # Names that a student may have chosen are not drawn: matplotlib reads $…$ as a formula.
        found.append(Event(**{**fields, "group": tuple(fields["group"]), "where": ""}))
    figure = draw_timelines({"": Timeline(found, world_size)})
    return png_of(figure), figure.alt


def _in_words(trace: Mapping[str, Any]) -> str:
    told = []
    for rank, (sent, calls) in enumerate(zip(trace["bytes_sent"], trace["calls"], strict=True)):
        made = ", ".join(f"{count} {kind}" for kind, count in dict(calls).items()) or "no call"
        told.append(f"rank {rank}: {made}, {sent} B sent")
    return "In the first visible case that failed: " + "; ".join(told) + "." if told else ""
