"""Draw which rank holds which chunk before and after a collective, and in each of its steps.

    >>> from course_lib.figures import chunk_names, marked_chunks
    >>> chunk_names(marked_chunks(rank=1, world_size=3))
    ['a1', 'b1', 'c1']

A tensor is cut into K chunks, named by letters; "b2" is chunk b of rank 2. To see where chunks go
and which have been added up, run the real algorithm on numbers that say where they come from:
`marked_chunks` gives every chunk of every rank a one at its own place among zeros, so a sum shows
all its parts. "b02" is then the sum of ranks 0's and 2's chunk b, "Σb" that of all.

These pictures do not use colour: new content is bold, on grey.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from course_lib.ranks.trace.event import Event
from course_lib.ranks.trace.trace import Trace

if TYPE_CHECKING:  # matplotlib takes half a second to import; most ranks never draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEGEND = "b2: chunk b of rank 2\nb02: of ranks 0 and 2,\nadded up\nΣb: the sum of all\n"


def marked_chunks(rank: int, world_size: int) -> Tensor:
    """Return a tensor (K, K²) whose row c, chunk c of `rank`, has a one where no other row has it.

    Flattened it is cut by `shard_bounds` into just these rows.
    """
    return torch.eye(world_size**2)[world_size * rank : world_size * (rank + 1)].clone()


def chunk_names(held: Tensor) -> list[str]:
    """Return what is in each row of `held` (any number of rows, K²): "" for a row of zeros.

    Raises ValueError if a row is a sum of different chunks, or has a part more than once: no
    collective adds these up.
    """
    k = round(held.shape[-1] ** 0.5)
    names = []
    for row in held:
        parts = [divmod(int(place), k) for place in row.nonzero()]
        chunks, ranks = {chunk for _, chunk in parts}, [rank for rank, _ in parts]
        if len(chunks) > 1 or not ((row == 0) | (row == 1)).all():
            wrong = ", ".join(f"{float(row[r * k + c]):g} · {_letter(c)}{r}" for r, c in parts)
            raise ValueError(f"different chunks were added to one another: {wrong}")
        letter = "".join(map(_letter, chunks))
        names.append("Σ" + letter if len(ranks) == k > 1 else letter + "".join(map(str, ranks)))
    return names


def _letter(chunk: int) -> str:
    return chr(ord("a") + chunk)


def draw_outcomes(outcomes: Mapping[str, Sequence[Tensor]]) -> Figure:
    """Draw what all ranks hold, one panel for each title; bold is what differs from the first.

    A value has one tensor (any number of rows, K²) for each rank, as `chunk_names` reads it; a row
    of the panel is a rank, a column a place in its tensor.
    """
    grids = {title: [chunk_names(held) for held in ranks] for title, ranks in outcomes.items()}
    before = next(iter(grids.values()))
    figure, panels = _panels(len(grids), columns=3, rows_of_text=len(before))
    for axes, (title, grid) in zip(panels, grids.items(), strict=False):
        _draw_grid(axes, grid, before)
        axes.set_title(title)
    return figure


def draw_steps(history: Sequence[Sequence[Tensor]], trace: Trace) -> Figure:
    """Draw a collective step by step: what each rank holds, and the messages that brought it there.

    `history[rank]` is what that rank held before and after each step, as `chunk_names` reads it;
    the messages, and when each step began and ended, are those of `trace`, in which every rank
    sends once in a step.
    """
    grids = [[chunk_names(held) for held in moment] for moment in zip(*history, strict=True)]
    sends, receives = _by_step(trace, "send"), _by_step(trace, "recv")
    if len(sends) != len(grids) - 1:
        raise ValueError(
            f"history has {len(grids)} moments, so each rank must send {len(grids) - 1} messages; "
            f"in the trace it sends {len(sends)}"
        )
    columns = 4 if len(grids) > 5 else 3
    figure, panels = _panels(len(grids) + 1, columns, rows_of_text=trace.world_size)
    _draw_grid(panels[0], grids[0], grids[0])
    panels[0].set_title("at first", fontsize=10)
    for number, (old, new) in enumerate(itertools.pairwise(grids), 1):
        sent, received = sends[number - 1], receives[number - 1]
        _draw_grid(panels[number], new, old)
        _draw_messages(panels[number], sent, old, new)
        first, last = min(e.start for e in sent), max(e.end for e in (*sent, *received))
        span = f"{1e3 * first:.2f} to {1e3 * last:.2f} ms"
        panels[number].set_title(f"step {number}: {span}", fontsize=10)
    panels[len(grids)].text(0.05, 0.95, _LEGEND + "bold: new in this step", va="top", fontsize=9)
    return figure


def _by_step(trace: Trace, kind: str) -> list[tuple[Event, ...]]:
    """Return the first, the second, … message of all ranks."""
    of_ranks = [
        [event for event in trace.events if (event.rank, event.kind) == (rank, kind)]
        for rank in range(trace.world_size)
    ]
    return list(zip(*of_ranks, strict=True))


def _panels(count: int, columns: int, rows_of_text: int) -> tuple[Figure, list[Axes]]:
    import matplotlib.pyplot as plt

    rows = -(-count // columns)
    height = rows * (0.45 + 0.27 * rows_of_text)
    figure, axes = plt.subplots(rows, columns, figsize=(8.4, height), layout="constrained")
    panels = list(axes.flat)
    for each in panels:
        each.axis("off")
        each.grid(visible=False)
    return figure, panels


def _draw_grid(axes: Axes, grid: Sequence[Sequence[str]], before: Sequence[Sequence[str]]) -> None:
    """Draw a row for each rank, rank 0 on top, and a box for each place of its tensor."""
    from matplotlib.patches import Rectangle

    width = max(len(row) for row in [*grid, *before])
    for rank, row in enumerate(grid):
        axes.text(-0.15, rank, f"rank {rank}", ha="right", va="center", fontsize=9)
        for place, name in enumerate(row):
            new = bool(name) and name not in before[rank][place : place + 1]
            color = "0.82" if new else "white"
            axes.add_patch(
                Rectangle((place, rank - 0.42), 1, 0.84, facecolor=color, edgecolor="0.5", lw=0.8)
            )
            weight = "bold" if new else "normal"
            size = 9 if len(name) < 4 else 8
            axes.text(place + 0.07, rank, name, va="center", size=size, weight=weight)
    axes.set(xlim=(-1.3, width + 0.05), ylim=(len(grid) - 0.5, -0.6))


def _draw_messages(
    axes: Axes,
    step: Sequence[Event],
    old: Sequence[Sequence[str]],
    new: Sequence[Sequence[str]],
) -> None:
    """Draw an arrow from sender to receiver in each column in which the receiver got something."""
    for event in step:
        assert event.peer is not None, "a send has a receiver"
        for place, (was, is_now) in enumerate(zip(old[event.peer], new[event.peer], strict=True)):
            if was == is_now:
                continue
            down = 1 if event.peer > event.rank else -1
            x = place + 0.76 + 0.17 * event.rank / len(old)  # those of a column side by side
            axes.annotate(
                "",
                (x, event.peer - 0.2 * down),
                (x, event.rank + 0.2 * down),
                arrowprops={"arrowstyle": "->", "lw": 1.2, "color": "black"},
            )


def steps_in_words(history: Sequence[Sequence[Tensor]]) -> str:
    """Return the content of `draw_steps` in words, for people who cannot see it."""
    moments = [[chunk_names(held) for held in moment] for moment in zip(*history, strict=True)]
    told = [
        f"After step {number}: "
        + "; ".join(f"rank {rank} {' '.join(row)}" for rank, row in enumerate(moment))
        for number, moment in enumerate(moments)
    ]
    told[0] = told[0].replace("After step 0", "At first")
    return ". ".join(told) + "."
