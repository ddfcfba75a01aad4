"""Figures that everybody can read: shown with a description, and not by colour alone.

A figure carries its claim to somebody who cannot see it only through its *alternative text*, which
a screen reader speaks. Notebook front ends drop the description of a plain image, so `show` writes
the figure as HTML, `<img alt="…">`, which JupyterLab, GitHub-like viewers and exported pages keep.

A good alternative text states what the figure shows, not that it is a figure: "The variance falls
from 0.8 at B = 1 to 0.006 at B = 128, along the line 1/B", rather than "plot of the variance".

About one man in twelve confuses some colours, and printers lose them all. `use_course_style` varies
line style and marker together with the colour, and `timeline` hatches together with it. The colours
are those of M. Okabe and K. Ito, "Color Universal Design", 2008.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # matplotlib takes half a second to import; most ranks never draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Span = tuple[int, str, float, float, str]
"""`(rank, lane, start, stop, label)`: what one rank did in one lane, such as "compute"."""

# Okabe and Ito's colours without yellow, which is too faint on white, and with black last.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINES = ("-", "--", "-.", ":", (0, (6, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# One fewer than colours: the pairs repeat only after 7 * 6 lanes.
_HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---")


class _Described:
    """A PNG with its description, as IPython's `display` asks for it."""

    def __init__(self, png: bytes, alt: str) -> None:
        self._png, self._alt = base64.b64encode(png).decode("ascii"), alt

    def __repr__(self) -> str:
        return self._alt  # what is printed where there is no notebook

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        alt = html.escape(self._alt, quote=True)
        return {
            "text/html": f'<img alt="{alt}" src="data:image/png;base64,{self._png}">',
            "image/png": self._png,
            "text/plain": self._alt,
        }


def show(fig: Figure, *, alt: str) -> None:
    """Display `fig` in the notebook with the alternative text `alt`, and close it.

    Outside of a notebook the alternative text is printed instead. Closing frees the figure and
    keeps the notebook from displaying it a second time, without its description.

    Raises ValueError if `alt` is empty or blank; the figure then stays open.
    """
    if not alt.strip():
        raise ValueError(
            "alt is empty: say in a sentence what the figure shows, for those who cannot see it, "
            'as in show(fig, alt="The loss falls from 2.3 to 0.2 within 30 steps.")'
        )
    import matplotlib.pyplot as plt
    from IPython.display import display

    png = io.BytesIO()
    # Software=None leaves matplotlib's version out: the same figure gives the same bytes.
    fig.savefig(png, format="png", bbox_inches="tight", metadata={"Software": None})
    plt.close(fig)
    display(_Described(png.getvalue(), " ".join(alt.split())))


def use_course_style() -> None:
    """Set matplotlib's defaults for the course: legible, small, and not by colour alone.

    Lines differ in colour, line style and marker at once, seven ways. Where points lie close, as on
    a loss curve, only one in every 5% of the axes' diagonal gets its marker; `markevery=1` marks
    all. Sizes are chosen so that a figure is readable at the width of a notebook and its PNG stays
    under 100 kB.
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
            "axes.titlelocation": "left",  # at the right, timelines have their legend
            "legend.fontsize": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.3,
        }
    )


def timeline(ax: Axes, spans: Iterable[Span], *, unit: str = "s") -> None:
    """Draw what each rank did when: time to the right, a row for each rank, rank 0 on top.

    `spans` are tuples `(rank, lane, start, stop, label)`, with times in `unit`. Within a row every
    lane has a strip of its own, so that work which overlaps in time (computation and communication)
    does not hide each other; a lane has one colour and one hatch, named in the legend above. The
    label is written into its span if it fits.

    Raises ValueError if there are no spans, or one stops before it starts.
    """
    spans = list(spans)
    if not spans:
        raise ValueError("no spans to draw: record a run first")
    for rank, lane, start, stop, _ in spans:
        if stop < start:
            raise ValueError(f"a span of rank {rank} in {lane!r} stops at {stop}, before {start}")
    ranks = sorted({span[0] for span in spans})
    lanes = list(dict.fromkeys(span[1] for span in spans))  # in order of appearance
    strip = 0.84 / len(lanes)  # a rank's row is 1 high, with a gap before the next

    for number, lane in enumerate(lanes):
        for row, rank in enumerate(ranks):
            bars = [(span[2], span[3] - span[2]) for span in spans if span[:2] == (rank, lane)]
            ax.broken_barh(
                bars,
                (row - 0.42 + number * strip, strip),
                facecolor=_COLORS[number % len(_COLORS)],
                hatch=_HATCHES[number % len(_HATCHES)],
                edgecolor="white",
                linewidth=0.5,
                label=lane if row == 0 else None,
            )
    every = -(-len(ranks) // 16)  # more than 16 names would overlap
    ax.set_yticks(range(0, len(ranks), every), [f"rank {rank}" for rank in ranks[::every]])
    ax.set_ylim(len(ranks) - 0.5, -0.5)
    ax.set_xlabel(f"time ({unit})")
    ax.grid(visible=False, axis="y")
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(lanes), frameon=False)

    # Labels come last: whether one fits is known when the axes have their limits.
    left, right = ax.get_xlim()
    points = 72 / ax.figure.dpi  # per pixel
    points_per_unit = ax.bbox.width * points / (right - left)
    size = min(9.0, 0.7 * strip * ax.bbox.height * points / len(ranks))
    for rank, lane, start, stop, label in spans:
        wide_enough = 0.65 * size * len(label) + 4 < (stop - start) * points_per_unit
        if label and size > 4 and wide_enough:
            middle = ranks.index(rank) - 0.42 + (lanes.index(lane) + 0.5) * strip
            ax.text(
                (start + stop) / 2,
                middle,
                label,
                size=size,
                ha="center",
                va="center",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            )
