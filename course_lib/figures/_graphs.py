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

if TYPE_CHECKING:  # matplotlib takes half a second to import; most ranks never draw
    from matplotlib.axes import Axes

_LINE: dict[str, Any] = {"arrowstyle": "-", "color": "0.75", "linewidth": 0.6}
_ARROW: dict[str, Any] = {"arrowstyle": "-|>", "color": "#D55E00", "linewidth": 1.8}
_RADIUS = 5.2
"""Of a dot, in points."""


def communication_graph(ax: Axes, mixing: Sequence[Sequence[float]], *, columns: int = 0) -> None:
    """Draw a line between ranks i and j if `mixing[i][j]` (K × K) is not 0: i gets j's messages.

    Arrows show the messages that rank 0 gets. The ranks are on a circle, with rank 0 on top. With
    `columns`, they are in a grid, row by row. A line that would run through a third rank is bent.
    """
    places = [_place(rank, len(mixing), columns) for rank in range(len(mixing))]
    for rank, row in enumerate(mixing):
        for other, weight in enumerate(row):
            if not weight or other == rank:
                continue
            start, end = places[other], places[rank]
            short = {"shrinkA": _RADIUS, "shrinkB": _RADIUS}
            bend = 0.3 if columns and math.dist(start, end) > 1 else 0.0
            look = (
                (_ARROW if rank == 0 else _LINE) | short | {"connectionstyle": f"arc3,rad={bend}"}
            )
            ax.annotate("", end, start, arrowprops=look, zorder=2 if rank == 0 else 1)
    for rank, (x, y) in enumerate(places):
        ax.scatter(
            x, y, s=(2 * _RADIUS) ** 2, color="white", edgecolor="black", linewidth=0.8, zorder=3
        )
        ax.text(x, y, f"{rank}", ha="center", va="center", fontsize=7, zorder=4)
    ax.set_aspect("equal", adjustable="datalim")  # the axes stay as high as their neighbours
    ax.margins(0.15)
    ax.axis("off")


def _place(rank: int, count: int, columns: int) -> tuple[float, float]:
    if columns:
        return float(rank % columns), -float(rank // columns)
    turn = 2 * math.pi * rank / count
    return math.sin(turn), math.cos(turn)
