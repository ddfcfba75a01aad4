"""The map as a figure: each network's cell has the name of its winner, and how far it is ahead."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from course_lib.who_wins.report import bandwidth_words, latency_words
from course_lib.who_wins.winners import Cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def map_figure(cells: Sequence[Cell]) -> "Figure":
    """Draw the map.

    A cell is the darker, the longer the second takes (`Cell.lead`), and has that factor as a
    number. If the winner is not clear, the cell also names its first rival.
    """
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    latencies = sorted({cell.place[0] for cell in cells})
    bandwidths = sorted({cell.place[1] for cell in cells})
    size = (1.6 + 1.3 * len(bandwidths), 1.0 + 0.75 * len(latencies))
    figure, ax = plt.subplots(layout="constrained", figsize=size)
    grid = [[1.0] * len(bandwidths) for _ in latencies]
    for cell in cells:
        y, x = latencies.index(cell.place[0]), bandwidths.index(cell.place[1])
        grid[y][x] = cell.lead()
        names = "\nor ".join([cell.order()[0], *cell.rivals()[:1]])
        ax.text(x, y, f"{names}\n{cell.lead():.2f} ×", ha="center", va="center", fontsize=9)
    shades = ax.imshow(grid, cmap="Oranges", norm=LogNorm(1, 2), origin="lower", aspect="auto")
    count = len(cells[0].seconds)
    ax.set_title(f"{count} algorithms: who is first, and by what factor", loc="left", fontsize=10)
    ax.set_xticks(range(len(bandwidths)), [bandwidth_words(value) for value in bandwidths])
    ax.set_yticks(range(len(latencies)), [latency_words(value) for value in latencies])
    ax.set(xlabel="bandwidth", ylabel="latency")
    ax.grid(visible=False)
    bar = figure.colorbar(shades, ax=ax, label="the second's seconds / the winner's")
    bar.set_ticks([1, 1.2, 1.5, 2], labels=["1", "1.2", "1.5", "2 or more"], minor=False)
    bar.ax.minorticks_off()
    return figure
