"""What simulated ranks print: each thread its own stream, whole lines with the rank in front."""

from __future__ import annotations

import io
import queue
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from course_lib.ranks.output.printer import MAX_LINES


class _RankStream(io.TextIOBase):
    """A text stream that passes on whole lines."""

    def __init__(self, rank: int, put: Callable[[str], None]) -> None:
        self._rank = rank
        self._put = put
        self._rest = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._put(f"[rank {self._rank}] {line}")
        return len(text)

    def finish(self) -> None:
        if self._rest:
            self.write("\n")


class _Switch(io.TextIOBase):
    """Stands in for ``sys.stdout``: a rank's thread writes to its own stream, others as before."""

    def __init__(self, before: TextIO, streams: dict[threading.Thread, _RankStream]) -> None:
        self._before = before
        self._streams = streams

    def _target(self) -> Any:
        return self._streams.get(threading.current_thread(), self._before)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return int(self._target().write(text))

    def flush(self) -> None:
        self._target().flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._before, name)


class RankStreams:
    """While active, what the threads print goes, line by line, to `put`."""

    def __init__(self, threads: Sequence[threading.Thread], put: Callable[[str], None]) -> None:
        self._streams = {thread: _RankStream(rank, put) for rank, thread in enumerate(threads)}
        self._shown: Counter[str] = Counter()

    def __enter__(self) -> RankStreams:
        self._before = sys.stdout, sys.stderr
        sys.stdout = _Switch(sys.stdout, self._streams)
        sys.stderr = _Switch(sys.stderr, self._streams)
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout, sys.stderr = self._before

    def show(self, line: str) -> None:
        """Print one line, unless its rank has printed too many."""
        rank = line.partition("]")[0]
        self._shown[rank] += 1
        if self._shown[rank] <= MAX_LINES:
            self._before[0].write(line + "\n")

    def flush(self, messages: queue.SimpleQueue[str | None]) -> None:
        """Print what is left at the end of a call."""
        for stream in self._streams.values():
            stream.finish()
        while not messages.empty():
            line = messages.get()
            if line is not None:
                self.show(line)
        for rank, count in sorted(self._shown.items()):
            if count > MAX_LINES:
                self._before[0].write(f"{rank}] … and {count - MAX_LINES} more lines\n")
        self._before[0].flush()
