"""A drawing of who hears whom: one dot for each rank, one line for each message.

    >>> from matplotlib.figure import Figure
    >>> from course_lib.figures import communication_graph
    >>> communication_graph(Figure().subplots(), [[0.5, 0.5], [0.5, 0.5]])

The messages that one rank hears are thick arrows in colour; so they stand out in grey as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # matplotlib takes half a second to import; most ranks never draw
    from matplotlib.axes import Axes


def communication_graph(ax: Axes, mixing: Sequence[Sequence[float]], *, columns: int = 0) -> None:
    """Draw a line between ranks i and j where `mixing[i][j]`, K × K, is not 0: i hears j.

    Arrows show whom rank 0 hears. The ranks sit on a circle, rank 0 on top; with `columns` in a
    grid, row by row. There, lines between ranks that are not side by side are bent.
    """
    places = _places(len(mixing), columns)
    for rank, row in enumerate(mixing):
        for other, weight in enumerate(row):
            if not weight or other == rank:
                continue
            far = columns and math.dist(places[rank], places[other]) > 1
            bend = f"arc3,rad={0.3 if far else 0}"
            style = {"arrowstyle": "-", "color": "0.75", "linewidth": 0.6, "zorder": 1}
            if rank == 0:
                style = {"arrowstyle": "-|>", "color": "#D55E00", "linewidth": 1.8, "zorder": 2}
            style |= {"connectionstyle": bend, "shrinkA": 5, "shrinkB": 5}
            ax.annotate("", xy=places[rank], xytext=places[other], arrowprops=style)
    xs, ys = zip(*places, strict=True)
    ax.scatter(xs, ys, s=110, facecolor="white", edgecolor="black", linewidth=0.8, zorder=3)
    for rank, (x, y) in enumerate(places):
        ax.text(x, y, str(rank), ha="center", va="center", fontsize=7, zorder=4)
    ax.set_aspect("equal")
    ax.margins(0.15)
    ax.axis("off")


def _places(count: int, columns: int) -> list[tuple[float, float]]:
    """Return where each rank is drawn."""
    if columns:
        return [(float(rank % columns), -float(rank // columns)) for rank in range(count)]
    turns = [2 * math.pi * rank / count for rank in range(count)]
    return [(math.sin(turn), math.cos(turn)) for turn in turns]
