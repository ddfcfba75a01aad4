"""Draw the schedules of pipelines: a lane for each rank, a numbered box for each step.

    >>> from course_lib.figures import draw_schedules
    >>> figure = draw_schedules({"two ranks": [(0, "forward", 0.0, 1.0, "0")]}, unit="s")

A rank does one thing at a time, so forward, backward and weights' gradients share its lane. The
white between the boxes is idle time. The three differ in colour and in hatch, and each box holds
the number of its micro-batch. If a rank has several stages, later ones are paler, as in the papers.
In a figure with sliders (`explore`), a box is explained when the pointer rests on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from course_lib.figures._explore import tip
from course_lib.figures._shown import Span

if TYPE_CHECKING:  # matplotlib takes half a second to import; most ranks never draw
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's blue, orange and green, with hatches over which a number is still legible.
_STYLES = {
    "forward": ("#56b4e9", ""),
    "backward": ("#e69f00", "///"),
    "weights' gradients": ("#7fcbb4", "..."),
}
_INCHES = 8.0
_POINTS = 9.0


def draw_schedules(
    panels: Mapping[str, Iterable[Span]],
    *,
    unit: str,
    end: float | None = None,
    lanes: int = 0,
) -> Figure:
    """Draw schedules, by title, one above the other on one axis of time; return the figure.

    `panels[title]` are the spans `(rank, lane, start, stop, label)` of a simulation, with times in
    `unit`. The lanes are "forward", "backward" and "weights' gradients". A label is the number of
    the micro-batch. It has a letter for every stage of a rank except the first: ``3``, ``3b``,
    ``3c``. The axis ends at `end`, in `unit`, or where the last span stops. Each panel has room for
    at least `lanes` ranks, so that figures with fewer ranks have the same size.

    Raises ValueError if there are no spans, or a lane has a different name.
    """
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    of_panels = {title: list(spans) for title, spans in panels.items()}
    every = [span for spans in of_panels.values() for span in spans]
    if not every:
        raise ValueError("no spans to draw: simulate a schedule first")
    if unknown := {span[1] for span in every} - _STYLES.keys():
        raise ValueError(f"lanes must be among {', '.join(_STYLES)}; got {', '.join(unknown)}")
    rows = [max((span[0] for span in spans), default=0) + 1 for spans in of_panels.values()]
    heights = [0.4 + 0.3 * max(count, lanes) for count in rows]
    figure, axes = plt.subplots(
        len(rows), 1, sharex=True, squeeze=False, layout="constrained",
        figsize=(_INCHES, 0.7 + sum(heights)), height_ratios=heights,
    )  # fmt: skip
    end = max(span[3] for span in every) if end is None else end
    for ax, (title, spans), count in zip(axes[:, 0], of_panels.items(), rows, strict=True):
        _draw(ax, spans, count, end, unit)
        ax.set(xlim=(0, end), ylim=(max(count, lanes) - 0.5, -0.5))
        ax.set_yticks(range(count), [f"rank {rank}" for rank in range(count)])
        ax.set_title(title, loc="left", fontsize=11)
        ax.grid(visible=False)
    axes[-1, 0].set_xlabel(f"time ({unit})")
    used = [lane for lane in _STYLES if lane in {span[1] for span in every}]
    patches = [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", label=lane)
        for lane, (color, hatch) in ((lane, _STYLES[lane]) for lane in used)
    ]
    if any(span[4][-1].isalpha() for span in every):
        pale = _paler(_STYLES["forward"][0], 1)
        label = "paler: a rank's later stage"
        patches.append(Patch(facecolor=pale, edgecolor="white", label=label))
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), frameon=False)
    return figure


def _draw(ax: Axes, spans: list[Span], ranks: int, end: float, unit: str) -> None:
    """Draw the boxes. A number is as large as its box allows; below 6 points it is left out."""
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Rectangle
    from matplotlib.text import Text

    for rank, lane, start, stop, label in spans:
        color, hatch = _STYLES[lane]
        number = label.rstrip("bcdefgh")
        chunk = ord(label[-1]) - ord("a") if number != label else 0
        what = f"stage {chunk * ranks + rank}, micro-batch {number}: {lane}"
        explanation = f"{what}, time {start:.4g} to {stop:.4g} ({unit})"
        box = Rectangle(
            (start, rank - 0.4), stop - start, 0.8,
            facecolor=_paler(color, chunk), hatch=hatch, edgecolor="white", linewidth=0,
        )  # fmt: skip
        parts: list[Artist] = [box]
        room = 0.8 * 72 * _INCHES * (stop - start) / end
        size = min(_POINTS, room / (0.7 * len(number)))
        if size >= 6:
            middle = (start + stop) / 2, rank
            text = Text(*middle, number, size=size, ha="center", va="center")
            text.set_transform(ax.transData)
            parts.append(text)
        for part in parts:
            tip(part, explanation)
            part.set_in_layout(False)  # all are inside the axes, and measuring hundreds takes long
            ax.add_artist(part)
    corners = [
        [(start, rank - 0.4), (stop, rank - 0.4), (stop, rank + 0.4), (start, rank + 0.4)]
        for rank, _, start, stop, _ in spans
    ]
    ax.add_collection(PolyCollection(corners, facecolor="none", edgecolor="black", linewidth=0.6))


def _paler(color: str, chunk: int) -> tuple[float, float, float]:
    """Return the colour of a rank's stage number `chunk`: each stage is closer to white."""
    from matplotlib.colors import to_rgb

    red, green, blue = (1 - (1 - part) * 0.6**chunk for part in to_rgb(color))
    return red, green, blue
