"""The output of simulated ranks: each thread has its own stream, which passes on whole lines."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO


class _RankStream(io.TextIOBase):
    """A text stream that passes on whole lines."""

    def __init__(self, put: Callable[[str], object]) -> None:
        self._put = put
        self._rest = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._put(line)
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


@contextmanager
def rank_streams(
    threads: Sequence[threading.Thread], put: Callable[[int, str], object]
) -> Iterator[None]:
    """Pass each line that the threads print to ``put(rank, line)``, inside a ``with`` block.

    Unfinished lines are passed on at its end.
    """
    streams = {
        thread: _RankStream(lambda line, rank=rank: put(rank, line))  # type: ignore[misc]
        for rank, thread in enumerate(threads)
    }
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Switch(sys.stdout, streams), _Switch(sys.stderr, streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams.values():
            stream.finish()
