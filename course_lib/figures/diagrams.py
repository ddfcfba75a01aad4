"""Diagrams: who holds what, and what goes where, as boxes and arrows in one style.

    >>> from course_lib.figures import diagrams
    >>> len(diagrams.data_parallel_step(world_size=4).axes)
    1

Blue is a rank and what it holds, orange is what travels, green is a finished result, and grey is
what a rank does not hold. Every box has a name, so no colour is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # matplotlib takes half a second to import; most ranks never draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HELD, MOVED, DONE, AWAY, BARE = "#cfe3f5", "#ffd9a0", "#bfe3d0", "#ececec", "white"
_INK = "#333333"
_PIECES = ("#d9c7ec", "#f6e58d", "#f7c1bb", "#cdd9a8")


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty drawing, eight inches wide, with `width` × `height` units and y downwards."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 8.0 * height / width), facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    axes.axis("off")
    axes.set_prop_cycle(color=[_INK])  # plain lines, without the markers of the course's style
    return figure, axes


def _box(
    axes: Axes, x: float, y: float, w: float, h: float, text: str = "", color: str = HELD
) -> None:
    """Draw a box with its upper left corner at (x, y), and its text in the middle."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), w, h, facecolor=color, edgecolor=_INK, linewidth=0.9))
    axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=9, color="black")


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], bend: float = 0.0
) -> None:
    style: dict[str, Any] = {"arrowstyle": "-|>", "color": _INK, "lw": 1.2}
    style |= {"shrinkA": 1, "shrinkB": 1, "connectionstyle": f"arc3,rad={bend}"}
    axes.annotate("", end, start, arrowprops=style)


def _note(axes: Axes, x: float, y: float, text: str, ha: str = "center") -> None:
    axes.text(x, y, text, ha=ha, va="center", fontsize=9, color=_INK)


def _line(
    axes: Axes,
    xs: Sequence[float],
    ys: Sequence[float],
    lw: float,
    color: str = _INK,
    ls: str = "-",
) -> None:
    axes.plot(xs, ys, color=color, linestyle=ls, linewidth=lw, marker="", zorder=1)


def data_parallel_step(world_size: int = 4) -> Figure:
    """Draw one step on K replicas: own rows, own gradient, the mean, the same update."""
    figure, axes = _canvas(12, 5.2)
    wide = 11.6 / world_size
    for rank in range(world_size):
        x = 0.3 + rank * wide
        _box(axes, x, 0.2, wide - 0.4, 0.6, f"rank {rank}: rows of shard {rank}", BARE)
        _box(axes, x, 1.2, wide - 0.4, 0.7, "forward, backward at w")
        _box(axes, x, 2.3, wide - 0.4, 0.6, f"gradient g{rank}", MOVED)
        _box(axes, x, 4.4, wide - 0.4, 0.6, "w ← w − α ḡ", DONE)
        middle = x + (wide - 0.4) / 2
        for top, bottom in ((0.8, 1.2), (1.9, 2.3), (2.9, 3.3), (3.95, 4.4)):
            _arrow(axes, (middle, top), (middle, bottom))
    mean = " + ".join(f"g{rank}" for rank in range(world_size))
    text = f"all-reduce: ḡ = ({mean}) / {world_size}, the same on all ranks"
    _box(axes, 0.3, 3.3, 11.2, 0.65, text, MOVED)
    return figure


def ddp_in_memory() -> Figure:
    """Draw what DDP keeps beside a model, on one rank, and the eight events of a step."""
    figure, axes = _canvas(12, 6.3)
    for x, head in {0.9: "weights", 2.7: ".grad", 4.4: "hook", 7.0: "bucket"}.items():
        _note(axes, x, 0.25, head)
    _note(axes, 10.7, 0.25, "process group")
    for bucket in range(2):
        y, left = 0.6 + 1.9 * bucket, 5.6
        for row, (kind, cells) in enumerate((("weight", 6), ("bias", 2))):
            name, shade, middle = f"{kind} {2 - bucket}", _PIECES[2 * bucket + row], y + row * 0.7
            _box(axes, 0.2, middle, 1.4, 0.5, name)
            _box(axes, 2.2, middle, 1.0, 0.5, "", shade)
            _box(axes, 4.0, middle, 0.8, 0.5, "ready", BARE)
            _arrow(axes, (3.2, middle + 0.25), (4.0, middle + 0.25))
            _arrow(axes, (4.8, middle + 0.25), (5.6, y + 0.6))
            for cell in range(cells):
                _box(axes, left + 0.35 * cell, y + 0.35, 0.35, 0.5, "", shade)
            _note(axes, left + 0.175 * cells, y + 0.1, name)
            left += 0.35 * cells
        _box(axes, 9.8, y + 0.35, 1.8, 0.5, f"all-reduce {bucket + 1}", MOVED)
        _arrow(axes, (8.4, y + 0.5), (9.8, y + 0.5))
        _arrow(axes, (9.8, y + 0.7), (8.4, y + 0.7))
    events = (
        (0.2, 0.45, "construction: rank 0's weights go to all"),
        (1.6, 0.45, "forward reads the weights"),
        (2.2, 0.45, "backward completes a gradient: the last layer's first"),
        (3.6, 0.65, "its hook is called"),
        (5.2, 0.75, "gradient / K goes into the bucket; .grad is this place now"),
        (9.0, 0.85, "the bucket is full: its all-reduce starts"),
        (9.0, 1.55, "the sum comes back while backward goes on"),
        (4.6, 3.95, "finish waits; then the optimizer finds the mean in .grad"),
    )
    _arrow(axes, (7.0, 3.5), (2.7, 3.8), bend=-0.1)
    circle = {"boxstyle": "circle,pad=0.15", "facecolor": "white", "edgecolor": _INK}
    for number, (x, y, text) in enumerate(events, 1):
        axes.text(x, y, f"{number}", ha="center", va="center", fontsize=8, bbox=circle)
        left, line = divmod(number - 1, 4)
        _note(axes, 0.2 + 6 * left, 4.7 + 0.42 * line, f"{number}  {text}", "left")
    return figure


def torchrun_and_store(world_size: int = 4) -> Figure:
    """Draw what torchrun starts, and how the ranks find one another through the store."""
    figure, axes = _canvas(12, 4.9)
    _box(axes, 3.9, 0.2, 4.2, 0.7, f"torchrun --nproc-per-node {world_size}", BARE)
    _box(axes, 3.9, 3.9, 4.2, 0.8, "store at MASTER_ADDR : MASTER_PORT\nrank → address", MOVED)
    wide = 12 / world_size
    for rank in range(world_size):
        x = rank * wide + 0.2
        text = f"RANK={rank}\nLOCAL_RANK={rank}\nWORLD_SIZE={world_size}\nstage_04.py"
        _box(axes, x, 1.7, wide - 0.4, 1.1, text)
        middle = x + wide / 2 - 0.2
        start = 6 + (rank - (world_size - 1) / 2) * 0.7
        _arrow(axes, (start, 0.9), (middle, 1.7))
        _arrow(axes, (middle, 2.8), (start, 3.9))
    _note(axes, 0.2, 0.5, "starts a process for each rank", "left")
    _note(axes, 0.2, 4.3, "init_process_group:\nleave my address,\nwait for the others'", "left")
    return figure


def two_phases(world_size: int = 3) -> Figure:
    """Draw a compressed all-reduce, Q(Σ Q(g)): each vector in pieces, each piece with its owner."""
    figure, axes = _canvas(12, 4.5)
    heads = {1.1: "gradient, in pieces", 3.2: "compress each", 4.75: "to its owner", 6.3: "sum"}
    for x, head in (heads | {8.0: "compress", 9.2: "to all", 10.9: "sum"}).items():
        _note(axes, x, 0.3, head)
    pieces = [("abcd"[i], _PIECES[i], 1.8 / world_size) for i in range(world_size)]
    for rank in range(world_size):
        y = 0.8 + rank * 1.3
        name, color, _ = pieces[rank]
        _note(axes, 0.2, y - 0.13, f"rank {rank}", "left")
        _box(axes, 5.8, y + 0.1, 1.0, 0.6, f"Σ Q({name})", color)
        _box(axes, 7.5, y + 0.25, 1.0, 0.3, f"Q(Σ Q({name}))", color)
        _arrow(axes, (2.0, y + 0.4), (2.75, y + 0.4))
        _arrow(axes, (6.8, y + 0.4), (7.5, y + 0.4))
        for owner, (other, shade, wide) in enumerate(pieces):
            _box(axes, 0.2 + owner * wide, y, wide, 0.8, f"${other}_{rank}$", shade)
            _box(axes, 10.0 + owner * wide, y, wide, 0.8, f"≈Σ{other}", shade)
            middle = y + (owner + 0.5) * 0.8 / world_size
            _box(axes, 2.75, middle - 0.12, 0.9, 0.24, f"$Q({other}_{rank})$", shade)
            _arrow(axes, (3.65, middle), (5.8, 1.2 + owner * 1.3))
            _arrow(axes, (8.5, y + 0.4), (10.0, 1.2 + owner * 1.3))
    return figure


def zero_stages(world_size: int = 4) -> Figure:
    """Draw what each rank holds with DDP and ZeRO 1, 2, 3: columns are stages, bars are ranks."""
    figure, axes = _canvas(12, 4.6)
    kinds = ("weights", "gradients", "optimizer\nstate")
    stages = (("DDP", 0), ("ZeRO-1", 1), ("ZeRO-2", 2), ("ZeRO-3", 3))
    for column, (name, divided) in enumerate(stages):
        x = 1.7 + column * 2.6
        _note(axes, x + 1.05, 0.3, name)
        for row, kind in enumerate(kinds):
            if not column:
                _note(axes, 0.8, 1.1 + row * 1.25, kind)
            for rank in range(world_size):
                y, part = 0.65 + row * 1.25 + rank * 0.24, 2.1 / world_size
                _box(axes, x, y, 2.1, 0.2, "", HELD if divided < 3 - row else AWAY)
                if divided >= 3 - row:
                    _box(axes, x + rank * part, y, part, 0.2, "", HELD)
    text = (
        f"each bar is one of {world_size} ranks; blue: what it holds, grey: what others hold for it"
    )
    _note(axes, 6, 4.4, text)
    return figure


def columns_then_rows(world_size: int = 2) -> Figure:
    """Draw tensor parallelism: on each rank columns of A, rows of B, and a term of the sum Z."""
    figure, axes = _canvas(12, 1.9 * world_size + 0.5)
    matrices = (("A", 2.3, 1.8, 1.0), ("Y", 4.7, 1.8, 0.7), ("B", 7.0, 0.8, 1.5))
    bottom = 1.9 * world_size
    for rank in range(world_size):
        y = 0.4 + rank * 1.9
        _note(axes, 0.5, y + 0.5, f"rank {rank}")
        _box(axes, 1.2, y, 0.8, 0.7, "X")
        for name, x, wide, high in matrices:
            _box(axes, x, y, wide, high, "", AWAY)
            across, down = (wide, high / world_size) if name == "B" else (wide / world_size, high)
            left, top = (0, rank * down) if name == "B" else (rank * across, 0)
            _box(axes, x + left, y + top, across, down, f"{name}$_{rank}$")
        _arrow(axes, (4.2, y + 0.35), (4.6, y + 0.35))
        _note(axes, 4.4, y + 0.1, "σ")
        _box(axes, 8.4, y, 0.9, 0.7, f"Y$_{rank}$ B$_{rank}$", MOVED)
        _arrow(axes, (7.9, y + 0.35), (8.3, y + 0.35))
        _arrow(axes, (9.3, y + 0.35), (9.8, y + 0.35))
        _arrow(axes, (10.6, y + 0.35), (11.0, y + 0.35))
        _box(axes, 11.0, y, 0.8, 0.7, "Z", DONE)
    _box(axes, 9.8, 0.4, 0.8, bottom - 0.4, "all-\nreduce", MOVED)
    _note(axes, 6, bottom + 0.3, "grey: what the other ranks hold")
    return figure


def block_with_messages() -> Figure:
    """Draw where two ranks send in a transformer block: f and g, and their halves along tokens."""
    figure, axes = _canvas(12, 6.2)
    ways = (
        ("tensor parallel", ("all\ntokens",) * 2, "fg", ("nothing", "all-reduce")),
        (
            "along the sequence",
            ("tokens\n0 to S/2", "tokens\nS/2 to S"),
            ("f̄", "ḡ"),
            ("all-gather", "reduce-scatter"),
        ),
    )
    for way, (title, between, names, calls) in enumerate(ways):
        top = 0.55 + 3.1 * way
        _note(axes, 0.2, top - 0.3, f"{title}   (→ forward, ← backward)", "left")
        for part in range(3):
            x = 0.2 + 5.25 * part
            for rank in range(2):
                _box(axes, x, top + 0.95 * rank, 1.1, 0.75, between[rank])
                if part < 2:
                    work = (f"attention\nheads {2 * rank}, {2 * rank + 1}", "MLP\ncolumns, rows")
                    _box(axes, x + 2.3, top + 0.95 * rank, 1.75, 0.75, work[part])
            for side, name in enumerate(names if part < 2 else ""):
                left = x + 1.45 + 2.95 * side
                _box(axes, left, top - 0.05, 0.5, 1.8, name, MOVED)
                forward, backward = calls if side == 0 else calls[::-1]
                _note(axes, left + 0.25, top + 1.95, f"→ {forward}")
                _note(axes, left + 0.25, top + 2.25, f"← {backward}")
    return figure


def groups_in_nodes() -> Figure:
    """Draw data 2 × pipeline 2 × tensor 8 on four nodes of eight, with rank 0's groups thick."""
    figure, axes = _canvas(12, 5.0)
    styles = {
        "tensor: 8 ranks of a node": ("#0072b2", "-"),
        "pipeline: 0 and 8, 1 and 9, …": ("#d55e00", "--"),
        "data: 0 and 16, 1 and 17, …": ("#009e73", ":"),
    }
    tensor, pipeline, data = styles.values()
    for node in range(4):
        copy, stage = divmod(node, 2)
        x, y = 0.3 + 6.5 * stage, 0.6 + 2.4 * copy
        _box(axes, x - 0.1, y - 0.1, 5.1, 1.0, "", BARE)
        _note(axes, x + 2.45, y - 0.3, f"node {node}: data {copy}, stage {stage}")
        _line(axes, [x + 0.3, x + 4.5], [y + 0.65] * 2, 1.3 if node else 4, *tensor)
        for rank in range(8):
            left, thick = x + 0.6 * rank + 0.05, 1.3 if stage or rank else 4
            _line(axes, [left + 0.25] * 2, [y + 0.4, y + 0.65], 1.3, *tensor)
            _box(axes, left, y, 0.5, 0.4, f"{8 * node + rank}")
            if copy == 0:
                _line(axes, [left + 0.25] * 2, [y + 0.9, y + 1.9], thick, *data)
            if stage == 0:
                thick = 1.3 if copy or rank else 4
                _line(axes, [x + 5.0, x + 6.4], [y + 0.11 * rank] * 2, thick, *pipeline)
    for number, (name, style) in enumerate(styles.items()):
        left = 0.3 + 4 * number
        _line(axes, [left, left + 0.7], [4.5] * 2, 3, *style)
        _note(axes, left + 0.85, 4.5, name, "left")
    _note(axes, 6, 4.85, "thick: the groups of rank 0")
    return figure


def ring_attention(world_size: int = 4) -> Figure:
    """Draw a sequence divided over ranks: queries stay, keys and values go round."""
    figure, axes = _canvas(12, 3.3)
    wide = 12 / world_size
    for rank in range(world_size):
        x, left = rank * wide + 0.25, (rank - 1) % world_size
        _note(axes, x + wide / 2 - 0.25, 0.25, f"rank {rank}")
        _box(axes, x, 0.5, wide - 0.8, 0.7, f"queries {rank}: stay")
        _box(axes, x, 1.3, wide - 0.8, 0.7, f"keys, values {left}:\nhere in step 1", MOVED)
        if rank + 1 < world_size:
            _arrow(axes, (x + wide - 0.8, 1.65), (x + wide, 1.65))
    _arrow(axes, (12 - 1.5, 2.0), (1.2, 2.0), bend=-0.12)
    _note(axes, 6, 3.0, f"after {world_size} steps every query has met every key")
    return figure


def mesh_cube() -> Figure:
    """Draw a mesh of 2 × 2 × 2 ranks, data × pipeline × tensor, with rank 0's groups thick."""
    figure, axes = _canvas(12, 5.6)

    def place(d: int, p: int, t: int) -> tuple[float, float]:
        return 2.2 + t * 3.4 + d * 1.9, 4.7 - p * 2.7 - d * 1.0

    ways = (
        ("tensor parallel", (0, 0, 1), "#0072b2", "-"),
        ("pipeline parallel", (0, 1, 0), "#d55e00", "--"),
        ("data parallel", (1, 0, 0), "#009e73", ":"),
    )
    every = list(itertools.product(range(2), repeat=3))
    for number, (name, (u, v, w), color, line) in enumerate(ways):
        for d, p, t in every:
            if max(d + u, p + v, t + w) < 2:
                xs, ys = zip(place(d, p, t), place(d + u, p + v, t + w), strict=True)
                thick = 4 if (d, p, t) == (0, 0, 0) else 1.3
                _line(axes, xs, ys, thick, color, line)
        _line(axes, [8.3, 9.1], [2.2 + 0.6 * number] * 2, 3, color, line)
        _note(axes, 9.3, 2.2 + 0.6 * number, name, "left")
    _note(axes, 8.3, 4.1, "thick: the groups of rank 0", "left")
    for rank, at in enumerate(every):
        x, y = place(*at)
        _box(axes, x - 0.35, y - 0.25, 0.7, 0.5, str(rank))
    return figure


def two_levels(leaving: Mapping[str, Sequence[float]], per_node: int = 8) -> Figure:
    """Draw nodes twice, with a network adapter (NIC) for each GPU and with one for each node.

    `leaving[algorithm][rank]` are the MB that a rank sends to other nodes. Below each adapter are
    those that pass its cable, in a line for each algorithm.
    """
    nodes = len(next(iter(leaving.values()))) // per_node
    height = 1.0 + 0.3 * len(leaving)
    figure, axes = _canvas(12.7, 0.6 + (height + 0.3) * nodes)
    for left, title, gpus in ((1.25, "a NIC per GPU", 1), (7.6, "a NIC per node", per_node)):
        _note(axes, left + 2.5, 0.25, f"{title}: MB on its cable")
        for node in range(nodes):
            y = 0.6 + node * (height + 0.3)
            _box(axes, left - 0.05, y - 0.05, 5.0, 0.93, "", BARE)
            _note(axes, left - 0.15, y + 0.2, f"node {node}", "right")
            for line, name in enumerate(leaving):
                _note(axes, left - 0.15, y + 1.05 + 0.3 * line, name, "right")
            for gpu in range(per_node):
                x, rank = left + gpu * 4.9 / per_node, node * per_node + gpu
                _box(axes, x + 0.04, y, 4.9 / per_node - 0.08, 0.4, f"{rank}")
                _line(axes, [x + 2.45 / per_node] * 2, [y + 0.4, y + 0.53], 1.5)
                if gpu % gpus == 0:
                    wide = 4.9 / per_node * gpus
                    _box(axes, x + 0.04, y + 0.53, wide - 0.08, 0.3, "NIC", MOVED)
                    for line, sent in enumerate(leaving.values()):
                        text = f"{sum(sent[rank : rank + gpus]):.3g}"
                        _note(axes, x + wide / 2, y + 1.05 + 0.3 * line, text)
    return figure
