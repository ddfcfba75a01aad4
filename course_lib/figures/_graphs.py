"""Draw which ranks get messages from which: one dot for each rank, one line for each message.

    >>> from matplotlib.figure import Figure
    >>> from course_lib.figures import communication_graph
    >>> communication_graph(Figure().subplots(), [[0.5, 0.5], [0.5, 0.5]])

The messages that rank 0 gets are thick coloured arrows. As they are thick, they also stand out in
grey.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from course_lib.figures._explore import tip

if TYPE_CHECKING:  # matplotlib takes half a second to import; most ranks never draw
    from matplotlib.axes import Axes
    from matplotlib.path import Path

    Place = tuple[float, float]


def communication_graph(
    ax: Axes,
    mixing: Sequence[Sequence[float]],
    *,
    columns: int = 0,
    values: Sequence[float] | None = None,
) -> None:
    """Draw a line between ranks i and j if `mixing[i][j]` (K × K) is not 0: i gets j's messages.

    Arrows show the messages that rank 0 gets. The ranks are on a circle, with rank 0 on top. With
    `columns`, they are in a grid, row by row. A line that would run through a third rank is bent.

    A dot shows its rank. With `values`, K numbers of 0 or more, a dot shows its value instead. A
    larger value is darker, up to twice the mean of all values. The rank is then written next to the
    dot, and in `explore` a tip names it.
    """
    from matplotlib.collections import PathCollection

    places, size = _places(len(mixing), columns), 110 if values is None else 450
    lines = []
    for rank, row in enumerate(mixing):
        for other, weight in enumerate(row):
            if not weight or other == rank:
                continue
            start, end = places[other], places[rank]
            bend = _bend(start, end, columns, len(mixing))
            if rank == 0:
                _arrow(ax, start, end, bend, math.sqrt(size) / 2)
            else:
                lines.append(_line(start, end, bend))
    # Draw all lines at once: there are up to 225 for 16 ranks, at each position of a slider.
    grey = PathCollection(lines, facecolor="none", edgecolor="0.75", linewidth=0.6, zorder=1)
    ax.add_collection(grey)
    _dots(ax, places, size, values)
    ax.set_aspect("equal")
    ax.margins(0.15)
    ax.axis("off")


def _bend(start: Place, end: Place, columns: int, count: int) -> float:
    """Return how far a line bends away from the straight line, as a share of its length."""
    if columns:
        return 0.3 if math.dist(start, end) > 1 else 0.0
    # On a large circle, a line to the second neighbour would run through the first: bend inwards.
    second = 2 * math.sin(2 * math.pi / count)
    if count < 10 or not math.isclose(math.dist(start, end), second):
        return 0.0
    return -math.copysign(0.3, start[0] * end[1] - start[1] * end[0])


def _arrow(ax: Axes, start: Place, end: Place, bend: float, short: float) -> None:
    style = {"arrowstyle": "-|>", "color": "#D55E00", "linewidth": 1.8, "zorder": 2}
    style |= {"connectionstyle": f"arc3,rad={bend}", "shrinkA": short, "shrinkB": short}
    ax.annotate("", xy=end, xytext=start, arrowprops=style)


def _line(start: Place, end: Place, bend: float) -> Path:
    """Return the path that an arrow of `_arrow` would take."""
    from matplotlib.path import Path

    right, up = end[0] - start[0], end[1] - start[1]
    middle = (start[0] + end[0]) / 2 + bend * up, (start[1] + end[1]) / 2 - bend * right
    if not bend:
        return Path([start, end])
    return Path([start, middle, end], [Path.MOVETO, Path.CURVE3, Path.CURVE3])


def _dots(ax: Axes, places: list[Place], size: int, values: Sequence[float] | None) -> None:
    from matplotlib import colormaps

    texts, fontsize = [f"{rank}" for rank in range(len(places))], 7
    faces: list[object] = ["white"] * len(places)
    if values is not None:
        texts, fontsize = [f"{value:.2f}" for value in values], 8
        most = 2 * sum(values) / len(values)
        faces = [colormaps["Blues"](0.6 * min(1.0, value / most)) for value in values]
    for rank, (x, y) in enumerate(places):
        dot = ax.scatter(x, y, s=size, color=[faces[rank]], edgecolor="black", linewidth=0.8)
        dot.set_zorder(3)
        ax.text(
            x,
            y,
            texts[rank],
            ha="center",
            va="center",
            fontsize=fontsize,
            zorder=4,
        )
        if values is not None:
            _name_beside(ax, rank, (x, y), on_circle=places[0] != (0, 0))
            tip(dot, f"rank {rank} holds {values[rank]:.4f}")


def _name_beside(ax: Axes, rank: int, place: Place, on_circle: bool) -> None:
    """Write the rank outside the circle, or in a grid at a position without straight lines."""
    from matplotlib.transforms import offset_copy

    (x, y), name = place, "rank 0" if rank == 0 else f"{rank}"
    style: dict[str, Any] = {"fontsize": 8, "color": "0.3"}
    if on_circle:
        ax.text(1.24 * x, 1.24 * y, name, ha="center", va="center", **style)
    else:
        off = offset_copy(ax.transData, ax.get_figure(root=True), x=-7, y=8, units="points")
        ax.text(x, y, name, ha="right", va="bottom", transform=off, **style)


def _places(count: int, columns: int) -> list[Place]:
    """Return where each rank is drawn."""
    if columns:
        return [(float(rank % columns), -float(rank // columns)) for rank in range(count)]
    turns = [2 * math.pi * rank / count for rank in range(count)]
    return [(math.sin(turn), math.cos(turn)) for turn in turns]
