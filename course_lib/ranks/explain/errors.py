"""The errors of ranks.

    RanksError
    ├── RankError        a rank raised an exception, or its process died
    ├── DeadlockError    ranks wait for one another and none of them can go on
    ├── MismatchError    what ranks do together does not fit together
    └── RankTimeout      the time limit passed; shows what every rank was doing

Every message is one sentence, then a table with one row per rank, then further information: who
waits for whom, a traceback, a hint.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from course_lib.ranks.explain.words import format_table, in_short

_WIDTH = 96
"""Width of a report in a notebook, in characters."""
_ROWS = 8
"""Up to this number of ranks, each rank has its own row."""
_MANY_ROWS = 64
"""Above this number of rows, ranks share a row if what they do differs only in numbers."""


@dataclass(frozen=True)
class RankState:
    """The state of one rank when something went wrong: one row of a report."""

    rank: int
    doing: str
    """For example ``waits in recv from rank 2 (4.0 KiB)`` or ``finished``."""
    where: str = ""
    """The line of the user's code, for example ``Cell In[3], line 7``."""
    seconds: float | None = None
    """For how long, in seconds; ``None`` if it was not measured."""
    running: bool = False
    """Whether it is in code of its own, and in no communication."""
    raised: bool = False
    """Whether an exception has ended it, and `doing` does not say which."""


class RanksError(RuntimeError):
    """Base of every error that `Ranks.run` raises about the ranks.

    Attributes:
        states: one `RankState` per rank, in rank order; empty if no rank had started.

    """

    in_short = "The ranks did not run to their end."
    """What happened, for readers who must not learn anything about the inputs."""
    trace: Any = None
    """What was recorded until then, if whoever ran the ranks has kept it."""

    def __init__(self, summary: str, states: Sequence[RankState] = (), detail: str = "") -> None:
        self.summary = summary
        self.states = tuple(states)
        self.detail = detail
        super().__init__(self._report())

    def _report(self) -> str:
        parts = [self.summary, format_states(self.states), self.detail]
        return "\n\n".join(part for part in parts if part)

    def add_detail(self, text: str) -> None:
        """Add a paragraph to the report, with facts that only a caller knows."""
        self.detail = "\n\n".join(filter(None, [self.detail, text]))
        self.args = (self._report(),)

    def add_notes(self, notes: Iterable[str]) -> None:
        """Add, once each, what code that waited has noted on the exception that ended its wait.

        Such code may know why ranks wait for one another or disagree. It calls ``add_note`` on
        whatever is raised in it, and raises it again.
        """
        if isinstance(self, DeadlockError | MismatchError):
            for note in dict.fromkeys(notes):
                self.add_detail(note)

    def _render_traceback_(self) -> list[str]:
        """Show only the report in a notebook: the traceback has only lines of this package."""
        text = f"\x1b[31m{type(self).__name__}\x1b[0m: {self}"
        shown = []
        for line in text.splitlines():
            # Only sentences are wrapped. Rows of the table and lines of code contain two spaces in
            # a row, and are not wrapped.
            long = len(line) > _WIDTH and "  " not in line
            shown += textwrap.wrap(line, _WIDTH) if long else [line]
        return shown


class RankError(RanksError):
    """A rank raised an exception or its process ended.

    Attributes:
        rank: the rank that failed first.
        original: the exception as it was raised, if it could be sent back; else ``None``.
        kind: the name of the exception's class; empty if the process ended.
        message: the exception's message.
        where: the line that raised it.
        undefined: of a `NameError`, the name that is not defined.

    """

    in_short = "A rank raised an exception, or its process ended."
    kind = message = where = undefined = ""

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

    in_short = "The ranks wait for one another, or did not finish a communication."


class MismatchError(RanksError):
    """Ranks take part in one collective with different operations, sizes, dtypes or roots.

    On simulated ranks it is also raised if a send and its receive differ in size or dtype.
    """

    in_short = "The ranks called operations that do not fit together."


class RankTimeout(RanksError):
    """The call ran past its time limit."""

    in_short = "The ranks took longer than their limit."


class MisuseWarning(UserWarning):
    """A rank never waited for a handle, or touched a buffer before ``wait()``.

    Attributes:
        touched: for each buffer touched before ``wait()``, a sentence of the warning. The rest of
            the warning is about handles that nobody waited for.

    """

    def __init__(self, text: str, touched: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.touched = tuple(touched)


class CollectiveMismatch(RuntimeError):
    """Raised on the rank that sees that its collective differs from the one the others entered.

    The call then ends with a `MismatchError`, which shows all ranks.
    """


def format_states(states: Sequence[RankState]) -> str:
    """Return the report's table: rank, what it does, where, for how long.

    If there are many ranks, those that do the same on the same line share a row, with the longest
    of their times.
    """
    if not states:
        return ""
    same: dict[object, list[RankState]] = {}
    for state in states:
        own_rows = len(states) <= _ROWS
        same.setdefault(state.rank if own_rows else (state.doing, state.where), []).append(state)
    if len(same) > _MANY_ROWS:  # each waits for another rank: what they do differs only in numbers
        same = {}
        for state in states:
            same.setdefault((re.sub(r"\d+", "", state.doing), state.where), []).append(state)
    rows = [("rank", "doing", "where", "for")]
    for together in same.values():
        times = [state.seconds for state in together if state.seconds is not None]
        seconds = f"{max(times):.1f} s" if times else ""
        ranks = in_short([state.rank for state in together])
        alike = len({state.doing for state in together}) == 1
        doing = together[0].doing if alike else f"{together[0].doing}, and so on"
        rows.append((ranks, doing, together[0].where, seconds))
    head, *body = format_table(rows).split("\n")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join([head, "  ".join("─" * width for width in widths), *body])
