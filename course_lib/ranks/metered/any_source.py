"""A receive from whichever rank sends first: the board knows who has sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from course_lib.ranks.metered.recorder import MeteredOperation

_PAUSE = 1e-5, 2e-4


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
        raise NotImplementedError("a receive from any rank has no future: wait() for it")

    def is_success(self) -> bool:
        return self._work is not None and bool(self._work.is_success())

    def source_rank(self) -> int:
        return -1 if self._work is None else int(self._work._source_rank())

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()
