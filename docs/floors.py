"""Draws who imports whom, from the code: ``python docs/floors.py``.

It makes docs/architecture.png, the whole, and docs/architecture_ranks.png, the room `ranks`. It
also writes their descriptions into docs/architecture.md.
"""

from __future__ import annotations

import argparse
import ast
import textwrap
from collections.abc import Callable, Iterable, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from course_lib import READING_ORDER

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
Graph = dict[str, set[str]]

RUNGS, PROGRAMS, IN_AND_OUT = "the rungs", "programs", "in and out"
GROUPS = {
    **dict.fromkeys(("data", *READING_ORDER), RUNGS),
    **dict.fromkeys(
        ("train", "simulate", "who_wins", "running_model", "capstone", "compare", "figures"),
        PROGRAMS,
    ),
    **dict.fromkeys(
        ("collection", "exporting", "inquiries", "similarity", "leaderboard"), IN_AND_OUT
    ),
}
"""Rooms that are drawn as one box."""
BASE, TOP = "single files", "Ranks"
"""Of `ranks`: its single files below and above `processes` and `simulated`."""
WHOLE_COLUMNS = {
    **dict.fromkeys((RUNGS, PROGRAMS, "inside", IN_AND_OUT), 0.0),
    **dict.fromkeys(
        ("ranks", "sandbox", "learner", "checking", "examination", "passes", "pool"), 1.4
    ),
    "commands": 0.7,
}
RANKS_COLUMNS = {
    **dict.fromkeys(("costs",), 0.0),
    **dict.fromkeys(("trace", "_torch", "processes"), 0.6),
    **dict.fromkeys(("explain", TOP, "notebook"), 1.2),
    **dict.fromkeys(("simulated", "output"), 1.8),
    BASE: 2.4,
}
"""Where boxes stand from left to right, so that few arrows cross; how high follows from imports."""
ABOUT = {
    RUNGS: "sgd … decentralized, and data",
    PROGRAMS: "train, compare, simulate, capstone, running_model, who_wins, figures",
    IN_AND_OUT: "collection, exporting, inquiries, similarity, leaderboard",
    "ranks": "runs a function on K ranks",
    "learner": "the program course; the student's desk",
    "checking": "cases, judges, reports",
    "sandbox": "where student code runs",
    "inside": "our code beside the student's",
    "examination": "one submission, case by case",
    "passes": "what nbgrader calls",
    "pool": "a whole class at once",
    "commands": "autograder NAME",
    "explain": "failures in words",
    "costs": "what messages take",
    "trace": "what happened: events, timeline",
    "_torch": "PyTorch's private names",
    "output": "what ranks print and show",
    "processes": "ranks as processes",
    "simulated": "ranks on a virtual clock",
    "notebook": "%%ranks, the kernel",
}


def modules() -> dict[str, Path]:
    """Return the modules of both packages by their dotted names."""
    found = {}
    for package in ("course_lib", "autograder"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports() -> Graph:
    """Return for each module the modules that it imports; for faces see `room_of`."""
    files = modules()
    graph: Graph = {}
    for module, path in files.items():
        needs = graph.setdefault(module, set())
        for name in _named(ast.parse(path.read_text(encoding="utf-8"))):
            while name and name not in files:
                name = name.rpartition(".")[0]
            needs |= {name} - {"", module}
    return graph


def _named(tree: ast.AST) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def room_of(module: str) -> str:
    """Return the box of a module in the drawing of the whole, or "" if it has none.

    The faces of both packages have none, nor single files that any room may import.
    """
    package, *parts = module.split(".")
    if not parts or parts[0] in GROUPS:
        return GROUPS[parts[0]] if parts else ""
    return parts[0] if (ROOT / package / parts[0]).is_dir() else ""


def room_of_ranks(module: str) -> str:
    """Return the box of a module in the drawing of `ranks`, or "": of its face, and others'."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["course_lib", "ranks"] and len(parts) > 2 else ""


def boxes(graph: Graph, room: Callable[[str], str]) -> Graph:
    """Return for each box the boxes that it imports from."""
    found: Graph = {}
    for module, needs in graph.items():
        if room(module):
            there = {room(need) for need in needs} - {"", room(module)}
            found.setdefault(room(module), set()).update(there)
    return found


def boxes_of_ranks(graph: Graph) -> Graph:
    """Return the rooms of `ranks`; its single files are two boxes, `BASE` and `TOP`."""
    folder = ROOT / "course_lib" / "ranks"
    graph = {**graph, "course_lib.ranks": set()}  # its face names all others, when they are needed
    alone = boxes(graph, room_of_ranks)
    # A room that uses `Ranks` takes it from the face.
    uses = {room_of_ranks(m) for m, needs in graph.items() if "course_lib.ranks" in needs} - {""}
    names = {
        name: TOP if {"processes", "simulated"} & (reach(alone, name) | {name}) else BASE
        for name in alone
        if (folder / f"{name}.py").is_file()
    }
    found: Graph = {}
    for name, needs in alone.items():
        box = names.get(name, name)
        there = {names.get(need, need) for need in needs} | ({TOP} if name in uses else set())
        found.setdefault(box, set()).update(there - {box})
    for box in (BASE, TOP):
        ABOUT[box] = ", ".join(sorted(name for name, where in names.items() if where == box))
    return found


def floors(graph: Graph) -> list[list[str]]:
    """Return the boxes floor by floor, from the ground: each one above all that it imports."""
    floor: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():
        floor[room] = 1 + max((floor[below] for below in graph.get(room, ())), default=-1)
    return [
        sorted(room for room in floor if floor[room] == number)
        for number in range(max(floor.values()) + 1)
    ]


def reach(graph: Graph, room: str) -> set[str]:
    """Return all that a box stands on, near and far."""
    found: set[str] = set()
    waiting = [room]
    while waiting:
        new = graph.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def draw(graph: Graph, columns: Mapping[str, float], colour: Callable[[str], str]) -> Figure:
    """Draw the boxes floor by floor, and an arrow from each box to those that it imports.

    Args:
        graph: box → the boxes that it imports from. Arrows that follow from others are left out.
        columns: box → the place of its middle from left to right.
        colour: of a box.

    """
    rows = floors(graph)
    place = {
        room: (columns.get(room, 1.2 * number), y)
        for y, row in enumerate(rows)
        for number, room in enumerate(row)
    }
    right = max(x for x, _ in place.values())
    figure = Figure(figsize=(2.7 * (right + 1.1), 1.0 * len(rows)), facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(-0.55, right + 0.55), ylim=(-0.5, len(rows) - 0.5))
    axes.axis("off")
    for room, needs in graph.items():
        for below in needs - {far for near in needs for far in reach(graph, near)}:
            (x, y), (x2, y2) = place[room], place[below]
            start = (x + 0.38 * _sign(x2 - x), y - 0.3)
            end = (x2 + 0.38 * _sign(x - x2), y2 + 0.3)
            arrow = {"arrowstyle": "-|>", "color": "#57606a", "linewidth": 1.2}
            axes.annotate("", end, start, arrowprops=arrow, zorder=1)
    for room, (x, y) in place.items():
        corner = (x - 0.46, y - 0.26)
        box = {"boxstyle": "round,pad=0.02", "facecolor": colour(room), "edgecolor": "#57606a"}
        axes.add_patch(FancyBboxPatch(corner, 0.92, 0.52, zorder=2, **box))
        about = textwrap.wrap(ABOUT.get(room, ""), 38)
        top = y + (15 + 10 * len(about)) / 2 / 72  # in rows, which are an inch high
        axes.text(x, top, room, ha="center", va="top", fontsize=11, weight="bold", zorder=3)
        axes.text(x, top - 16 / 72, "\n".join(about), ha="center", va="top", fontsize=8, zorder=3)
    return figure


def _sign(number: float) -> float:
    return (number > 0) - (number < 0)


def described(graph: Graph) -> str:
    """Return a drawing in words: the floors from the ground, and what a group holds."""
    rows = [", ".join(_with_parts(room) for room in row) for row in floors(graph)]
    return f"Who imports whom, floor by floor from the ground: {'; '.join(rows)}."


def _with_parts(room: str) -> str:
    return f"{room} ({ABOUT[room]})" if room in (RUNGS, PROGRAMS, IN_AND_OUT, BASE, TOP) else room


def main() -> None:
    """Draw, and print the line of Markdown that shows each drawing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=PAGE.parent, help="folder of the pictures")
    to = parser.parse_args().to
    graph = imports()
    theirs = {room_of(module) for module in graph if module.startswith("autograder.")}
    drawings = (
        ("architecture.png", boxes(graph, room_of), WHOLE_COLUMNS),
        ("architecture_ranks.png", boxes_of_ranks(graph), RANKS_COLUMNS),
    )
    for name, rooms, columns in drawings:
        figure = draw(rooms, columns, lambda room: "#f6e3cf" if room in theirs else "#d9e8f5")
        figure.savefig(to / name, dpi=110)
        image = f"![{described(rooms)}]({name})"
        print(image)
        if to == PAGE.parent:
            before, _, after = PAGE.read_text(encoding="utf-8").partition(f"]({name})")
            before = before[: before.rindex("![")]
            PAGE.write_text(f"{before}{image}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
