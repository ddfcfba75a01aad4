"""Show figures, and draw timelines and curves, in the style of the course.

About one man in twelve confuses some colours, and a black-and-white printer loses all of them. So
with `use_course_style`, lines also differ in line style and marker. In `timelines`, bars also
differ in hatch. The colours are from M. Okabe and K. Ito, "Color Universal Design", 2008.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.ranks.trace.bars import Bar, draw_bars, styles_of

if TYPE_CHECKING:  # matplotlib takes half a second to import; most ranks never draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Span = tuple[int, str, float, float, str]
"""`(rank, lane, start, stop, label)`: what one rank did in one lane, such as "compute"."""

# Okabe and Ito's colours without yellow, which is too faint on white, and with black last.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINES = ("-", "--", "-.", ":", (0, (6, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


class Described:
    """A picture with its description, in the form that IPython's `display` needs."""

    def __init__(self, bundle: dict[str, str]) -> None:
        self._bundle = bundle

    def __repr__(self) -> str:
        return self._bundle["text/plain"]  # printed outside a notebook

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return self._bundle


def show(fig: Figure, *, alt: str) -> None:
    """Display `fig` in the notebook with the alternative text `alt`, and close it.

    Outside a notebook the alternative text is printed instead. Closing frees the figure, and
    prevents the notebook from displaying it a second time without its description.

    Raises ValueError if `alt` is empty or blank. The figure then stays open.
    """
    if not alt.strip():
        raise ValueError(
            "alt is empty: say in a sentence what the figure shows, for those who cannot see it, "
            'as in show(fig, alt="The loss falls from 2.3 to 0.2 within 30 steps.")'
        )
    import matplotlib.pyplot as plt
    from IPython.display import display

    from course_lib.ranks.trace.figure import described, png_of

    bundle = described(png_of(fig), " ".join(alt.split()))
    plt.close(fig)
    display(Described(bundle))


def use_course_style() -> None:
    """Set matplotlib's defaults for the course: legible, small, no information in colour alone.

    There are seven kinds of lines, which differ in colour, line style and marker at once. If points
    are close together, as on a loss curve, only one marker is drawn per 5% of the axes' diagonal;
    `markevery=1` marks all points. The sizes make a figure readable at the width of a notebook, and
    its PNG smaller than 100 kB.
    """
    import matplotlib
    from cycler import cycler

    matplotlib.rcParams.update(
        {
            "axes.prop_cycle": cycler(color=_COLORS)
            + cycler(linestyle=_LINES)
            + cycler(marker=_MARKERS)
            + cycler(markevery=[0.05] * len(_MARKERS)),
            "lines.linewidth": 1.5,
            "lines.markersize": 5,
            "hatch.linewidth": 0.6,
            "figure.figsize": (6.4, 3.6),
            "figure.dpi": 100,
            "savefig.dpi": 100,
            "figure.facecolor": "white",
            "savefig.facecolor": "white",
            "font.size": 11,
            "axes.titlesize": 12,
            "axes.titlelocation": "left",  # the legend of timelines is at the right
            "legend.fontsize": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.3,
        }
    )


def timelines(
    panels: Mapping[str, Iterable[Span]],
    *,
    unit: str = "s",
    end: float | None = None,
    one_at_a_time: bool = False,
) -> Figure:
    """Draw when each rank did what, by title, one panel above the other; return the figure.

    Time goes to the right, and each rank has a row, rank 0 on top. `panels[title]` are tuples
    `(rank, lane, start, stop, label)`, with times in `unit`. Within a row every lane has its own
    strip, so that computation and communication that overlap in time do not hide each other. If
    spans of one lane overlap, they are spread over several strips. If each rank does
    `one_at_a_time`, as in a pipeline, its row is a single strip.

    A lane has the same position, colour and hatch in all panels, which makes them easy to compare;
    the legend above explains them. A label is written into its span if it fits. The axis ends at
    `end`, in `unit`, or where the last span stops.
    """
    import matplotlib.pyplot as plt

    spans_by_title = {title: list(spans) for title, spans in panels.items()}
    lanes = _lanes_of(spans_by_title.values())
    first = dict(zip(lanes, itertools.accumulate(lanes.values(), initial=0), strict=False))
    strips, height = sum(lanes.values()), 0.21 * sum(lanes.values())
    if one_at_a_time:
        first, strips, height = dict.fromkeys(lanes, 0), 1, 0.3
    ranks = [sorted({span[0] for span in spans}) for spans in spans_by_title.values()]
    heights = [0.45 + height * len(rows) for rows in ranks]
    figure, axes = plt.subplots(
        len(panels), 1, sharex=True, squeeze=False, layout="constrained",
        figsize=(9.6, 0.7 + sum(heights)), height_ratios=heights,
    )  # fmt: skip
    if end is None:
        end = max(span[3] for spans in spans_by_title.values() for span in spans)
    for ax, (title, spans), rows in zip(axes[:, 0], spans_by_title.items(), ranks, strict=True):
        # Set the limits before labels are drawn, which must know whether they fit.
        ax.set_xlim(min(0.0, *(span[2] for span in spans)), end)
        bars = [
            Bar(rank, first[lane] + strip, lane, start, stop, label)
            for (rank, lane, start, stop, label), strip in _placed(spans)
        ]
        draw_bars(ax, bars, styles_of(list(lanes)), ranks=rows, strips=strips)
        ax.grid(visible=False, axis="y")
        ax.set_title(title, loc="left", fontsize=11)
    axes[-1, 0].set_xlabel(f"time ({unit})")
    # The legend of any panel has all lanes, even the lanes that the panel does not use.
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(),
        loc="outside upper right", ncols=len(lanes), frameon=False,
    )  # fmt: skip
    return figure


def order_of_rows(ax: Axes, epochs: Sequence[Sequence[Sequence[int]]], *, title: str = "") -> None:
    """Draw which rows of a data set each rank uses: a block per epoch, a column per step.

    `epochs[e][r]` are the rows of rank r in epoch e, one for each step. A rank has a line and a
    colour; the number in a cell is the row.
    """
    from matplotlib.patches import Rectangle

    ranks, steps = len(epochs[0]), len(epochs[0][0])
    for epoch, rows_of_ranks in enumerate(epochs):
        left = epoch * (steps + 1)
        for rank, rows in enumerate(rows_of_ranks):
            color = f"C{rank % 10}"
            for step, row in enumerate(rows):
                cell = Rectangle((left + step, rank), 1, 1, fc=color, ec="black", alpha=0.35)
                ax.add_patch(cell)
                ax.text(left + step + 0.5, rank + 0.5, f"{row}", ha="center", va="center")
    ax.set(xlim=(0, len(epochs) * (steps + 1) - 1), ylim=(ranks, 0))
    ax.set_xticks(
        [epoch * (steps + 1) + steps / 2 for epoch in range(len(epochs))],
        [f"epoch {epoch}, {steps} steps" for epoch in range(len(epochs))],
    )
    ax.set_yticks([rank + 0.5 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(title, loc="left")
    ax.grid(visible=False)


def _lanes_of(panels: Iterable[Sequence[Span]]) -> dict[str, int]:
    """Return the lanes, in order of appearance, with the number of strips that each needs."""
    lanes: dict[str, int] = {}
    for spans in panels:
        lanes |= {lane: lanes.get(lane, 1) for _, lane, *_ in spans}
        for (_, lane, *_), strip in _placed(spans):
            lanes[lane] = max(lanes[lane], strip + 1)
    return lanes


def _placed(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Return each span with its strip in its lane: 0, or more if spans overlap in time."""
    free: dict[tuple[int, str], list[float]] = {}
    unseen = max(abs(span[3]) for span in spans) / 2000
    placed = []
    for span in sorted(spans, key=lambda span: span[2]):
        rank, lane, start, stop, _ = span
        ends = free.setdefault((rank, lane), [])
        strip = next((i for i, end in enumerate(ends) if end <= start + unseen), len(ends))
        ends[strip : strip + 1] = [stop]
        placed.append((span, strip))
    return placed


def error_curves(
    xs: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    xlabel: str,
    title: str,
    ylabel: str = "relative error",
) -> Figure:
    """Draw curves over `xs` on two logarithmic axes, with names at their ends; return the figure.

    `curves[name][i]` is positive and belongs to `xs[i]`. A power law is a straight line.
    """
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(7.4, 3.6), layout="constrained")
    for name, values in curves.items():
        ax.plot(xs, values, label=name, markevery=1)
    ax.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel, title=title)
    plain_ticks(ax)
    if max(xs) < 1000:
        ax.set_xticks(xs, [f"{x:g}" for x in xs])
        ax.set_xticks([], minor=True)
    label_ends(ax)
    return figure


def label_ends(ax: Axes) -> None:
    """Write the name of each line next to its last point, in the line's colour.

    Names that would overlap move apart. Call this last: it needs the final limits and scales.
    """
    import matplotlib

    ax.get_xlim(), ax.get_ylim()  # matplotlib computes the limits when they are read
    lines = [line for line in ax.lines if not str(line.get_label()).startswith("_")]
    places = []
    for line in lines:
        points: Any = line.get_path().vertices
        places.append(tuple((ax.transData - ax.transAxes).transform(points[-1])))
    inches = ax.bbox.height / matplotlib.rcParams["figure.dpi"]
    heights = _apart([min(max(y, 0.03), 1.0) for _, y in places], 13 / 72 / inches)
    for line, (x, _), y in zip(lines, places, heights, strict=True):
        ax.annotate(
            str(line.get_label()), (min(x, 1.0) + 0.015, y), xycoords="axes fraction",
            color=line.get_color(), fontsize=10, va="center",
        )  # fmt: skip


def _apart(places: Sequence[float], gap: float) -> list[float]:
    """Return `places`, moved only as far as needed, so that any two are at least `gap` apart."""
    moved = list(places)
    order = sorted(range(len(moved)), key=moved.__getitem__)
    for _ in range(200):
        for below, above in itertools.pairwise(order):
            if (overlap := gap - (moved[above] - moved[below])) > 1e-6:
                moved[below] -= overlap / 2
                moved[above] += overlap / 2
    return moved


def plain_ticks(ax: Axes) -> None:
    """Label the logarithmic axes of `ax` in plain numbers: 0.1, 20, 5,000, 10 M.

    If an axis covers less than two and a half powers of ten, 2 and 5 are also labelled. Numbers
    below a ten-thousandth stay powers of ten.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis, limits in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
        if axis.get_scale() == "log":
            steps = (1, 2, 5) if limits[1] < 300 * limits[0] else (1,)
            axis.set_major_locator(LogLocator(subs=steps))
            axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
            axis.set_minor_formatter(NullFormatter())


def _plain(value: float) -> str:
    """Return a positive number as people write it: 0.1, 20, 5,000, 10 M."""
    for size, letter in ((1e9, " G"), (1e6, " M")):
        if value >= size:
            return f"{value / size:,g}{letter}"
    if value < 0.99e-4:
        return f"$10^{{{math.log10(value):.0f}}}$"
    return f"{value:,.5f}".rstrip("0").rstrip(".")


def bytes_and_quality(runs: Mapping[str, tuple[float, float, float]]) -> Figure:
    """Draw the accuracy of runs, one line for each, with the bytes that it sent; return the figure.

    `runs[name]` is `(bytes, mean, half)`: the accuracy is between mean - half and mean + half.
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import PercentFormatter

    figure, ax = plt.subplots(figsize=(8.4, 1.2 + 0.32 * len(runs)), layout="constrained")
    for place, (_, mean, half) in enumerate(runs.values()):
        ax.errorbar(
            mean, place, xerr=half, color=_COLORS[0], marker="o", capsize=4, linestyle="none",
            markevery=1,
        )  # fmt: skip
    names = [f"{name}: {nbytes:,.0f} bytes" for name, (nbytes, _, _) in runs.items()]
    ax.set_yticks(range(len(runs)), names)
    ax.invert_yaxis()
    ax.xaxis.set_major_formatter(PercentFormatter(1, 0))
    ax.set_xlabel("accuracy on the test rows, and its 95 % interval")
    return figure
