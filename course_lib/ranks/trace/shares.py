"""Draw ranks × time without room for every operation: the share of each kind in each moment.

Thousands of bars, each one pixel wide, show nothing, and their hatches take minutes to draw. Then
time is cut into equal moments. A kind is one shape per rank, as high as its share of each moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Span = tuple[float, float]
"""Start and stop."""

MOMENTS = 200
_LEAST = 0.15
"""Smallest height of a share, so that even a very short span can be seen."""


def shares(spans: Iterable[Span], start: float, stop: float, moments: int) -> list[float]:
    """Return which part of each of `moments` equal pieces of [start, stop] the spans cover.

    Time in which spans overlap counts once. A span without length adds no time, but its moment has
    a share of at least 1e-9, so that it is visible.
    """
    covered = [0.0] * moments
    width = (stop - start) / moments
    until = start
    for begin, end in sorted(spans):
        first = min(int((begin - start) / width), moments - 1)
        covered[first] = max(covered[first], 1e-9 * width)
        begin = max(begin, until)  # the time until here has already been counted
        until = max(until, end)
        at = max(0, min(int((begin - start) / width), moments - 1))
        while begin < end and at < moments:
            edge = end if at == moments - 1 else min(end, start + (at + 1) * width)
            covered[at] += max(0.0, edge - begin)
            begin, at = max(begin, edge), at + 1
    return [min(1.0, each / width) for each in covered]


def draw_shares(
    axes: Axes,
    spans: Mapping[tuple[int, str], Sequence[Span]],
    styles: Mapping[str, tuple[str, str]],
    rows: Mapping[int, float],
    height: float,
) -> None:
    """Draw, for each rank, a strip per kind, from top to bottom in the order of `styles`.

    Args:
        axes: axes in which y grows downwards.
        spans: (rank, kind) → spans.
        styles: kind → colour and hatch.
        rows: rank → top of its row.
        height: height of a row.

    """
    from matplotlib.collections import PolyCollection

    every = [span for each in spans.values() for span in each]
    start, stop = min(begin for begin, _ in every), max(end for _, end in every)
    strip = height / len(styles)
    for i, (kind, (color, hatch)) in enumerate(styles.items()):
        shapes = []
        for rank, top in rows.items():
            if (rank, kind) in spans:
                base = top + (i + 1) * strip
                parts = shares(spans[rank, kind], start, stop, MOMENTS)
                shapes += _steps(parts, start, (stop - start) / MOMENTS, base, 0.94 * strip)
        axes.add_collection(
            PolyCollection(shapes, facecolor=color, edgecolor="black", linewidth=0.2, hatch=hatch)
        )


def _steps(
    parts: Sequence[float], start: float, width: float, base: float, height: float
) -> list[list[tuple[float, float]]]:
    """Return the outlines of shapes that stand on `base`: one for each stretch without a gap."""
    outlines: list[list[tuple[float, float]]] = []
    last = 0.0
    for i, part in enumerate(parts):
        left, right = start + i * width, start + (i + 1) * width
        top = base - height * max(part, _LEAST)
        if part and not last:
            outlines.append([(left, base)])
        if part:
            outlines[-1] += [(left, top), (right, top)]
            if i == len(parts) - 1 or not parts[i + 1]:
                outlines[-1].append((right, base))
        last = part
    return outlines
