"""``%%ranks``: a notebook cell that runs on every rank.

    %ranks 4            four ranks from here on, as the notebook's variable `ranks`
    %ranks 64 --on simulated --timeout 60       where, and the limit of a call in seconds
    %ranks              what they are
    %ranks off          end them

    %%ranks             the cell below, on every rank
    %%ranks 0,2-3       on some of them

The cell's variables last until the ranks end. It starts with `rank`, `world_size`, `device`,
`dist` and `torch`; of the notebook's own variables it sees none.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from course_lib.ranks.explain.errors import RanksError
from course_lib.ranks.notebook.cells import run_cell
from course_lib.ranks.output.printer import label, show_bundle
from course_lib.ranks.ranks import Ranks

DEFAULT_WORLD_SIZE = 4


class UsageError(ValueError):
    """The line after ``%ranks`` or ``%%ranks`` cannot be read."""


def load_ipython_extension(ipython: Any) -> None:
    """Add the magics to a notebook: called by ``%load_ext``."""
    magics = _Magics(ipython)
    ipython.register_magic_function(magics.line, "line", "ranks")
    ipython.register_magic_function(magics.cell, "cell", "ranks")


class _Magics:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def line(self, line: str) -> Ranks | None:
        """Make, show or end the notebook's ranks."""
        current = self._current()
        words = shlex.split(line)
        if not words:
            if current is None:
                print("There are no ranks yet: %ranks 4 makes four.")
            return current
        if current is not None:
            current.close()
        if words == ["off"]:
            return None
        self._shell.user_ns["ranks"] = made = _parse(words)
        return made

    def cell(self, line: str, cell: str) -> None:
        """Run the cell on the ranks."""
        ranks = self._current()
        if ranks is None:
            ranks = self._shell.user_ns["ranks"] = Ranks(DEFAULT_WORLD_SIZE)
        chosen = choose(line, ranks.world_size)
        # The cell's first line is the magic's own: an empty one keeps the others in their place.
        source = "\n" + cell
        name = self._file_name(line, cell)
        compile(source, name, "exec")  # a SyntaxError is the notebook's, not four times the ranks'
        before = ranks.processes()
        try:
            shown = ranks.run(run_cell, source, name, chosen)
        except (RanksError, KeyboardInterrupt):
            if before != ranks.processes() and before:
                print(
                    "The ranks start anew, without the variables of earlier %%ranks cells: "
                    "run again the cells that made them.",
                    file=sys.stderr,
                )
            raise
        groups: list[tuple[Any, list[int]]] = []
        for rank, bundle in enumerate(shown):
            same = next((ranks for other, ranks in groups if other == bundle), None)
            if bundle is not None and same is None:
                groups.append((bundle, [rank]))
            elif same is not None:
                same.append(rank)
        for bundle, who in groups:
            show_bundle(label(who), bundle)

    def _current(self) -> Ranks | None:
        ranks = self._shell.user_ns.get("ranks")
        return ranks if isinstance(ranks, Ranks) and not ranks.closed else None

    def _file_name(self, line: str, cell: str) -> str:
        """Make the cell's lines known under a file name, as IPython does for ordinary cells."""
        text = f"%%ranks {line}".rstrip() + "\n" + cell
        name: str = self._shell.compile.cache(text, self._shell.execution_count)
        return name


def _parse(words: list[str]) -> Ranks:
    parser = argparse.ArgumentParser("%ranks", add_help=False, exit_on_error=False)
    parser.add_argument("world_size", type=int)
    parser.add_argument("--on", default="auto")
    parser.add_argument("--timeout", type=float, default=600)
    try:
        options, rest = parser.parse_known_args(words)
    except (argparse.ArgumentError, SystemExit) as error:
        raise UsageError(f"%ranks K [--on auto|cpu|gpu|simulated] [--timeout s]: {error}") from None
    if rest:
        raise UsageError(f"%ranks does not know {' '.join(rest)}")
    return Ranks(options.world_size, on=options.on, timeout=options.timeout)


def choose(line: str, world_size: int) -> list[int]:
    """Return the ranks that ``0,2-3`` names; an empty line names all.

    Raises:
        UsageError: this is not a list of ranks, or there are no such ranks.

    """
    if not line.strip():
        return list(range(world_size))
    chosen: set[int] = set()
    for part in line.replace(" ", ",").split(","):
        first, dash, last = part.partition("-")
        try:
            if part:
                chosen |= set(range(int(first), int(last if dash else first) + 1))
        except ValueError:
            raise UsageError(f"%%ranks takes ranks as in 0,2-3; got {line!r}") from None
    if not chosen or max(chosen) >= world_size:
        raise UsageError(f"the ranks are 0 to {world_size - 1}; got {line!r}")
    return sorted(chosen)
