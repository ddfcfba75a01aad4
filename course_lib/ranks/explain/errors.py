"""What can go wrong on the ranks.

    RanksError
    ├── RankError        a rank raised an exception, or its process died
    ├── DeadlockError    ranks wait for one another and none of them can go on
    ├── MismatchError    ranks take part in one collective in different ways
    └── RankTimeout      the time limit passed; says what every rank was doing

Every message is a table with one row per rank, then one sentence that says what the table means.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH = 96
"""Columns of a report in a notebook."""


@dataclass(frozen=True)
class RankState:
    """What one rank was doing when something went wrong: one row of a report."""

    rank: int
    doing: str
    """For example ``waits in recv from rank 2 (4.0 KiB)`` or ``finished``."""
    where: str = ""
    """The line of the user's code, for example ``Cell In[3], line 7``."""
    seconds: float | None = None
    """For how long, in seconds; ``None`` where it was not measured."""


class RanksError(RuntimeError):
    """Base of every error that `Ranks.run` raises about the ranks.

    Attributes:
        states: one `RankState` per rank, in rank order; empty if no rank had started.

    """

    def __init__(self, summary: str, states: Sequence[RankState] = (), detail: str = "") -> None:
        self.summary = summary
        self.states = tuple(states)
        self.detail = detail
        parts = [summary, format_states(self.states), detail]
        super().__init__("\n\n".join(part for part in parts if part))

    def _render_traceback_(self) -> list[str]:
        """Show the report alone in a notebook: the lines that led to it are this package's."""
        text = f"\x1b[31m{type(self).__name__}\x1b[0m: {self}"
        shown = []
        for line in text.splitlines():
            # Sentences are wrapped; rows of the table and lines of code, which have runs of
            # spaces, are not.
            long = len(line) > _WIDTH and "  " not in line
            shown += textwrap.wrap(line, _WIDTH) if long else [line]
        return shown


class RankError(RanksError):
    """A rank raised an exception or its process ended.

    Attributes:
        rank: the rank that failed first.
        original: the exception as it was raised, where it could be sent back; else ``None``.

    """

    def __init__(
        self,
        summary: str,
        states: Sequence[RankState] = (),
        detail: str = "",
        *,
        rank: int,
        original: BaseException | None = None,
    ) -> None:
        super().__init__(summary, states, detail)
        self.rank = rank
        self.original = original


class DeadlockError(RanksError):
    """Ranks wait for one another and none of them can go on."""


class MismatchError(RanksError):
    """Ranks take part in one collective with different operations, sizes, dtypes or roots."""


class RankTimeout(RanksError):
    """The call ran past its time limit."""


def raised(kind: str, message: str, where: str) -> str:
    """Return an exception in one line: ``raised ValueError: bad lr  (Cell In[3], line 7)``."""
    return (
        f"raised {kind}" + (f": {message}" if message else "") + (f"  ({where})" if where else "")
    )


def format_states(states: Sequence[RankState]) -> str:
    """Return the report's table: rank, what it does, where, for how long."""
    if not states:
        return ""
    rows = [("rank", "doing", "where", "for")]
    for state in states:
        seconds = "" if state.seconds is None else f"{state.seconds:.1f} s"
        rows.append((str(state.rank), state.doing, state.where, seconds))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def format_bytes(count: int) -> str:
    """Return a byte count for people, in binary units: ``4.0 KiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")
