"""The map as a figure: each network's cell has the name of its winner."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from course_lib.ranks.trace.bars import styles_of
from course_lib.who_wins.algorithms import ALGORITHMS
from course_lib.who_wins.report import bandwidth_words, latency_words
from course_lib.who_wins.winners import Cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def map_figure(cells: Sequence[Cell], panels: Mapping[str, Sequence[str]]) -> "Figure":
    """Draw one map per panel; `panels` maps its title to the algorithms that compete in it.

    If the winner is not clear, the cell also names its first rival. An algorithm has the same
    colour in all panels.
    """
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    winners = {cell.order(names)[0] for names in panels.values() for cell in cells}
    styles = styles_of([name for name in ALGORITHMS if name in winners])
    latencies = sorted({cell.place[0] for cell in cells})
    bandwidths = sorted({cell.place[1] for cell in cells})
    figure, axes = plt.subplots(
        1, len(panels), squeeze=False, layout="constrained",
        figsize=((0.6 + 1.3 * len(bandwidths)) * len(panels), 1.0 + 0.75 * len(latencies)),
    )  # fmt: skip
    for ax, (title, names) in zip(axes[0], panels.items(), strict=True):
        for cell in cells:
            y, x = latencies.index(cell.place[0]), bandwidths.index(cell.place[1])
            color, _ = styles[cell.order(names)[0]]
            ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, alpha=0.35))
            ax.text(x, y, _words(cell, names), ha="center", va="center", fontsize=9)
        ax.set_title(title, loc="left", fontsize=10)
        words = [bandwidth_words(each) for each in bandwidths]
        ax.set_xticks(range(len(bandwidths)), words, fontsize=9)
        words = [latency_words(each) for each in latencies]
        ax.set_yticks(range(len(latencies)), words, fontsize=9)
        ax.set(xlim=(-0.5, len(bandwidths) - 0.5), ylim=(-0.5, len(latencies) - 0.5))
        ax.set_xlabel("bandwidth", fontsize=9)
        ax.grid(visible=False)
    axes[0, 0].set_ylabel("latency", fontsize=9)
    return figure


def _words(cell: Cell, names: Sequence[str], beside: str = "\nor ") -> str:
    """Return the winner's name; if the winner is not clear, also the name of its first rival."""
    first, rivals = cell.order(names)[0], cell.rivals(names)
    return first + beside + rivals[0] if rivals else first


def in_words(cells: Sequence[Cell], names: Sequence[str]) -> str:
    """Return a map as one sentence per latency, for people who cannot see the figure."""
    lines = []
    for latency in sorted({cell.place[0] for cell in cells}):
        row = sorted((c for c in cells if c.place[0] == latency), key=lambda c: c.place[1])
        won = [f"{bandwidth_words(cell.place[1])} {_words(cell, names, ' or ')}" for cell in row]
        lines.append(f"at {latency_words(latency)}: {', '.join(won)}")
    return "; ".join(lines)
