"""Handles of metered operations: what ``async_op=True``, ``isend`` and ``irecv`` return.

`AnySourceWork` is that of a receive from whichever rank sends first: the board knows who has sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks.processes.emulated_network import Transfer
from course_lib.ranks.processes.rank_recorder import MeteredOperation

_ending = threading.Lock()
_SLICE = timedelta(seconds=0.2)
"""A wait in compiled code lasts so long: after it, Python may see a signal."""
_PAUSE = 1e-5, 2e-4
"""Seconds between two looks whether the other side has come: the least and the most."""


class GivenUp(BaseException):
    """Raised on a rank whose call has failed elsewhere: it unwinds, and is kept."""


class MeteredWork(dist.Work):
    """Work of the inner group; waiting for it stands on the board, its end goes into the log.

    Args:
        inner: the work of gloo or NCCL.
        operation: what it is part of.
        arrived: of a message, says whether the other side has started it too; it is not over
            before that. ``None`` for a collective.
        emulated: its way through an emulated network; else ``None``.
        sliced: whether `inner` can be waited for a little at a time.
        streams: whether `inner` is NCCL's, for which a stream waits and not the host. Then the
            host is held only until all others have launched it too, so that a rank which never
            does is found here, and not where the host next reads a number from the GPU. A thread
            of the recorder notes the end.
        limit: how long a wait that names no limit lasts at most; zero: as long as it takes.
        take_back: called when a limit was over.

    """

    def __init__(
        self,
        inner: dist.Work,
        operation: MeteredOperation,
        arrived: Callable[[], bool] | None = None,
        emulated: Transfer | None = None,
        sliced: bool = False,
        streams: bool = False,
        limit: timedelta = timedelta(0),
        take_back: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.streams = streams
        self._limit = limit
        self._take_back = take_back
        self._inner = inner
        self._operation = operation
        self._arrived = arrived
        self._emulated = emulated
        self._sliced = sliced and arrived is None
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
        with _ending:  # a callback of gloo's thread may come while this one waits
            if not self._over:
                self._over = True
                if self._awaited:
                    self._operation.note_waited()
                self._operation.over()
                self._open.discard(self)
                self._operation.recorder.keep(self, self._operation.bytes)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        timeout = timeout or self._limit
        self._note_waited()
        waited_since = time.monotonic()
        if self._emulated is not None and self._emulated.is_over():
            self._wait_inner(timeout)  # for bytes that are nearly here
        else:
            self._operation.block(limited=bool(timeout))
            try:
                if timeout:
                    self._wait_in_time(timeout)
                else:
                    self._wait_others()
                    self._wait_inner(timeout)
            finally:
                self._operation.unblock()
        if self._emulated is not None:
            self._emulated.woke(waited_since, time.monotonic())
        if not self.streams:
            self._end()
        return True

    def _wait_others(self) -> None:
        if self._emulated is not None:
            self._emulated.wait()  # which knows, without being asked, when all have come
            return
        pause, most = _PAUSE
        until = time.monotonic() + self._operation.recorder.limit
        while self._arrived is not None and not self._arrived():
            if time.monotonic() > until:
                raise RuntimeError(
                    f"{self._operation.kind} did not end within the group's time limit of "
                    f"{self._operation.recorder.limit:g} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, most)

    def _wait_in_time(self, timeout: timedelta) -> None:
        limit = timeout.total_seconds()
        until = time.monotonic() + limit
        pause, most = _PAUSE
        while time.monotonic() < until and not self._can_end():
            time.sleep(pause)
            pause = min(2 * pause, most)
        try:
            if not self._can_end():
                raise RuntimeError("not all ranks took part")
            self._inner.wait()
        except RuntimeError as error:
            self._open.discard(self)
            self._operation.recorder.add_pending(-1)
            self._take_back()
            if time.monotonic() < until - 0.1 * limit:
                raise
            raise RuntimeError(
                f"{self._operation.kind} did not end within its own time limit of {limit:g} s: "
                f"{error}"
            ) from None

    def _can_end(self) -> bool:
        """Return whether a wait would be over at once, well or badly."""
        if self._emulated is not None and not self._emulated.is_over():
            return False
        return self._arrived() if self._arrived is not None else self._inner.is_completed()

    def _wait_inner(self, timeout: timedelta) -> None:
        if timeout or not self._sliced:
            self._inner.wait(timeout) if timeout else self._inner.wait()
            return
        while True:
            try:
                self._inner.wait(_SLICE)
                return
            except RuntimeError:  # of gloo, or merely that the slice is over
                if self._inner.is_completed():
                    self._inner.wait()  # says which
                    return

    def get_future(self) -> Any:
        # DDP's reducer waits for the future, in C++, and never calls wait().
        self._note_waited()
        if self.streams:
            # It orders the streams of those who wait for it. One of ours, made by hand, would be
            # complete at once and order nothing: DDP would use gradients that are not yet reduced.
            return self._inner.get_future()
        return self.watch()

    def watch(self) -> Any:
        """Return its future, which notes the end; for those who look on, not the one who waits."""
        if self._future is None:
            self._future = self._trigger.then(lambda _: self._value())
            self._future.add_done_callback(lambda _: self._end())
            if self._emulated is not None:
                self._emulated.when_over(self._pull)
            else:
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
        """Fail whoever waits for the future in compiled code: in any thread."""
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
        """Return whether it is over; for those who look on, not for the one who waits."""
        if self._over:
            return True
        if self._emulated is not None and not self._emulated.is_over():
            return False
        if self.streams or self._arrived is None:
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
        peer, members = self._operation.peer, self._operation.members
        return -1 if peer is None else members.index(peer)

    _source_rank = source_rank

    def synchronize(self) -> None:
        self._inner.synchronize()


class AnySourceWork(dist.Work):
    """Becomes an ordinary receive once it is known from whom.

    Args:
        operation: how it stands on the board until then.
        find: returns the rank of a sender that waits, or ``None``.
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
                pause, most = _PAUSE
                while self._look() is None:
                    time.sleep(pause)
                    pause = min(2 * pause, most)
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
