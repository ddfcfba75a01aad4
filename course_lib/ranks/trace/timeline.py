"""The figure of a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from course_lib.ranks.explain.words import counted, spans
from course_lib.ranks.trace.bars import WAITS, Bar, Link, draw_bars, styles_of
from course_lib.ranks.trace.event import Event, group_label
from course_lib.ranks.trace.lanes import with_lanes
from course_lib.ranks.trace.meetings import messages, waits

if TYPE_CHECKING:
    from course_lib.ranks.trace.figure import DescribedFigure

MAX_LANES = 4
_LOOKS = 10
"""Up to this number of entries in the legend, each group has its own entries."""
_GROUPS_TOLD = 4
_SHORT = 1 / 100
"""A wait shorter than this part of the whole time is neither drawn nor described."""


def draw_timeline(events: Sequence[Event], world_size: int, title: str = "") -> DescribedFigure:
    """Draw what each rank did, and when.

    Each rank has a row, with a lane for computation and lanes for communication. A message is an
    arrow. The part of an operation in which it waits for a different rank is blank. The figure's
    alternative text describes it. Raises ValueError if there are no events.
    """
    if not events:
        raise ValueError("the trace is empty: run something that communicates first")
    from matplotlib.patches import Patch

    from course_lib.ranks.trace.figure import DescribedFigure

    longest = max(event.end for event in events)
    unit, scale = unit_of(longest)
    placed = with_lanes(events)
    lanes = min(MAX_LANES, max(lane for _, lane in placed)) + 1
    bars = _bars(placed, world_size, _looks(events), longest * _SHORT)
    styles = styles_of([bar.kind for bar in sorted(bars, key=lambda bar: bar.start)])
    size = (9, _height(lanes, world_size))
    figure = DescribedFigure(figsize=size, dpi=100, layout="constrained")
    axes = figure.subplots()
    axes.set_xlim(0, longest * scale * 1.01)
    draw_bars(
        axes,
        [bar._replace(start=bar.start * scale, stop=bar.stop * scale) for bar in bars],
        styles,
        ranks=range(world_size),
        strips=lanes,
        links=_links(placed, scale),
    )
    axes.set_xlim(0, longest * scale * 1.01)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(f"time ({unit})")
    figure.legend(
        handles=[
            Patch(facecolor=color, edgecolor="black", hatch=hatch, label=kind)
            for kind, (color, hatch) in styles.items()
        ],
        loc="outside upper right",
        ncols=min(5, len(styles)),
        frameon=False,
    )
    figure.alt = in_words(events, world_size)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        figure.alt = f"{title}: {figure.alt}"
    return figure


def _bars(
    placed: Sequence[tuple[Event, int]], world_size: int, look: Callable[[Event], str], short: float
) -> list[Bar]:
    """Return one bar for each event, or two if the event first waits for longer than `short`."""
    waiting = waits([event for event, _ in placed])
    bars = []
    for i, (event, lane) in enumerate(placed):
        begin = event.start
        if i in waiting and waiting[i].until - begin > short:
            begin = waiting[i].until
            label = f"waits for {waiting[i].rank}"
            bars.append(Bar(event.rank, lane, WAITS, event.start, begin, label))
        name = _name(event, world_size)
        bars.append(Bar(event.rank, lane, look(event), begin, event.end, name))
    return bars


def _links(placed: Sequence[tuple[Event, int]], scale: float) -> list[Link]:
    """Return the messages: each leaves when both ranks have come, and arrives as its receive ends.

    A message that a rank sends to itself is left out.
    """
    events = [event for event, _ in placed]
    waiting = waits(events)
    return [
        Link(
            (events[send].rank, placed[send][1]),
            scale * (waiting[send].until if send in waiting else events[send].start),
            (events[receive].rank, placed[receive][1]),
            scale * events[receive].end,
        )
        for send, receive in messages(events).items()
        if events[send].rank != events[receive].rank
    ]


def _looks(events: Sequence[Event]) -> Callable[[Event], str]:
    """Return the function that names an event in the legend.

    The name is the event's kind. If this gives few names in all, its group is added.
    """
    kinds_and_groups = {(event.kind, event.group_name) for event in events}
    if len(kinds_and_groups) > _LOOKS:
        return lambda event: event.kind
    return lambda event: ", ".join(filter(None, [event.kind, event.group_name]))


def in_words(events: Sequence[Event], k: int) -> str:
    """Return a description of the timeline of `k` ranks, for people who cannot see it."""
    makespan = max(event.end for event in events)
    unit, scale = unit_of(makespan)
    calls = Counter(event.kind for event in events if event.kind != "compute")
    called = ", ".join(f"{n} {kind}" for kind, n in calls.most_common(4))
    called = called or "no communication"
    groups = dict.fromkeys(filter(None, (group_label(event, k) for event in events)))
    if groups:
        called += f", in the groups {'; '.join(list(groups)[:_GROUPS_TOLD])}"
        called += " and others" if len(groups) > _GROUPS_TOLD else ""
    busy = [
        sum(e.end - e.start for e in events if e.rank == rank and e.kind == "compute") / makespan
        for rank in range(k)
    ]
    lowest, highest = f"{100 * min(busy):.0f}", f"{100 * max(busy):.0f}"
    share = f"{highest} %" if lowest == highest else f"{lowest} to {highest} %"
    longest = max(
        ((wait.until - events[i].start, i, wait) for i, wait in waits(events).items()),
        key=lambda candidate: (candidate[0], -candidate[1]),
        default=None,
    )
    waited = ""
    if longest is not None and longest[0] > _SHORT * makespan:
        seconds, i, wait = longest
        waited = f" The longest wait: rank {events[i].rank} in {events[i].kind} for rank "
        waited += f"{wait.rank}, {seconds * scale:.3g} {unit}."
    return (
        f"Timeline of {counted(k, 'rank')} over {makespan * scale:.3g} {unit}: on all ranks "
        f"together {called}; a rank computes for {share} of the time.{waited}"
    )


def unit_of(seconds: float) -> tuple[str, float]:
    """Return the unit in which a time is best read, and how many of this unit are a second."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return unit, scale
    return "µs", 1e6


def _height(lanes: int, world_size: int) -> float:
    return max(2.2, 0.9 + world_size * min(0.9, 0.28 * lanes, 7.0 / world_size))


def _name(event: Event, world_size: int) -> str:
    """Return the text in an event's bar: the operation, and its group if it is not all ranks."""
    short_names = {"send": f"→{event.peer}", "recv": f"←{event.peer}", "compute": ""}
    members = "" if len(event.group) == world_size else spans(event.group)
    return short_names.get(event.kind, f"{event.kind} {members}".rstrip())
