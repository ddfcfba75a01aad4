"""The map as a figure: a letter, a colour and a hatch show each network's winner."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from course_lib.ranks.trace.bars import styles_of
from course_lib.who_wins.algorithms import ALGORITHMS
from course_lib.who_wins.report import bandwidth_words, latency_words
from course_lib.who_wins.winners import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle


def map_figure(cells: Sequence[Cell], panels: Mapping[str, Sequence[str]]) -> "Figure":
    """Draw one map per panel; `panels` maps its title to the algorithms that compete in it.

    A letter in brackets means that the winner is not clear. Colours and hatches are the same in all
    panels; the legend shows only algorithms that win somewhere.
    """
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    winners = {cell.order(names)[0] for names in panels.values() for cell in cells}
    shown = [name for name in ALGORITHMS if name in winners]
    styles = styles_of(shown)
    latencies = sorted({cell.place[0] for cell in cells})
    bandwidths = sorted({cell.place[1] for cell in cells})
    width = 1.3 + 0.75 * len(bandwidths)
    figure, axes = plt.subplots(
        1, len(panels), squeeze=False, layout="constrained",
        figsize=(width * len(panels) + 1.6, 1.6 + 0.6 * len(latencies)),
    )  # fmt: skip
    for ax, (title, names) in zip(axes[0], panels.items(), strict=True):
        for cell in cells:
            _draw(ax, cell, names, latencies, bandwidths, styles)
        ax.set_title(title, loc="left", fontsize=10)
        words = [bandwidth_words(each) for each in bandwidths]
        ax.set_xticks(range(len(bandwidths)), words, fontsize=8)
        ax.set_yticks(
            range(len(latencies)), [latency_words(each) for each in latencies], fontsize=8
        )
        ax.set(xlim=(-0.5, len(bandwidths) - 0.5), ylim=(-0.5, len(latencies) - 0.5))
        ax.set_xlabel("bandwidth", fontsize=9)
        ax.grid(visible=False)
    axes[0, 0].set_ylabel("latency", fontsize=9)
    handles = [
        Patch(
            facecolor=styles[name][0], hatch=styles[name][1], edgecolor="black",
            label=f"{ALGORITHMS[name].letter}  {name}",
        )
        for name in shown
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
    return figure


def _draw(
    ax: "Axes",
    cell: Cell,
    names: Sequence[str],
    latencies: Sequence[float],
    bandwidths: Sequence[float],
    styles: Mapping[str, tuple[str, str]],
) -> None:
    name = cell.order(names)[0]
    color, hatch = styles[name]
    y, x = latencies.index(cell.place[0]), bandwidths.index(cell.place[1])
    ax.add_patch(_rectangle(x, y, color, hatch))
    letter = ALGORITHMS[name].letter
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    text = letter if cell.is_clear(names) else f"({letter})"
    ax.text(x, y, text, ha="center", va="center", fontsize=11, bbox=box)


def _rectangle(x: float, y: float, color: str, hatch: str) -> "Rectangle":
    from matplotlib.patches import Rectangle

    return Rectangle(
        (x - 0.5, y - 0.5), 1, 1, facecolor=color, hatch=hatch, edgecolor="black", linewidth=0.6
    )


def in_words(cells: Sequence[Cell], names: Sequence[str]) -> str:
    """Return a map as one sentence per latency, for people who cannot see the figure."""
    lines = []
    for latency in sorted({cell.place[0] for cell in cells}):
        row = sorted((c for c in cells if c.place[0] == latency), key=lambda c: c.place[1])
        won = [f"{bandwidth_words(cell.place[1])} {cell.order(names)[0]}" for cell in row]
        lines.append(f"at {latency_words(latency)}: {', '.join(won)}")
    return "; ".join(lines)


def race_figure(panels: Mapping[str, Mapping[str, tuple[float, float]]]) -> "Figure":
    """Draw steps to the target over the seconds of a step, one panel per network.

    `panels[title][algorithm]` is (steps, seconds of a step). Both axes are logarithmic, so the
    product, the time to the target, is constant along each thin line. Lower and further left is
    earlier.
    """
    import matplotlib.pyplot as plt

    points = [point for panel in panels.values() for point in panel.values()]
    steps = [point[0] for point in points]
    seconds = [point[1] for point in points]
    figure, axes = plt.subplots(
        1, len(panels), squeeze=False, sharex=True, sharey=True, layout="constrained",
        figsize=(2.5 * len(panels) + 0.6, 3.0),
    )  # fmt: skip
    left, right = min(seconds) / 2, 2 * max(seconds)
    for ax, (title, panel) in zip(axes[0], panels.items(), strict=True):
        for exponent in range(-6, 14):
            product = 10 ** (exponent / 2)
            ax.plot(
                [left, right], [product / left, product / right],
                color="0.8", linewidth=0.8, linestyle="-", marker="", zorder=0,
            )  # fmt: skip
        for name, (count, pace) in panel.items():
            ax.text(pace, count, ALGORITHMS[name].letter, ha="center", va="center", fontsize=12,
                    bbox={"facecolor": "white", "edgecolor": "black", "pad": 2})  # fmt: skip
        ax.set(xscale="log", yscale="log", xlim=(left, right), xlabel="seconds per step")
        ax.set_ylim(min(steps) / 1.6, 1.6 * max(steps))
        ax.set_title(title, loc="left", fontsize=10)
        ax.grid(visible=False)
        ticks = [20, 30, 50, 80]
        ax.set_yticks(ticks, [str(each) for each in ticks])
        ax.set_yticks([], minor=True)
    axes[0, 0].set_ylabel("steps to the target")
    return figure
