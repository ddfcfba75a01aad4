"""A verdict's trace as a picture, drawn by the grader from numbers that it wrote down itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_EVENTS = 400


def timeline_of(trace: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return a PNG of when each rank did what, and the same in words.

    The PNG is empty where the trace has no ``events``, only sums; both are if it has neither.

    Args:
        trace: ``world_size``, and ``events``, each a mapping with the fields of
            `course_lib.ranks.trace.event.Event`; or ``bytes_sent`` and ``calls`` of each rank.

    """
    try:
        if events := trace.get("events"):
            return _drawn(events, int(trace["world_size"]))
        return b"", _in_words(trace)
    except Exception:  # a picture is an extra: the report above it says what is wrong
        return b"", ""


def _drawn(events: list[Any], world_size: int) -> tuple[bytes, str]:
    from course_lib.ranks.trace.event import Event
    from course_lib.ranks.trace.figure import png_of
    from course_lib.ranks.trace.timeline import Timeline, draw_timelines

    found = []
    for each in events[:MAX_EVENTS]:
        fields = (
            dict(each)
            if isinstance(each, Mapping)
            else dict(zip(Event._fields, each, strict=False))
        )
        fields["group"] = tuple(fields.get("group", ()))
        # What a student may have named is not drawn: matplotlib reads $…$ as a formula.
        found.append(Event(**{**fields, "group_name": "", "where": ""}))
    figure = draw_timelines({"": Timeline(found, world_size)})
    return png_of(figure), f"The first visible case that failed. {figure.alt}"


def _in_words(trace: Mapping[str, Any]) -> str:
    told = []
    for rank, (sent, calls) in enumerate(zip(trace["bytes_sent"], trace["calls"], strict=True)):
        made = ", ".join(f"{count} {kind}" for kind, count in dict(calls).items()) or "no call"
        told.append(f"rank {rank}: {made}, {sent} B sent")
    return "In the first visible case that failed: " + "; ".join(told) + "." if told else ""
