"""Parse the words after ``%ranks`` and ``%%ranks``."""

from __future__ import annotations

import argparse
from typing import NoReturn

from course_lib.ranks.ranks import Ranks

USAGE = "%ranks K [--on auto|cpu|gpu|simulated]; for other options: ranks = Ranks(K, …)"


class UsageError(ValueError):
    """The line after ``%ranks`` or ``%%ranks`` cannot be read."""

    def _render_traceback_(self) -> list[str]:
        """Show only the sentence in a notebook, without a traceback."""
        return [f"\x1b[31mUsageError\x1b[0m: {self}"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. Usage: {USAGE}")


def make_ranks(arguments: list[str]) -> Ranks:
    """Return the ranks that a line such as ``%ranks 4 --on simulated`` asks for.

    Raises:
        UsageError: such ranks are not possible; the message says what is wrong.

    """
    parser = _Parser("%ranks", add_help=False, allow_abbrev=False)
    parser.add_argument("world_size", type=int)
    parser.add_argument("--on", default="auto", choices=("auto", "cpu", "gpu", "simulated"))
    options = parser.parse_args(arguments)
    try:
        return Ranks(options.world_size, on=options.on)
    except ValueError as error:
        raise UsageError(f"{error}. Usage: {USAGE}") from None


def choose(line: str, world_size: int) -> list[int]:
    """Return the ranks that ``0,2-3`` names; an empty line names all.

    Raises:
        UsageError: `line` is not a list of ranks, or some of the ranks do not exist.

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
            raise UsageError(
                f"cannot read {line!r} as ranks: write their numbers, as in %%ranks 0,2-3"
            ) from None
    if not chosen or max(chosen) >= world_size:
        raise UsageError(f"ranks must be 0 to {world_size - 1}, but you wrote {line!r}")
    return sorted(chosen)
