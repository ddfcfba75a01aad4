"""Handles of metered operations: what ``async_op=True``, ``isend`` and ``irecv`` return.

`AnySourceWork` is the handle of a receive from any source: the board shows which ranks have sent.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks._torch.compiler import untraced
from course_lib.ranks.processes.rank_recorder import MeteredOperation

_ending = threading.Lock()
_SLICE = timedelta(seconds=0.2)
"""Longest wait in compiled code; after each such wait, Python can handle a signal."""
_PAUSE = 1e-5, 2e-4
"""Shortest and longest pause, in seconds, between two checks whether the other side has started."""


class GivenUp(BaseException):
    """Raised on a rank whose call has failed elsewhere. It unwinds the call; the rank stays."""


def _ask_until(condition: Callable[[], bool], limit: float = math.inf) -> bool:
    """Ask, ever more rarely, until it is done or `limit` seconds are over; return whether it is."""
    until = time.monotonic() + limit
    pause, longest = _PAUSE
    while not (over := condition()) and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return over


@untraced
class MeteredWork(dist.Work):
    """A work of the inner group. The board shows waits for it, and the log records its end.

    Args:
        inner: the work of gloo or NCCL.
        operation: the operation that the work carries out.
        sliced: whether a wait for `inner` can be cut into short waits. If not, the operation is not
            over before the other ranks have started it, too.
        streams: whether `inner` is NCCL's, so that a stream waits for it and not the host. Then
            the host waits only until all other ranks have launched it, too. So a rank that never
            does is found here, and not when the host next reads a number from the GPU. A thread of
            the recorder notes the end.
        limit: time limit of a wait that names no limit; zero: no limit.

    """

    def __init__(
        self,
        inner: dist.Work,
        operation: MeteredOperation,
        sliced: bool = False,
        streams: bool = False,
        limit: timedelta = timedelta(0),
    ) -> None:
        super().__init__()
        self.streams = streams
        self._limit = limit
        self._inner = inner
        self._operation = operation
        self._sliced = sliced
        self._over = False
        self._given_up = self._pulled = False
        self._future: torch.futures.Future[Any] | None = None
        self._trigger: torch.futures.Future[None] = torch.futures.Future()
        self._awaited = False
        recorder, message = operation.recorder, operation.channel is not None
        self._open = recorder.open_messages if message else recorder.open_collectives
        self._open.add(self)
        if streams:
            recorder.watch_streams()

    @property
    def group(self) -> int:
        """Key of the process group."""
        return self._operation.group

    def _end(self) -> None:
        with _ending:  # gloo's thread may run a callback while this thread waits
            if not self._over:
                self._over = True
                if self._awaited:
                    self._operation.note_waited()
                self._operation.over()
                self._open.discard(self)
                self._operation.recorder.keep(self, self._operation.event.bytes)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        timeout = timeout or self._limit
        self._note_waited()
        self._operation.block(limited=bool(timeout))
        try:
            if timeout:
                self._wait_in_time(timeout)
            else:
                self._wait_others()
                self._wait_inner()
        finally:
            self._operation.unblock()
        if not self.streams:
            self._end()
        return True

    def _wait_others(self) -> None:
        limit = self._operation.recorder.limit
        if not self._sliced and not _ask_until(self._operation.arrived, limit):
            raise RuntimeError(
                f"{self._operation.event.kind} did not end within the group's time limit of "
                f"{limit:g} s"
            )

    def _wait_in_time(self, timeout: timedelta) -> None:
        limit = timeout.total_seconds()
        until = time.monotonic() + limit
        can_end = _ask_until(self._can_end, limit)
        try:
            if not can_end:
                raise RuntimeError("not all ranks took part")
            self._inner.wait()
        except RuntimeError as error:
            self._open.discard(self)
            self._operation.take_back(broken=True)
            if time.monotonic() < until - 0.1 * limit:
                raise
            kind = self._operation.event.kind
            raise RuntimeError(
                f"{kind} did not end within its own time limit of {limit:g} s: {error}"
            ) from None

    def _can_end(self) -> bool:
        """Return whether a wait would end at once, with success or with an error."""
        return self._inner.is_completed() if self._sliced else self._operation.arrived()

    def _wait_inner(self) -> None:
        if not self._sliced:
            self._inner.wait()
            return
        while True:
            try:
                self._inner.wait(_SLICE)
                return
            except RuntimeError:  # gloo failed, or only the slice is over
                if self._inner.is_completed():
                    self._inner.wait()  # raises gloo's error, if there is one
                    return

    def get_future(self) -> Any:
        # DDP's reducer waits for the future, in C++, and never calls wait().
        self._note_waited()
        if self.streams:
            # NCCL's future orders the streams that wait for it. A future made here would be
            # complete at once and order nothing: DDP would use gradients that are not yet reduced.
            return self._inner.get_future()
        return self.watch()

    def watch(self) -> Any:
        """Return the work's future, which notes its end. This does not count as waiting."""
        if self._future is None:
            self._future = self._trigger.then(lambda _: self._value())
            self._future.add_done_callback(lambda _: self._end())
            self._inner.get_future().add_done_callback(lambda _: self._pull())
        return self._future

    def _pull(self) -> None:
        with _ending:
            first, self._pulled = not self._pulled, True
        if first:
            self._trigger.set_result(None)

    def _value(self) -> Any:
        if self._given_up:
            raise RuntimeError("this call was stopped because it has failed on another rank")
        return self._inner.get_future().value()

    def give_up(self) -> None:
        """Fail the future, so that waits for it in compiled code end, on any thread."""
        self._given_up = True
        if self._future is not None:
            self._pull()

    def is_completed(self) -> bool:
        self._note_waited()
        return self.poll()

    def _note_waited(self) -> None:
        with _ending:
            self._awaited = True
            if self._over:
                self._operation.note_waited()

    def poll(self) -> bool:
        """Return whether the work is over. This does not count as waiting."""
        if self._over:
            return True
        if self.streams or self._sliced:
            completed = bool(self._inner.is_completed())
        elif completed := self._operation.arrived():
            self._inner.wait()  # gloo reports a message as complete only if somebody waits for it
        if completed:
            self._end()
        return completed

    def is_success(self) -> bool:
        return bool(self._inner.is_success())

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> Any:
        return self._inner.result()

    def source_rank(self) -> int:
        event = self._operation.event
        return -1 if event.peer is None else event.group.index(event.peer)

    _source_rank = source_rank

    def synchronize(self) -> None:
        self._inner.synchronize()


@untraced
class AnySourceWork(dist.Work):
    """A receive from any source. It becomes an ordinary receive when a sender is known.

    Args:
        operation: what the board shows until then.
        find: returns the rank of a waiting sender, or ``None``.
        receive: launches the receive from that rank.

    """

    def __init__(
        self,
        operation: MeteredOperation,
        find: Callable[[], int | None],
        receive: Callable[[int], dist.Work],
    ) -> None:
        super().__init__()
        self._operation = operation
        self._find = find
        self._receive = receive
        self._work: dist.Work | None = None

    def _look(self) -> dist.Work | None:
        if self._work is None and (sender := self._find()) is not None:
            self._work = self._receive(sender)
        return self._work

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._look() is None:
            self._operation.block()
            try:
                _ask_until(lambda: self._look() is not None)
            finally:
                self._operation.unblock()
        assert self._work is not None
        return bool(self._work.wait(timeout))

    def is_completed(self) -> bool:
        work = self._look()
        return work is not None and bool(work.is_completed())

    def get_future(self) -> Any:
        raise NotImplementedError("a receive without a source has no future: call wait() instead")

    def is_success(self) -> bool:
        return self._work is not None and bool(self._work.is_success())

    def source_rank(self) -> int:
        return -1 if self._work is None else int(self._work._source_rank())

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()
