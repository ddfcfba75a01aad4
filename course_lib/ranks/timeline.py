"""The figure of a trace: ranks × time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from course_lib.ranks.events import Event
from course_lib.ranks.trace import with_lanes

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


def draw_timeline(events: Sequence[Event], world_size: int, title: str = "") -> Figure:
    """Draw one row per rank, with a lane for computation and lanes for communication.

    Raises ValueError if there are no events.
    """
    if not events:
        raise ValueError("the trace is empty: run something that communicates first")
    from matplotlib.patches import Patch

    from course_lib.ranks.trace_figure import TraceFigure

    placed = with_lanes(events)
    lanes = min(MAX_LANES, max(lane for _, lane in placed)) + 1
    kinds = list(dict.fromkeys(event.kind for event, _ in placed if event.kind != "compute"))
    style = {kind: _STYLES[i % len(_STYLES)] for i, kind in enumerate(kinds)}
    unit, scale = _unit(max(event.end for event in events))
    height = max(2.2, 0.9 + world_size * min(0.9, 0.28 * lanes, 7.0 / world_size))
    figure = TraceFigure(figsize=(9, height), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    thickness = 0.84 / lanes
    longest = max(event.end for event in events) * scale
    for event, lane in placed:
        color, hatch = _COMPUTE if event.kind == "compute" else style[event.kind]
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
    axes.set_xlabel(f"time ({unit})")
    for line in range(1, world_size):
        axes.axhline(line - 0.5, color="black", linewidth=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    present: list[Any] = []
    if any(event.kind == "compute" for event in events):
        present.append(Patch(facecolor=_COMPUTE[0], edgecolor="black", label="compute"))
    present += [
        Patch(facecolor=color, edgecolor="black", hatch=hatch, label=kind)
        for kind, (color, hatch) in style.items()
    ]
    figure.legend(
        handles=present, loc="outside upper right", ncols=min(5, len(present)), frameon=False
    )
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


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
