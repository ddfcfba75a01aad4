"""The figure of a trace, or of several one above the other: ranks × time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.ranks.metered.recorder import Event
from course_lib.ranks.trace.trace import Trace, with_lanes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_LANES = 4
# Okabe and Ito's colours for the colour-blind, each with a hatch that also prints in grey.
_COMPUTE = ("#bbbbbb", "")
_STYLES = (
    ("#56b4e9", "//"),
    ("#e69f00", ".."),
    ("#009e73", "\\\\"),
    ("#cc79a7", "xx"),
    ("#f0e442", "--"),
    ("#d55e00", "++"),
    ("#0072b2", "oo"),
)


def draw_timelines(traces: Mapping[str, Trace]) -> Figure:
    """Draw traces, by title, one above the other on one axis of time.

    One row per rank, with a lane for computation and lanes for communication. The same kind of
    operation looks the same in all of them. Raises ValueError if a trace is empty.
    """
    if not all(trace.events for trace in traces.values()):
        raise ValueError("the trace is empty: run something that communicates first")
    from matplotlib.patches import Patch

    from course_lib.ranks.trace.figure import TraceFigure

    together = [event for trace in traces.values() for event in trace.events]
    kinds = dict.fromkeys(event.kind for event in sorted(together, key=lambda e: e.start))
    operations = [kind for kind in kinds if kind != "compute"]
    style = {"compute": _COMPUTE} if "compute" in kinds else {}
    style |= {kind: _STYLES[i % len(_STYLES)] for i, kind in enumerate(operations)}
    unit, scale = _unit(max(event.end for event in together))
    longest = max(event.end for event in together) * scale
    rows = [(title, with_lanes(trace.events), trace.world_size) for title, trace in traces.items()]
    heights = [_height(placed, world_size) for _, placed, world_size in rows]
    figure = TraceFigure(figsize=(9, sum(heights)), dpi=100, layout="constrained")
    all_axes = figure.subplots(len(rows), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, placed, world_size) in zip(all_axes, rows, strict=True):
        _draw_rows(axes, placed, world_size, style, scale, longest)
        if len(rows) > 1:
            axes.set_title(title, loc="left", fontsize=11)
    all_axes[-1].set_xlabel(f"time ({unit})")
    figure.legend(
        handles=[
            Patch(facecolor=color, edgecolor="black", hatch=hatch, label=kind)
            for kind, (color, hatch) in style.items()
        ],
        loc="outside upper right",
        ncols=min(5, len(style)),
        frameon=False,
    )
    if len(rows) == 1 and rows[0][0]:
        figure.suptitle(rows[0][0], x=0.01, ha="left", fontsize=11)
    return figure


def _height(placed: Sequence[tuple[Event, int]], world_size: int) -> float:
    return max(2.2, 0.9 + world_size * min(0.9, 0.28 * _lanes(placed), 7.0 / world_size))


def _lanes(placed: Sequence[tuple[Event, int]]) -> int:
    return min(MAX_LANES, max(lane for _, lane in placed)) + 1


def _draw_rows(
    axes: Any,
    placed: Sequence[tuple[Event, int]],
    world_size: int,
    style: Mapping[str, tuple[str, str]],
    scale: float,
    longest: float,
) -> None:
    lanes = _lanes(placed)
    thickness = 0.84 / lanes
    for event, lane in placed:
        color, hatch = style[event.kind]
        top = event.rank - 0.42 + min(lane, lanes - 1) * thickness
        start, width = event.start * scale, (event.end - event.start) * scale
        axes.broken_barh(
            [(start, max(width, longest * 5e-4))],
            (top, thickness * 0.94),
            facecolor=color,
            edgecolor="black",
            linewidth=0.4,
            hatch=hatch,
        )
        _write_name(axes, event, start, width, top + thickness / 2, longest, thickness)
    axes.set_ylim(world_size - 0.5, -0.5)
    axes.set_xlim(0, longest * 1.01)
    every = max(1, world_size // 16)
    axes.set_yticks(range(0, world_size, every), [f"rank {r}" for r in range(0, world_size, every)])
    for line in range(1, world_size):
        axes.axhline(line - 0.5, color="black", linewidth=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _unit(seconds: float) -> tuple[str, float]:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return unit, scale
    return "µs", 1e6


def _write_name(
    axes: Any, event: Event, start: float, width: float, y: float, longest: float, thickness: float
) -> None:
    """Write the operation into its bar, where it fits."""
    name = {"send": f"→{event.peer}", "recv": f"←{event.peer}"}.get(event.kind, event.kind)
    if event.kind == "compute" or len(name) * 0.011 > width / longest or thickness < 0.12:
        return
    axes.text(
        start + width / 2, y, name, ha="center", va="center", fontsize=7,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.6},
    )  # fmt: skip
