"""A map of the fastest algorithm for each size and number of ranks.

    >>> from matplotlib.figure import Figure
    >>> from course_lib.figures import winner_map
    >>> ax = Figure().subplots()
    >>> winner_map(ax, [1e3, 1e6], {2: ["tree", "ring"], 4: ["tree", "tree"]})

Each winner has its own colour and its own hatch, so the map can also be read in grey.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from course_lib.ranks.trace.bars import styles_of

if TYPE_CHECKING:  # matplotlib takes half a second to import; most ranks never draw
    from matplotlib.axes import Axes


def winner_map(
    ax: Axes, xs: Sequence[float], winners: Mapping[int, Sequence[str]], names: Sequence[str] = ()
) -> None:
    """Draw which name wins at each x and y.

    `winners[y][i]` is the name of the winner at `xs[i]` and the integer y. `xs` must increase; they
    are drawn on a logarithmic axis. Each name has its own colour and hatch, and is written where
    its area has most room. Maps with the same `names`, in the same order, use the same look for
    each name.
    """
    styles = styles_of([*names, *(name for row in winners.values() for name in row)])
    edges = [xs[0], *(math.sqrt(a * b) for a, b in itertools.pairwise(xs)), xs[-1]]
    areas: dict[str, dict[int, list[tuple[float, float]]]] = {name: {} for name in styles}
    for y, row in winners.items():
        start = 0
        for name, group in itertools.groupby(row):
            stop = start + len(list(group))
            areas[name].setdefault(y, []).append((edges[start], edges[stop]))
            start = stop
    for name, area in areas.items():
        if not area:
            continue  # it wins nowhere
        color, hatch = styles[name]
        for y, runs in area.items():
            ax.broken_barh(
                [(left, right - left) for left, right in runs], (y - 0.5, 1),
                facecolor=color, hatch=hatch, edgecolor="black", linewidth=0, alpha=0.7,
            )  # fmt: skip
        _, _, x, y = max(_room(area, y, *run) for y, runs in area.items() for run in runs)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
        ax.text(x, y, name, ha="center", va="center", bbox=box)
    ax.set(xscale="log", xlim=(xs[0], xs[-1]), ylim=(min(winners) - 0.5, max(winners) + 0.5))
    ax.grid(visible=False)


def _room(
    area: Mapping[int, Sequence[tuple[float, float]]], y: int, left: float, right: float
) -> tuple[float, float, float, int]:
    """Return the width of the area around a run of row y, the width of the run, and the middle."""
    width, a, b = right / left, left, right
    for near in (y - 1, y + 1, y - 2, y + 2):
        shared = [(max(a, c), min(b, d)) for c, d in area.get(near, ())]
        a, b = max(shared, key=lambda run: run[1] / run[0], default=(1.0, 0.0))
        if b <= a:
            return 1.0, width, math.sqrt(left * right), y
    return b / a, width, math.sqrt(a * b), y
