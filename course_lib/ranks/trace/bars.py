"""Draw what each rank did and when: ranks × time, for traces and for the figures of lectures.

No information is in colour alone: every kind has its own hatch. An operation of
``torch.distributed`` looks the same in all figures. The colours are from M. Okabe and K. Ito,
"Color Universal Design", 2008.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Style = tuple[str, str]
"""Colour and hatch."""

COMPUTE: Style = ("#bbbbbb", "")
WAITS = "waits for a rank"
"""The kind for the part of an operation in which a different rank has not come yet. It is blank."""
_BLANK: Style = ("#ffffff", "")
_COLORS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#d55e00", "#0072b2")
# One hatch fewer than colours, so that the pairs repeat only after 7 · 6 kinds.
_HATCHES = ("//", "..", "\\\\", "xx", "--", "++")
_OPERATIONS = (
    *("all_reduce", "send", "recv", "broadcast", "all_gather", "reduce_scatter", "barrier"),
    *("reduce", "gather", "scatter", "all_to_all"),
)
"""Each has the look of its position in this order. The first seven differ in colour."""
_GAP = 0.08
"""Part of a row that stays free above its bars, and also below them."""
_ROWS_NAMED = 16
MAX_BARS = 1200
"""With more bars than this, bars are only a few pixels wide and have no room for their names."""
_RESOLUTION = 1 / 2000
"""A bar or gap shorter than this part of the shown time cannot be seen."""
_LEAST = 1 / 300
"""A shorter bar is drawn with this part of the shown time, about three pixels, if there is room."""
_THIN = 1 / 120
"""If a bar is shorter than this part of the shown time, an outline would hide its colour."""
_ARROWS, _LINES = 60, 240
"""Up to this number of messages, each is drawn as an arrow, or as a thin line. More would hide the
bars."""


class Bar(NamedTuple):
    """One thing that a rank did: a bar in a strip of its row."""

    rank: int
    strip: int
    kind: str
    start: float
    stop: float
    label: str


class Link(NamedTuple):
    """A message: an arrow from the sender's bar to the receiver's bar."""

    sender: tuple[int, int]
    """Rank and strip."""
    leaves: float
    receiver: tuple[int, int]
    arrives: float


def styles_of(kinds: Sequence[str]) -> dict[str, Style]:
    """Return a look for every kind, in their order; computation is grey, and waiting is blank.

    The kind of an operation is ``send`` or ``send, a group's name``. Each operation has its own
    look. If it occurs in several groups, only the first group gets this look. All other kinds get
    the remaining looks, in their order.
    """
    unique = list(dict.fromkeys(kinds))
    plain = {"compute": COMPUTE, WAITS: _BLANK}
    styles = {kind: look for kind, look in plain.items() if kind in unique}
    for kind in unique:
        operation = kind.partition(",")[0]
        if operation in _OPERATIONS:
            operation_look = _look(_OPERATIONS.index(operation))
            if operation_look not in styles.values():
                styles[kind] = operation_look
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
) -> None:
    """Draw `bars` with time to the right and a row for each of `ranks`, the first on top.

    A row has `strips` strips, so that bars that overlap in time do not hide one another. Bars too
    short to be seen are drawn together with their neighbours of the same kind, and a few pixels
    wide if there is room. A label is written if it fits. A message is an arrow. Many messages are
    thin lines, and even more are not drawn. More than `MAX_BARS` bars have no hatch and no name.
    """
    rows = {rank: row for row, rank in enumerate(ranks)}
    height = (1 - 2 * _GAP) / strips
    longest = max(bar.stop for bar in bars) - min(bar.start for bar in bars)

    def bottom(bar: Bar) -> float:
        return rows[bar.rank] - 0.5 + _GAP + min(bar.strip, strips - 1) * height

    shown = _merged(bars, longest * _RESOLUTION)
    detailed = len(shown) <= MAX_BARS
    _draw_each(axes, shown, styles if detailed else _plain(styles), longest, height, bottom)
    axes.autoscale_view()
    every = -(-len(ranks) // _ROWS_NAMED)  # more names would overlap
    axes.set_yticks(range(0, len(ranks), every), [f"rank {rank}" for rank in ranks[::every]])
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    for line in range(1, len(ranks)):
        axes.axhline(line - 0.5, color="black", linewidth=0.3)
    if detailed:
        _draw_links(axes, links, rows, height, strips)
        _write_labels(axes, shown, height, bottom)


def _plain(styles: Mapping[str, Style]) -> Mapping[str, Style]:
    """Return the looks without hatches: in bars of a few pixels they would take minutes to draw."""
    return {kind: (color, "") for kind, (color, _) in styles.items()}


def _draw_each(
    axes: Axes,
    shown: Sequence[Bar],
    styles: Mapping[str, Style],
    longest: float,
    height: float,
    bottom: Callable[[Bar], float],
) -> None:
    """Draw bars, sorted as `_merged` does. All bars of one kind are a single artist."""
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
    """Draw messages from the edge of the sender's bar to the edge of the receiver's bar."""
    if len(links) > _LINES:
        return
    as_arrows = len(links) <= _ARROWS

    def edge(at: tuple[int, int], other: tuple[int, int]) -> float:
        rank, strip = at
        top = rows[rank] - 0.5 + _GAP + min(strip, strips - 1) * height
        return top + (0.94 * height if rows[other[0]] > rows[rank] else 0)

    for link in links:
        begin = (link.leaves, edge(link.sender, link.receiver))
        end = (link.arrives, edge(link.receiver, link.sender))
        look = {"arrowstyle": "-|>" if as_arrows else "-", "linewidth": 0.9 if as_arrows else 0.4}
        look |= {"mutation_scale": 9, "shrinkA": 0, "shrinkB": 0, "color": "black"}
        axes.annotate("", end, begin, arrowprops=look, annotation_clip=False)


def _visible_stops(shown: Sequence[Bar], shortest: float) -> list[float]:
    """Return where the drawing of each bar stops: short bars are longer, but hide no other."""
    stops = []
    for bar, after in itertools.zip_longest(shown, shown[1:]):
        same_strip = after is not None and (bar.rank, bar.strip) == (after.rank, after.strip)
        longer = min(bar.start + shortest, after.start) if same_strip else bar.start + shortest
        stops.append(max(bar.stop, longer))
    return stops


def _merged(bars: Sequence[Bar], resolution: float) -> list[Bar]:
    """Return the bars, with bars that cannot be told apart merged into one."""
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
    """Write the labels that fit. Call this last, when the limits of the axes are final."""
    left, right = axes.get_xlim()
    below, above = axes.get_ylim()
    points = 72 / axes.figure.dpi  # per pixel
    points_per_unit = axes.bbox.width * points / (right - left)
    size = min(8.0, 0.7 * height * axes.bbox.height * points / abs(below - above))
    if size <= 4:
        return
    for bar in bars:
        room = (bar.stop - bar.start) * points_per_unit
        # If a name does not fit with its group (after a space), it may fit without.
        names = (bar.label, bar.label.partition(" ")[0])
        text = next((name for name in names if 0.65 * size * len(name) + 4 <= room), "")
        if not text:
            continue
        axes.text(
            (bar.start + bar.stop) / 2, bottom(bar) + height / 2, text,
            size=size, ha="center", va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.6},
        )  # fmt: skip
