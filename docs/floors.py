"""Draws who imports whom, from the code: ``python docs/floors.py`` makes docs/architecture.png.

It writes the drawing's description into docs/architecture.md, too.
"""

from __future__ import annotations

import argparse
import ast
import re
import textwrap
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

from matplotlib.figure import Figure

from course_lib import READING_ORDER

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
_IMAGE = re.compile(r"!\[[^]]*\]\(architecture\.png\)")
RUNGS = "the rungs: sgd … decentralized"
NOT_DRAWN = {
    *("course_lib", "course_lib.ranks", "autograder"),
    *("autograder.course", "autograder.files", "autograder.foreign_text"),
}
"""Faces, which import what is behind them, and single files that any room may import."""


def room_of(module: str) -> str:
    """Return the box that a module is drawn in."""
    parts = module.split(".")
    if parts[:2] == ["course_lib", "ranks"]:
        return ".".join(parts[1:3]) if len(parts) > 2 else "course_lib.ranks"
    if parts[0] == "course_lib" and len(parts) > 1:
        drawing = parts[1] in ("figures", "chunk_figures")
        return RUNGS if parts[1] in READING_ORDER else "figures" if drawing else parts[1]
    return ".".join(parts[:2])


def modules() -> dict[str, Path]:
    """Return the modules of both packages by their dotted names."""
    found = {}
    for package in ("course_lib", "autograder"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports() -> dict[str, set[str]]:
    """Return for each box the boxes that it imports from."""
    files = modules()
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        room = room_of(module)
        if room in NOT_DRAWN or module.endswith("__main__"):
            continue
        needs = graph.setdefault(room, set())
        for name in _named(ast.parse(path.read_text(encoding="utf-8"))):
            while name and name not in files:
                name = name.rpartition(".")[0]
            if name == "course_lib.ranks":  # its face: the class `Ranks`
                needs.add("ranks.ranks")
            elif name and room_of(name) not in NOT_DRAWN:
                needs.add(room_of(name))
        needs.discard(room)
    return graph


def _named(tree: ast.AST) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def floors(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the boxes floor by floor, from the ground: each one above all that it imports."""
    floor: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():
        floor[room] = 1 + max((floor[below] for below in graph.get(room, ())), default=-1)
    return [
        sorted(room for room in floor if floor[room] == number)
        for number in range(max(floor.values()) + 1)
    ]


def draw(graph: dict[str, set[str]]) -> Figure:
    """Draw a row of boxes per floor, and a line down from each box to those that it imports."""
    rows = floors(graph)
    figure = Figure(figsize=(11, 0.85 * len(rows) + 0.3), facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, 1), ylim=(-0.6, len(rows) - 0.4))
    axes.axis("off")
    place = {
        room: ((number + 0.5) / len(row), y)
        for y, row in enumerate(rows)
        for number, room in enumerate(row)
    }
    for room, needs in graph.items():
        for below in needs - {far for near in needs for far in reach(graph, near)}:
            (x, y), (x2, y2) = place[room], place[below]
            axes.plot([x, x2], [y - 0.2, y2 + 0.2], color="#9a9a9a", linewidth=0.9, zorder=1)
    for room, (x, y) in place.items():
        ours = "#d9e8f5" if not room.startswith("autograder") else "#f6e3cf"
        edge = "#1f2328" if room.startswith("ranks.") else "#9a9a9a"
        text = "\n".join(textwrap.wrap(room, 18, break_long_words=False))
        box = {"boxstyle": "round,pad=0.35", "facecolor": ours, "edgecolor": edge}
        axes.text(x, y, text, ha="center", va="center", fontsize=9, bbox=box, zorder=2)
    return figure


def reach(graph: dict[str, set[str]], room: str) -> set[str]:
    """Return all that a box stands on, near and far."""
    found: set[str] = set()
    waiting = [room]
    while waiting:
        new = graph.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def described(graph: dict[str, set[str]]) -> str:
    """Return the drawing in words: the floors from the ground."""
    rows = [", ".join(row) for row in floors(graph)]
    return f"Who imports whom, floor by floor from the ground: {'; '.join(rows)}."


def main() -> None:
    """Draw, and print the description that stands beside the drawing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=ROOT / "docs", help="the folder")
    graph, to = imports(), parser.parse_args().to
    draw(graph).savefig(to / "architecture.png", dpi=100)
    if to == PAGE.parent:
        page = PAGE.read_text(encoding="utf-8")
        image = f"![{described(graph)}](architecture.png)"
        PAGE.write_text(_IMAGE.sub(lambda _: image, page), encoding="utf-8")
    print(described(graph))


if __name__ == "__main__":
    main()
