"""Draw which rank holds which chunk before and after a collective, and in each of its steps.

    >>> from course_lib.figures import draw_outcomes, marked_chunks
    >>> figure = draw_outcomes({"at first": [marked_chunks(rank, 2) for rank in (0, 1)]})

A tensor is cut into K chunks, which have letters as names: "b2" is chunk b of rank 2. To see where
chunks go and which have been added up, the real algorithm is run on numbers that show where they
come from. `marked_chunks` fills every chunk of every rank with zeros, and a one at a position that
no other chunk uses. So a sum shows all its parts. "b02" is the sum of chunk b of ranks 0 and 2, and
"Σb" is the sum of chunk b of all ranks.

`draw_outcomes` draws what ranks hold, for example before and after each step. An algorithm can also
be watched while it runs (`chunk_moments`); `draw_moment` draws one moment of it, for `explore`, and
`draw_circle` one of a ring, with the ranks on a circle.

Each rank has a colour. A box has a stripe for every rank whose part it holds, so colours mix while
ranks add up; a sum of all ranks is one solid dark box. New content is bold, in a thick frame.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from course_lib.figures._explore import explore, tip
from course_lib.figures._shown import Described
from course_lib.ranks import Network, Ranks, clock
from course_lib.ranks.trace.event import Event
from course_lib.ranks.trace.trace import Trace

if TYPE_CHECKING:  # matplotlib takes half a second to import; most ranks never draw
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path

_HUES = ("#9ecae9", "#ffcf8a", "#a8dba8", "#f2b6cf", "#d5c4ea", "#e8e08a", "#b7e0dc", "#f0b8a8")
"""One for each rank of origin, pale enough for black text; beyond eight ranks boxes are grey."""
_DONE = "#2f7f74"
"""The colour of a sum of all ranks."""


def marked_chunks(rank: int, world_size: int) -> Tensor:
    """Return a tensor (K, K²) whose row c, chunk c of `rank`, has a one where no other row has it.

    If the tensor is flattened, `shard_bounds` cuts it into exactly these rows.
    """
    return torch.eye(world_size**2)[world_size * rank : world_size * (rank + 1)].clone()


def chunk_names(held: Tensor) -> list[str]:
    """Return the name of each row's content in `held` (any number of rows, K²); "" for zeros.

    Raises ValueError if a row is a sum of different chunks, or contains a part more than once: no
    collective computes such a sum.
    """
    k = round(held.shape[-1] ** 0.5)
    names = []
    for row in held:
        parts = [divmod(int(place), k) for place in row.nonzero()]
        chunks, ranks = {chunk for _, chunk in parts}, [rank for rank, _ in parts]
        if len(chunks) > 1 or not ((row == 0) | (row == 1)).all():
            raise ValueError("a row adds up different chunks, or contains a part more than once")
        letter = "".join(map(_letter, chunks))
        names.append("Σ" + letter if len(ranks) == k > 1 else letter + "".join(map(str, ranks)))
    return names


def _letter(chunk: int) -> str:
    return chr(ord("a") + chunk)


def draw_outcomes(outcomes: Mapping[str, Sequence[Tensor]]) -> Figure:
    """Draw what all ranks hold, with a panel for each title; differences from the first are bold.

    A value of `outcomes` has one tensor (any number of rows, K²) for each rank, as for
    `chunk_names`. A row of the panel is a rank, and a column is a row of its tensor.
    """
    import matplotlib.pyplot as plt

    grids = {title: [chunk_names(held) for held in ranks] for title, ranks in outcomes.items()}
    before = next(iter(grids.values()))
    rows = -(-len(grids) // 3)
    height = rows * (0.45 + 0.27 * len(before))
    figure, panels = plt.subplots(rows, 3, figsize=(8.4, height), layout="constrained")
    for axes in panels.flat:
        axes.axis("off")
        axes.grid(visible=False)
    for axes, (title, grid) in zip(panels.flat, grids.items(), strict=False):
        _draw_grid(axes, grid, before)
        axes.set_title(title)
    return figure


def _draw_grid(axes: Axes, grid: Sequence[Sequence[str]], before: Sequence[Sequence[str]]) -> None:
    """Draw a row for each rank, rank 0 on top, and a box for each row of its tensor."""
    width = max(len(row) for row in [*grid, *before])
    for rank in range(len(grid)):
        axes.text(-0.15, rank, f"rank {rank}", ha="right", va="center", fontsize=9)
    _draw_rows(axes, grid, before, [(0, rank) for rank in range(len(grid))], len(grid))
    axes.set(xlim=(-1.3, width + 0.05), ylim=(len(grid) - 0.5, -0.6))


def _draw_rows(
    axes: Axes,
    grid: Sequence[Sequence[str]],
    before: Sequence[Sequence[str]],
    at: Sequence[tuple[float, float]],
    world_size: int,
) -> None:
    """Draw rows of boxes; `at[row]` is the left end of a row and its y in the middle."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    stripes: dict[str, list[Path]] = {}
    frames: dict[float, list[Path]] = {0.8: [], 2.2: []}
    for row, was, (start, y) in zip(grid, before, at, strict=True):
        for place, name in enumerate(row):
            x = start + place
            new = bool(name) and name not in was[place : place + 1]
            frames[2.2 if new else 0.8].append(_box(x, x + 1, y))
            hues = _hues(name, world_size)
            for number, hue in enumerate(hues):
                left, right = (x + edge / len(hues) for edge in (number, number + 1))
                stripes.setdefault(hue, []).append(_box(left, right, y))
            weight = "bold" if new else "normal"
            size = 9 if len(name) < 4 else 8 if len(name) < 7 else 7
            ink = "white" if hues == [_DONE] else "black"
            axes.text(x + 0.07, y, name, va="center", size=size, weight=weight, color=ink)
    # All boxes of one colour at once: single boxes would be four times as long in SVG.
    for hue, paths in stripes.items():
        axes.add_patch(PathPatch(Path.make_compound_path(*paths), facecolor=hue, lw=0))
    for thick, paths in frames.items():
        if paths:
            together = Path.make_compound_path(*paths)
            axes.add_patch(PathPatch(together, facecolor="none", edgecolor="black", lw=thick))


def _box(left: float, right: float, y: float) -> Path:
    from matplotlib.path import Path

    top, bottom = y - 0.42, y + 0.42
    corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    return Path(corners, closed=True)


def _hues(name: str, world_size: int) -> list[str]:
    """Return the colour of each rank whose part a box holds, by its content's name."""
    if name.startswith("Σ"):
        return [_DONE]
    if world_size > len(_HUES):
        return ["0.85"] if name else []
    return [_HUES[int(digit)] for digit in name if digit.isdigit()]


def _draw_message(
    axes: Axes,
    source: int,
    to: int,
    senders: Sequence[int],
    old: Sequence[Sequence[str]],
    new: Sequence[Sequence[str]],
) -> list[Artist]:
    """Draw an arrow in each column in which the receiver got something; return the arrows.

    `senders` are all ranks that sent to the receiver in this step. If one of them held exactly what
    the receiver holds now, the receiver got a copy from it, and the others did not send this.
    """
    down = 1 if to > source else -1
    arrows: list[Artist] = []
    for place, (was, is_now) in enumerate(zip(old[to], new[to], strict=True)):
        holders = [rank for rank in senders if old[rank][place] == is_now]
        if was == is_now or source not in (holders or senders):
            continue
        x = place + 0.76 + 0.17 * source / len(old)  # the arrows of a column are side by side
        drawn = axes.annotate(
            "",
            (x, to - 0.2 * down),
            (x, source + 0.2 * down),
            arrowprops={"arrowstyle": "->", "lw": 1.0, "color": "black"},
        )
        assert drawn.arrow_patch is not None, "it was asked for"
        arrows.append(drawn.arrow_patch)
    return arrows


class Moment(NamedTuple):
    """The contents of all ranks at one time of a run; see `chunk_moments`."""

    time: float
    """In seconds since the start of the run."""
    held: list[list[str]]
    """`held[rank][chunk]` is the name of the chunk's content, as from `chunk_names`."""
    arrived: list[Event]
    """The receives that ended since the previous moment."""


def chunk_moments(
    ranks: Ranks,
    all_reduce: Callable[[Tensor], object],
    nbytes: int,
    chunks: int | None = None,
    *,
    within: float = 0.0,
) -> list[Moment]:
    """Run `all_reduce(tensor)` on simulated `ranks`; return each moment at which a rank got more.

    The first moment is the start. The tensor has `nbytes` bytes, in float32, and `chunks` rows of
    equal length, one for each chunk. By default, there are as many chunks as ranks. The tensor is
    watched from outside, so any in-place algorithm works, and it need not record its steps. Set
    `chunks` to the number of pieces into which the algorithm cuts its tensor, as half a chunk has
    no name. If changes follow one another within `within` seconds, only the last one is a moment.

    `nbytes` is a multiple of 4 · `chunks`. A chunk has room for the marks of `marked_chunks`, which
    take K² · 4 bytes.
    """
    rows = ranks.world_size if chunks is None else chunks
    notes = ranks.run(_watched, all_reduce, rows, nbytes // (4 * rows))
    receives = [event for event in ranks.trace.operations if event.kind == "recv"]
    times = sorted({time for of_rank in notes for time in of_rank})
    moments: list[Moment] = []
    for time, later in itertools.pairwise([*times, math.inf]):
        latest = [max(t for t in of_rank if t <= time) for of_rank in notes]
        held = [of_rank[t] for of_rank, t in zip(notes, latest, strict=True)]
        if not moments or (held != moments[-1].held and _rounded(later - time) > within):
            since = moments[-1].time if moments else -1.0
            arrived = [event for event in receives if since < _rounded(event.end) <= time]
            moments.append(Moment(time, held, arrived))
    return moments


def _rounded(time: float) -> float:
    """Return a time rounded to nanoseconds: ranks that end together may differ by rounding."""
    return round(time, 9)


def _watched(
    all_reduce: Callable[[Tensor], object], rows: int, length: int
) -> dict[float, list[str]]:
    rank, k = dist.get_rank(), dist.get_world_size()
    held = torch.zeros(rows, length)
    marks = held[:, : k * k]
    marks.copy_(marked_chunks(rank, k)[:rows])
    watch = _Watch(marks)
    with watch:
        all_reduce(held)
    watch.look()
    return watch.seen


class _Watch(TorchFunctionMode):
    """Records the content of `marks` at each time of the virtual clock."""

    def __init__(self, marks: Tensor) -> None:
        super().__init__()
        self._marks = marks
        self.seen: dict[float, list[str]] = {}
        self.look()

    def look(self) -> None:
        self.seen[_rounded(clock())] = chunk_names(self._marks)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        # Calls of `ranks` itself are not watched: it writes a message before the rank has waited.
        if caller.startswith("course_lib.ranks") or not any(isinstance(x, Tensor) for x in args):
            return func(*args, **(kwargs or {}))
        if _rounded(clock()) not in self.seen:  # first call after a wait: the message has arrived
            self.look()
        result = func(*args, **(kwargs or {}))
        if func.__name__.startswith("__i") or re.search(r"[^_]_$", func.__name__):
            self.look()  # an in-place function has written: __iadd__, add_, copy_
        return result


def draw_moment(moments: Sequence[Moment], number: int, title: str = "") -> Figure:
    """Draw moment `number`: what each rank holds, and the messages that brought it.

    All drawings have the same size. New content is bold, in a thick frame. In each column in which
    the receiver got something, an arrow leads from the sender to the receiver. So a message of
    several columns has several arrows, and the tip of each arrow says this.
    """
    import matplotlib.pyplot as plt

    now, before = moments[number], moments[max(0, number - 1)]
    figure = plt.figure(figsize=(5.4, 3.2))
    axes = figure.add_axes((0, 0, 1, 0.92))
    axes.axis("off")
    axes.grid(visible=False)
    _draw_grid(axes, now.held, before.held)
    for event in now.arrived:
        assert event.peer is not None, "a receive has a sender"
        senders = [e.peer for e in now.arrived if e.rank == event.rank and e.peer is not None]
        arrows = _draw_message(axes, event.peer, event.rank, senders, before.held, now.held)
        text = f"one message of {event.bytes:,} bytes from rank {event.peer} to rank {event.rank}"
        for arrow in arrows:
            tip(arrow, f"{text}, {len(arrows)} columns" if len(arrows) > 1 else text)
    interval = f"{1e3 * before.time:.4g} to {1e3 * now.time:.4g} ms" if number else "at first"
    axes.set_title(f"{title}: {interval}" if title else interval, fontsize=11)
    return figure


def draw_circle(moments: Sequence[Moment], number: int) -> Figure:
    """Draw moment `number` of a ring: ranks on a circle, and between them the chunks that moved."""
    import matplotlib.pyplot as plt

    now, before = moments[number], moments[max(0, number - 1)]
    k = len(now.held)
    radius = 2 + 0.8 * k

    def place(rank: float) -> tuple[float, float]:
        turn = 2 * math.pi * rank / k
        return radius * math.sin(turn), -radius * math.cos(turn)

    figure = plt.figure(figsize=(6.4, 5.2))
    axes = figure.add_axes((0, 0, 1, 0.94))
    axes.axis("off")
    axes.set(xlim=(-radius - k / 2 - 0.1, radius + k / 2 + 0.1), ylim=(radius + 1, -radius - 1.2))
    cables = [place(k * part / 100) for part in range(101)]
    axes.plot(*zip(*cables, strict=True), color="0.5", lw=1, ls="-", marker="", zorder=0)
    for event in now.arrived:
        source, to = event.peer, event.rank
        assert source is not None, "a receive has a sender"
        middle, ahead = place(source + 0.5), place(source + 0.5 + k / (2 * math.pi * radius))
        style = {"arrowstyle": "-|>,head_width=0.35,head_length=0.7", "color": "black"}
        arrow = axes.annotate("", ahead, middle, arrowprops=style, zorder=0).arrow_patch
        assert arrow is not None, "it was asked for"
        tip(arrow, f"one message of {event.bytes:,} bytes from rank {source} to rank {to}")
        changes = zip(before.held[source], before.held[to], now.held[to], strict=True)
        moved = [[sent for sent, old, new in changes if old != new]]
        _draw_rows(axes, moved, moved, [(middle[0] - 0.5, middle[1])], k)
    corners = [(x - k / 2, y) for x, y in map(place, range(k))]
    _draw_rows(axes, now.held, before.held, corners, k)
    for rank, (x, y) in enumerate(corners):
        axes.text(x, y - 0.75, f"rank {rank}", va="center", fontsize=9)
    title = f"step {number} of {len(moments) - 1}, after {1e3 * now.time:.4g} ms"
    axes.set_title(title if number else "at first", fontsize=11)
    return figure


def explore_chunks(
    films: Mapping[tuple[str, int], Sequence[Moment]], *, first: dict[str, Any], alt: str
) -> Described:
    """Return `draw_moment` under sliders: algorithm, number of ranks K, and step.

    `films` has the moments of a run, from `chunk_moments`, for each (algorithm, K).
    """

    @functools.cache
    def drawn(algorithm: str, K: int, step: int) -> Figure:
        title = f"{algorithm}, step {step} of {len(films[algorithm, K]) - 1}"
        return draw_moment(films[algorithm, K], step, title)

    def last_of(algorithm: str, K: int, step: int) -> Figure:
        return drawn(algorithm, K, min(step, len(films[algorithm, K]) - 1))

    def in_words(algorithm: str, K: int, step: int) -> str:
        return _in_words(films[algorithm, K][: step + 1])

    steps = range(max(map(len, films.values())))
    names, sizes = (list(dict.fromkeys(column)) for column in zip(*films, strict=True))
    sliders = {"algorithm": names, "K": sizes, "step": steps}
    return explore(last_of, in_words, **sliders, first=first, play="step", alt=alt)


def explore_circle(
    films: Mapping[int, Sequence[Moment]], *, first: dict[str, Any], alt: str
) -> Described:
    """Return `draw_circle` under sliders: number of ranks K, and step.

    `films` has the moments of a ring, from `chunk_moments`, for each K.
    """

    @functools.cache
    def drawn(K: int, step: int) -> Figure:
        return draw_circle(films[K], step)

    return explore(
        lambda K, step: drawn(K, min(step, len(films[K]) - 1)),
        lambda K, step: _in_words(films[K][: step + 1]),
        K=films,
        step=range(max(map(len, films.values()))),
        first=first,
        play="step",
        alt=alt,
    )


def _in_words(film: Sequence[Moment]) -> str:
    """Say what all ranks have sent, and how much is finished, at the last of these moments."""
    ranks = range(len(film[0].held))
    sent = [[e.bytes for now in film for e in now.arrived if e.peer == rank] for rank in ranks]
    messages = ", ".join(str(len(sizes)) for sizes in sent)
    amount = ", ".join(f"{sum(sizes) / 1e6:g}" for sizes in sent)
    sums = ", ".join(str(sum(name[:1] == "Σ" for name in row)) for row in film[-1].held)
    return (
        f"After {1e3 * film[-1].time:g} ms ranks 0 to {ranks[-1]} have sent {messages} messages, "
        f"which are {amount} MB. They hold {sums} finished chunks."
    )


def collective_outcomes(ranks: Ranks) -> dict[str, list[Tensor]]:
    """Run eight collectives on marked chunks; return what each rank holds, for `draw_outcomes`."""
    held = ranks.run(_outcomes)
    return {title: [of_rank[title] for of_rank in held] for title in held[0]}


def _outcomes() -> dict[str, Tensor]:
    rank, k = dist.get_rank(), dist.get_world_size()
    chunks = marked_chunks(rank, k)
    root = rank == 0

    def after(run: Callable[[Tensor], object]) -> Tensor:
        held = chunks.clone()
        run(held)
        return held

    def only(row: int, chunk: Tensor) -> Tensor:
        held = torch.zeros_like(chunks)
        held[row] = chunk
        return held

    def scatter(chunk: Tensor) -> None:
        dist.scatter(chunk, list(chunks) if root else None, src=0)

    parts = [torch.empty_like(chunks[0]) for _ in range(k)]
    scattered, summed = (torch.empty_like(chunks[0]) for _ in range(2))
    exchanged = torch.empty_like(chunks)
    scatter(scattered)
    dist.reduce_scatter(summed, list(chunks.clone()))
    dist.all_to_all_single(exchanged, chunks)
    dist.all_gather(parts, chunks[rank])
    reduced = after(lambda held: dist.reduce(held, 0))
    return {
        "before": chunks,
        "broadcast from 0": after(lambda held: dist.broadcast(held, 0)),
        "reduce to 0": reduced if root else torch.zeros_like(chunks),
        "scatter from 0": only(rank, scattered),
        "gather to 0": torch.stack(parts) if root else torch.zeros_like(chunks),
        "all-gather": torch.stack(parts),
        "reduce-scatter": only(rank, summed),
        "all-to-all": exchanged,
        "all-reduce": after(dist.all_reduce),
    }


def draw_cables(traces: Mapping[str, Trace], network: Network) -> Figure:
    """Draw when the cable of each rank carries bytes, with a panel for each trace of sends.

    A message occupies its sender's cable for n/β seconds, which end when the send ends.
    """
    import matplotlib.pyplot as plt

    size, longest = (7.5, 0.5 + 1.7 * len(traces)), max(t.makespan for t in traces.values())
    figure, axes = plt.subplots(len(traces), figsize=size, sharex=True, layout="constrained")
    for ax, (name, trace) in zip(axes, traces.items(), strict=True):
        busy = 0.0
        for event in trace.events:
            if event.kind == "send":
                seconds = event.bytes / network.bandwidth
                busy += seconds
                start = 1e3 * (event.end - seconds)
                ax.barh(event.rank, 1e3 * seconds, 0.7, start, color="#56b4e9", ec="white", lw=0.5)
                if seconds > 0.03 * longest:
                    middle = start + 500 * seconds
                    ax.text(middle, event.rank, f"→{event.peer}", ha="center", va="center", size=7)
        for rank in range(trace.world_size):
            if not trace.bytes_sent(rank):
                ax.text(0, rank, " sends nothing", va="center", size=8)
        share = busy / trace.makespan / trace.world_size
        ax.set(ylim=(trace.world_size - 0.4, -0.6), yticks=range(trace.world_size))
        ax.tick_params(axis="y", labelsize=8)
        ax.set(ylabel="rank")
        ax.set_title(f"{name}: {1e3 * trace.makespan:.0f} ms, cables busy {share:.0%}", fontsize=11)
        ax.grid(visible=False, axis="y")
    axes[-1].set_xlabel("ms, virtual clock")
    return figure
