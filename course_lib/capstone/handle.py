"""A handle that writes its wait on the tape."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist


class TapedWork(dist.Work):
    """A handle that writes its wait on the tape.

    Args:
        inner: the handle of the running operation.
        unseen: returns a context in which nothing is written on the tape.
        waited: writes the wait for the handle's operations on the tape.

    """

    def __init__(
        self,
        inner: dist.Work,
        unseen: Callable[[], AbstractContextManager[None]],
        waited: Callable[[], None],
    ) -> None:
        super().__init__()
        self._inner = inner
        self._unseen = unseen
        self._waited = waited

    def wait(self, *timeout: Any) -> bool:
        with self._unseen():
            done = self._inner.wait(*timeout)
        self._waited()
        return done

    def is_completed(self) -> bool:
        with self._unseen():
            done = bool(self._inner.is_completed())
        if done:
            self._waited()
        return done

    def get_future(self) -> Any:
        future = self._inner.get_future()
        future.add_done_callback(lambda _: self._waited())
        return future

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self._inner.result()

    def is_success(self) -> bool:
        return bool(self._inner.is_success())

    def exception(self) -> Any:
        return self._inner.exception()

    def source_rank(self) -> int:
        return self._inner.source_rank()

    _source_rank = source_rank
