"""The output of the ranks, on its way to the notebook.

Lines are shown as they arrive. A line that several ranks print is shown once: the first rank's line
waits a tenth of a second for the same line of the others.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from course_lib.ranks.explain.words import counted

_CHUNK = 1 << 16
LINE_WINDOW = 0.1
"""Seconds that a line waits for the same line of the other ranks."""
DISPLAY_WINDOW = 0.5
"""The same for displayed objects: a figure takes longer to draw, and rank 0's comes first."""
MAX_LINES = 2000
"""Number of lines of one call that are shown, before the last `LAST_LINES` of the rest."""
LAST_LINES = 10

T = TypeVar("T")
Item = str | dict[str, Any]
"""A line of text, or a bundle of one displayed object in several formats."""


def label(ranks: Sequence[int]) -> str:
    """Return ``[rank 2]``, ``[ranks 0-3]`` or ``[ranks 0, 2]``."""
    if len(ranks) == 1:
        return f"[rank {ranks[0]}]"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"[ranks {ranks[0]}-{ranks[-1]}]"
    return f"[ranks {', '.join(map(str, ranks))}]"


def equal_items(items: Iterable[tuple[int, T]]) -> list[tuple[T, list[int]]]:
    """Return each item once, with the ranks that have it."""
    groups: list[tuple[T, list[int]]] = []
    for rank, item in items:
        same = next((ranks for other, ranks in groups if other == item), None)
        if same is None:
            groups.append((item, [rank]))
        else:
            same.append(rank)
    return groups


class Printer:
    """Puts the output of all ranks into one order, and merges equal lines and displays."""

    def __init__(self, world_size: int) -> None:
        self._queues: list[deque[tuple[float, Item]]] = [deque() for _ in range(world_size)]
        self._shown = 0
        self._hidden = 0
        self._last: deque[tuple[int, Item]] = deque(maxlen=LAST_LINES)

    def add(self, rank: int, item: Item) -> None:
        """Add one line or display of a rank."""
        if self._shown >= MAX_LINES:
            self._hidden += 1
            self._last.append((rank, item))
        else:
            self._queues[rank].append((time.monotonic(), item))

    def release(self, everything: bool = False) -> None:
        """Show the lines and displays that no longer have to wait for other ranks."""
        while heads := {r: queue[0] for r, queue in enumerate(self._queues) if queue}:
            now = time.monotonic()
            if self._shown >= MAX_LINES:
                for rank in heads:
                    self.add(rank, self._queues[rank].popleft()[1])
                continue
            groups = equal_items((rank, item) for rank, (_, item) in heads.items())
            all_there = len(heads) == len(self._queues)
            largest = max(len(ranks) for _, ranks in groups)
            ready = [
                (item, ranks)
                for item, ranks in groups
                if everything
                or len(ranks) == len(self._queues)
                or now - min(heads[rank][0] for rank in ranks) > _patience(item)
                # The item of most ranks waits for the remaining ranks. Rarer items need not wait.
                or (all_there and (len(ranks) < largest or largest == 1))
            ]
            if not ready:
                return
            if all_there and largest > 1:
                ready = [group for group in ready if len(group[1]) < largest] or ready[:1]
            for item, ranks in ready:
                for rank in ranks:
                    self._queues[rank].popleft()
                self._show(label(ranks), item)
        sys.stdout.flush()

    def end_call(self) -> None:
        """Show the remaining output, at the end of a call."""
        self.release(everything=True)
        if self._hidden:
            left = self._hidden - len(self._last)
            if left:
                hidden = counted(left, "more line")
                print(f"… {hidden} left out. The last lines:")
            for rank, item in self._last:
                self._show(label([rank]), item)
        self._shown = self._hidden = 0
        self._last.clear()
        sys.stdout.flush()

    def _show(self, rank_label: str, item: Item) -> None:
        self._shown += 1
        if isinstance(item, str):
            print(f"{rank_label} {item}")
        else:
            show_bundle(rank_label, item)


def _patience(item: Item) -> float:
    return LINE_WINDOW if isinstance(item, str) else max(LINE_WINDOW, DISPLAY_WINDOW)


def show_bundle(rank_label: str, bundle: dict[str, Any]) -> None:
    """Display a bundle under a label: rich output in a notebook, else text."""
    plain = str(bundle.get("text/plain", ""))
    if in_notebook() and set(bundle) - {"text/plain"}:
        from IPython.display import display

        print(rank_label)
        sys.stdout.flush()
        display(bundle, raw=True)
    else:
        print(f"{rank_label} {plain}" if "\n" not in plain else f"{rank_label}\n{plain}")


def in_notebook() -> bool:
    """Return whether output goes to a Jupyter kernel, which can show more than text."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if hasattr(ipython, "get_ipython") else None
    return getattr(shell, "kernel", None) is not None


class RankOutput:
    """The reading end of a rank's output pipe.

    Args:
        rank: the rank.
        fd: the pipe's descriptor.
        show: called with the rank and each line.

    """

    def __init__(self, rank: int, fd: int, show: Callable[[int, str], None]) -> None:
        os.set_blocking(fd, False)
        self._rank = rank
        self._fd = fd
        self._show = show
        self._rest = b""

    def fileno(self) -> int:
        """Return the pipe's descriptor, for a selector."""
        return self._fd

    def forward(self) -> bool:
        """Pass on the complete lines that have arrived; return whether more may come."""
        try:
            return self._forward() > 0
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _forward(self) -> int:
        """Read once and pass on the complete lines; return the number of bytes read."""
        data = os.read(self._fd, _CHUNK)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _CHUNK:  # a very long line: pass on what has arrived
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._add(line)
        return len(data)

    def drain(self) -> None:
        """Pass on everything that was written so far, including an incomplete line."""
        with suppress(OSError):
            # A pipe holds one chunk. The number of reads is limited, as a thread may print forever.
            for _ in range(4):
                self._forward()
        if self._rest:
            self._add(self._rest)
            self._rest = b""

    def _add(self, line: bytes) -> None:
        # A progress bar overwrites its line: only the last version counts.
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")
        self._show(self._rank, text)

    def close(self) -> None:
        """Close the pipe."""
        with suppress(OSError):
            os.close(self._fd)
