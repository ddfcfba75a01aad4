"""Ranks × time: the one drawing of who did what when, for traces and for whatever a lecture draws.

Nothing is told by colour alone: every kind has a hatch of its own. An operation of
``torch.distributed`` has one look in all figures. The colours are those of M. Okabe and K. Ito,
"Color Universal Design", 2008.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from course_lib.ranks.trace.shares import draw_shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Style = tuple[str, str]
"""Colour and hatch."""

COMPUTE: Style = ("#bbbbbb", "")
WAITS = "waits for a rank"
"""The kind of the part of an operation in which another rank has not come yet: it is blank."""
_BLANK: Style = ("#ffffff", "")
_COLORS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#d55e00", "#0072b2")
# One fewer than colours: the pairs repeat only after 7 · 6 kinds.
_HATCHES = ("//", "..", "\\\\", "xx", "--", "++")
_OPERATIONS = (
    *("all_reduce", "send", "recv", "broadcast", "all_gather", "reduce_scatter", "barrier"),
    *("reduce", "gather", "scatter", "all_to_all"),
)
"""Each has the look of its place in this order; the first seven differ in colour."""
_GAP = 0.08
"""Part of a row that stays free above, and below, its bars."""
_ROWS_NAMED = 16
MAX_BARS = 1200
"""Beyond this, bars are a few pixels wide and their names fit nowhere."""
_RESOLUTION = 1 / 2000
"""Part of the time shown below which a bar, or a gap, cannot be seen."""
_LEAST = 1 / 300
"""Part of the time shown that a shorter bar takes where there is room: about three pixels."""
_THIN = 1 / 120
"""Part of the time shown below which a bar's outline would hide its colour."""
_ARROWS, _LINES = 60, 240
"""Messages up to which each is an arrow, or at least a thin line: more would hide the bars."""


class Bar(NamedTuple):
    """One thing that a rank did: a bar in a strip of its row."""

    rank: int
    strip: int
    kind: str
    start: float
    stop: float
    label: str


class Link(NamedTuple):
    """A message: an arrow from a rank's bar, by its strip, to that of another."""

    sender: tuple[int, int]
    """Rank and strip."""
    leaves: float
    receiver: tuple[int, int]
    arrives: float


def styles_of(kinds: Sequence[str]) -> dict[str, Style]:
    """Return a look for every kind, in their order; computation is grey, and waiting blank.

    An operation, ``send`` or ``send, a group's name``, has its own look, which only the first of
    several groups gets. All others get the looks that are left, in their order.
    """
    unique = list(dict.fromkeys(kinds))
    plain = {"compute": COMPUTE, WAITS: _BLANK}
    styles = {kind: look for kind, look in plain.items() if kind in unique}
    for kind in unique:
        operation = kind.partition(",")[0]
        if operation in _OPERATIONS:
            own = _look(_OPERATIONS.index(operation))
            if own not in styles.values():
                styles[kind] = own
    left = (look for i in itertools.count() if (look := _look(i)) not in styles.values())
    styles |= {kind: next(left) for kind in unique if kind not in styles}
    kinds = [*plain, *unique]
    return {kind: styles[kind] for kind in dict.fromkeys(kinds) if kind in styles}


def _look(i: int) -> Style:
    return _COLORS[i % len(_COLORS)], _HATCHES[i % len(_HATCHES)]


def draw_bars(
    axes: Axes,
    bars: Sequence[Bar],
    styles: Mapping[str, Style],
    *,
    ranks: Sequence[int],
    strips: int,
    links: Sequence[Link] = (),
) -> bool:
    """Draw `bars` with time to the right and a row for each of `ranks`, the first on top.

    A row has `strips` strips, so that what overlaps in time does not hide itself. Bars too short to
    be seen are drawn together with their neighbours of the same kind, and a few pixels wide where
    there is room. A label is written where it fits. A message is an arrow; where they are many, a
    thin line, and then nothing. Where the bars are too many to be told apart, each kind has a
    strip, as high as its share of the moment.

    Returns:
        Whether every bar is drawn; else it is shares.

    """
    rows = {rank: row for row, rank in enumerate(ranks)}
    height = (1 - 2 * _GAP) / strips
    longest = max(bar.stop for bar in bars) - min(bar.start for bar in bars)

    def bottom(bar: Bar) -> float:
        return rows[bar.rank] - 0.5 + _GAP + min(bar.strip, strips - 1) * height

    shown = _merged(bars, longest * _RESOLUTION)
    each_drawn = len(shown) <= MAX_BARS
    if each_drawn:
        _draw_each(axes, shown, styles, longest, height, bottom)
    else:
        spans: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for bar in bars:
            spans.setdefault((bar.rank, bar.kind), []).append((bar.start, bar.stop))
        tops = {rank: row - 0.5 + _GAP for rank, row in rows.items()}
        draw_shares(axes, spans, styles, tops, 1 - 2 * _GAP)
    axes.autoscale_view()
    every = -(-len(ranks) // _ROWS_NAMED)  # more names would overlap
    axes.set_yticks(range(0, len(ranks), every), [f"rank {rank}" for rank in ranks[::every]])
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    for line in range(1, len(ranks)):
        axes.axhline(line - 0.5, color="black", linewidth=0.3)
    if each_drawn:
        _draw_links(axes, links, rows, height, strips)
        _write_labels(axes, shown, height, bottom)
    return each_drawn


def _draw_each(
    axes: Axes,
    shown: Sequence[Bar],
    styles: Mapping[str, Style],
    longest: float,
    height: float,
    bottom: Callable[[Bar], float],
) -> None:
    """Draw bars, sorted as `_merged` does. All of one kind are one artist: drawn at once."""
    from matplotlib.collections import PolyCollection

    drawn = list(zip(shown, _visible_stops(shown, longest * _LEAST), strict=True))
    for kind, (color, hatch) in styles.items():
        corners, outlines = [], []
        for bar, stop in drawn:
            if bar.kind == kind:
                y = bottom(bar)
                top = y + 0.94 * height
                corners.append([(bar.start, y), (bar.start, top), (stop, top), (stop, y)])
                outlines.append(0.1 if stop - bar.start < longest * _THIN else 0.4)
        axes.add_collection(
            PolyCollection(
                corners, facecolor=color, edgecolor="black", linewidth=outlines or 0.4,
                hatch=hatch, label=kind,
            )
        )  # fmt: skip


def _draw_links(
    axes: Axes, links: Sequence[Link], rows: Mapping[int, int], height: float, strips: int
) -> None:
    """Draw messages from the edge of the sender's bar to that of the receiver's."""
    if len(links) > _LINES:
        return
    few = len(links) <= _ARROWS

    def edge(at: tuple[int, int], other: tuple[int, int]) -> float:
        rank, strip = at
        top = rows[rank] - 0.5 + _GAP + min(strip, strips - 1) * height
        return top + (0.94 * height if rows[other[0]] > rows[rank] else 0)

    for link in links:
        begin = (link.leaves, edge(link.sender, link.receiver))
        end = (link.arrives, edge(link.receiver, link.sender))
        look = {"arrowstyle": "-|>" if few else "-", "linewidth": 0.9 if few else 0.4}
        look |= {"mutation_scale": 9, "shrinkA": 0, "shrinkB": 0, "color": "black"}
        axes.annotate("", end, begin, arrowprops=look, annotation_clip=False)


def _visible_stops(shown: Sequence[Bar], least: float) -> list[float]:
    """Return where each bar's drawing stops: short ones are longer, but hide no other."""
    stops = []
    for bar, after in itertools.zip_longest(shown, shown[1:]):
        same_strip = after is not None and (bar.rank, bar.strip) == (after.rank, after.strip)
        longer = min(bar.start + least, after.start) if same_strip else bar.start + least
        stops.append(max(bar.stop, longer))
    return stops


def _merged(bars: Sequence[Bar], resolution: float) -> list[Bar]:
    """Return the bars with those that cannot be told apart drawn as one."""
    merged: list[Bar] = []
    for bar in sorted(bars, key=lambda b: (b.rank, b.strip, b.start)):
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.rank, last.strip, last.kind) == (bar.rank, bar.strip, bar.kind)
            and bar.stop - bar.start < resolution
            and bar.start - last.stop < resolution
        ):
            merged[-1] = last._replace(stop=max(last.stop, bar.stop), label="")
        else:
            merged.append(bar)
    return merged


def _write_labels(
    axes: Axes, bars: Sequence[Bar], height: float, bottom: Callable[[Bar], float]
) -> None:
    """Write labels last: whether one fits is known when the axes have their limits."""
    left, right = axes.get_xlim()
    below, above = axes.get_ylim()
    points = 72 / axes.figure.dpi  # per pixel
    points_per_unit = axes.bbox.width * points / (right - left)
    size = min(8.0, 0.7 * height * axes.bbox.height * points / abs(below - above))
    if size <= 4:
        return
    for bar in bars:
        room = (bar.stop - bar.start) * points_per_unit
        # Without its group, after a space, a name may fit that does not with it.
        names = (bar.label, bar.label.partition(" ")[0])
        text = next((each for each in names if 0.65 * size * len(each) + 4 <= room), "")
        if not text:
            continue
        axes.text(
            (bar.start + bar.stop) / 2, bottom(bar) + height / 2, text,
            size=size, ha="center", va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.6},
        )  # fmt: skip
