"""Draw the schedules of pipelines: a lane for each rank, a numbered box for each step.

    >>> from course_lib.figures import draw_schedules
    >>> figure = draw_schedules({"two ranks": [(0, "forward", 0.0, 1.0, "0")]}, unit="s")

A rank does one thing at a time, so forward, backward and weights' gradients share its lane, and the
idle time is the white between the boxes. They differ in colour and in hatch, and each box holds the
number of its micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from course_lib.figures._shown import Span

if TYPE_CHECKING:  # matplotlib takes half a second to import; most ranks never draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's blue, orange and green, with a hatch that leaves a number legible.
_STYLES = {
    "forward": ("#56b4e9", ""),
    "backward": ("#e69f00", "///"),
    "weights' gradients": ("#7fcbb4", "..."),
}
_INCHES = 9.6
_POINTS = 8.0


def draw_schedules(panels: Mapping[str, Iterable[Span]], *, unit: str) -> Figure:
    """Draw schedules, by title, one above the other on one axis of time; return the figure.

    `panels[title]` are the spans `(rank, lane, start, stop, label)` of a simulation, with times in
    `unit`; the lanes are "forward", "backward" and "weights' gradients".

    Raises ValueError if there are no spans, or a lane has another name.
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
    heights = [0.4 + 0.24 * count for count in rows]
    figure, axes = plt.subplots(
        len(rows), 1, sharex=True, squeeze=False, layout="constrained",
        figsize=(_INCHES, 0.7 + sum(heights)), height_ratios=heights,
    )  # fmt: skip
    end = max(span[3] for span in every)
    for ax, (title, spans), count in zip(axes[:, 0], of_panels.items(), rows, strict=True):
        _draw(ax, spans, end)
        ax.set(xlim=(0, end), ylim=(count - 0.5, -0.5))
        ax.set_yticks(range(count), [f"rank {rank}" for rank in range(count)])
        ax.set_title(title, loc="left", fontsize=11)
        ax.grid(visible=False)
    axes[-1, 0].set_xlabel(f"time ({unit})")
    used = [lane for lane in _STYLES if lane in {span[1] for span in every}]
    patches = [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", label=lane)
        for lane, (color, hatch) in ((lane, _STYLES[lane]) for lane in used)
    ]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(used), frameon=False)
    return figure


def _draw(ax: Axes, spans: Iterable[Span], end: float) -> None:
    """Draw the boxes. A label is as large as its box allows, and left out below 5 points."""
    for rank, lane, start, stop, label in spans:
        color, hatch = _STYLES[lane]
        width = stop - start
        ax.barh(rank, width, 0.8, start, color=color, hatch=hatch, edgecolor="white", linewidth=0)
        ax.barh(rank, width, 0.8, start, fill=False, linewidth=0.6)
        room = 0.9 * 72 * _INCHES * (stop - start) / end
        size = min(_POINTS, room / (0.7 * max(1, len(label))))
        if size >= 5:
            ax.text((start + stop) / 2, rank, label, size=size, ha="center", va="center")
