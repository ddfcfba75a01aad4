"""The handle of a metered operation: what ``async_op=True`` and ``isend`` return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from course_lib.ranks.metered.emulated_link import Transfer
from course_lib.ranks.metered.recorder import MeteredOperation

_ending = threading.Lock()


class MeteredWork(dist.Work):
    """Work of the inner group; waiting for it stands on the board, its end goes into the log.

    Args:
        inner: the work of gloo or NCCL.
        operation: what it is part of.
        arrived: of a message, says whether the other side has started it too; a send is not over
            before that. ``None`` for a collective.
        emulated: its way through an emulated network; else ``None``.

    """

    def __init__(
        self,
        inner: dist.Work,
        operation: MeteredOperation,
        arrived: Callable[[], bool] | None = None,
        emulated: Transfer | None = None,
    ) -> None:
        super().__init__()
        self._inner = inner
        self._operation = operation
        self._arrived = arrived
        self._emulated = emulated
        self._over = False
        self._awaited = False
        recorder, message = operation.recorder, operation.channel is not None
        self._open = recorder.open_messages if message else recorder.open_collectives
        self._open.add(self)

    def _end(self) -> None:
        with _ending:  # a callback of gloo's thread may come while this one waits
            if not self._over:
                self._over = True
                self._operation.over()
                if self._awaited:
                    self._operation.note_waited()
                self._open.discard(self)
                self._operation.recorder.keep(self, self._operation.bytes)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._note_waited()
        self._operation.block()
        waited_since = time.monotonic()
        try:
            if self._emulated is not None:
                self._emulated.future.wait()
            self._inner.wait(timeout) if timeout else self._inner.wait()
            pause = 1e-5
            while self._arrived is not None and not self._arrived():
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)
        finally:
            self._operation.unblock()
        if self._emulated is not None:
            self._emulated.woke(waited_since, time.monotonic())
        self._end()
        return True

    def get_future(self) -> Any:
        # DDP's reducer waits for the future, in C++, and never calls wait().
        self._note_waited()
        return self.watch()

    def watch(self) -> Any:
        """Return its future, which notes the end; for those who look on, not the one who waits."""
        emulated = self._emulated
        future = emulated.future if emulated is not None else self._inner.get_future()
        future.add_done_callback(lambda _: self._end())
        return future

    def is_completed(self) -> bool:
        self._note_waited()
        return self.poll()

    def _note_waited(self) -> None:
        with _ending:
            self._awaited = True
            if self._over:
                self._operation.note_waited()

    def poll(self) -> bool:
        """Return whether it is over; for those who look on, not for the one who waits."""
        if self._over:
            return True
        if self._emulated is not None and not self._emulated.future.done():
            return False
        if self._arrived is None:
            done = bool(self._inner.is_completed())
        elif done := self._arrived():
            self._inner.wait()  # gloo never calls a message complete before somebody waits for it
        if done:
            self._end()
        return done

    def is_success(self) -> bool:
        return bool(self._inner.is_success())

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> Any:
        return self._inner.result()

    def source_rank(self) -> int:
        return int(self._inner._source_rank())

    _source_rank = source_rank

    def synchronize(self) -> None:
        self._inner.synchronize()
