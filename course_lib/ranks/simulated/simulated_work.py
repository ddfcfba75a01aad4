"""Handles of operations on a fabric: what ``async_op=True`` and ``isend`` return."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks._torch.compiler import untraced
from course_lib.ranks._torch.this_thread import at_end_of_backward, backward_id, in_final_callback
from course_lib.ranks.explain.words import names_inside
from course_lib.ranks.simulated.handles import Handles
from course_lib.ranks.simulated.operation import Endpoint, Operation

_KEPT = 4096


class WorkQueue:
    """The works of one rank whose futures were requested, in order.

    C++ code may wait for a future: PyTorch's `DistributedDataParallel` does so when backward ends.
    C++ knows nothing of the endpoint, so no other rank would get its turn. So this queue waits for
    all these works first.
    """

    def __init__(self) -> None:
        self._open: deque[SimulatedWork] = deque()
        # C++ may hold a collective's work while nothing else holds its Python part, and without
        # that part C++ cannot wait. C++ never launches messages, so messages are not kept: there
        # may be thousands, and each garbage collection would look at them.
        self._kept: deque[SimulatedWork] = deque(maxlen=_KEPT)
        self._called: set[int] = set()

    def keep(self, work: SimulatedWork) -> None:
        """Keep a work's Python part alive."""
        self._kept.append(work)

    def forget(self) -> None:
        """Drop everything when the rank has ended; else its tensors wait for garbage collection."""
        self._open.clear()
        self._kept.clear()

    def add(self, work: SimulatedWork) -> None:
        """Remember a work whose future was requested."""
        if in_final_callback():
            work.wait()  # this callback will itself wait in C++, before any callback from here
            return
        self._open.append(work)
        backward = backward_id()
        if backward is not None and backward not in self._called:
            self._called.add(backward)
            at_end_of_backward(lambda: self._drain(backward))

    def _drain(self, backward: int) -> None:
        self._called.discard(backward)
        self.finish_until(lambda: False)

    def finish_until(self, condition: Callable[[], bool]) -> None:
        """Wait for the works, in order, until `condition` returns true or no work is left."""
        while self._open and not condition():  # a callback of a future may launch more works
            self._open.popleft().wait()


class SimulatedFuture(torch.futures.Future):  # type: ignore[type-arg]
    """The future of a work or of a chained callback. Waiting goes through the rank's endpoint."""

    _work: SimulatedWork

    @classmethod
    def of(cls, work: SimulatedWork) -> SimulatedFuture:
        """Make the future of `work`."""
        future = cls()
        future._work = work
        return future

    def done(self) -> bool:
        self._work.is_completed()
        return bool(super().done())

    def wait(self) -> Any:
        self._work.wait()
        return super().wait()  # if a callback returned a future, this is that future's value

    def then(self, callback: Callable[[Any], Any]) -> SimulatedFuture:
        after = SimulatedFuture.of(self._work)

        def run(_: Any) -> None:
            try:
                after.set_result(callback(self))
            except Exception as error:
                after.set_exception(error)

        self.add_done_callback(run)
        return after


@untraced
class SimulatedWork(dist.Work):
    """The handle of one operation."""

    def __init__(
        self,
        operation: Operation,
        endpoint: Endpoint,
        queue: WorkQueue,
        handles: Handles,
        result: Any,
    ) -> None:
        super().__init__()
        self._operation = operation
        self._endpoint = endpoint
        self._queue = queue
        self._handles = handles
        self._result = result
        self.before: list[SimulatedWork] = []
        """Other works: this one ends only when they have ended, too."""
        self._future: SimulatedFuture | None = None
        self._delivered = False
        if operation.kind not in ("send", "recv"):
            queue.keep(self)
        handles.open(operation)

    def limit(self, seconds: float) -> None:
        """Set how many virtual seconds a wait may take."""
        self._operation.limit = seconds

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._handles.close(self._operation)
        if not self._delivered:
            for work in self.before:
                work.wait()
            self._wait_here(timeout.total_seconds())
            self._deliver()
        return True

    def _wait_here(self, limit: float) -> None:
        operation = self._operation
        if limit > 0 and operation.end is None:
            operation.limit = limit
        self._endpoint.wait(operation)
        if operation.missing is not None:
            late = names_inside(operation.missing)
            reason = f"{late} did not take part"
            if not operation.missing:
                reason = "its messages have not arrived yet"
            raise RuntimeError(
                f"{operation.kind} did not end within its own time limit of {operation.limit:g} s: "
                f"{reason}"
            )

    def _deliver(self) -> None:
        self._delivered = True
        if self._future is not None:
            self._future.set_result(self._result)

    def is_completed(self) -> bool:
        if not self._delivered and self._endpoint.is_done(self._operation):
            self._handles.close(self._operation)
            self._deliver()
        return self._delivered

    def get_future(self) -> SimulatedFuture:
        self._handles.close(self._operation)
        if self._future is None:
            self._future = SimulatedFuture.of(self)
            if self._delivered:
                self._future.set_result(self._result)
            else:
                self._queue.add(self)
        return self._future

    def is_success(self) -> bool:
        return self._delivered

    def exception(self) -> Any:
        return None

    def result(self) -> Any:
        return self._result

    def source_rank(self) -> int:
        operation = self._operation
        return -1 if operation.peer is None else operation.members.index(operation.peer)

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()
