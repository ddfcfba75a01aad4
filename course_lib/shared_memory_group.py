"""A process group over shared memory: a backend of one's own, for our DDP and PyTorch's alike.

`torch.distributed` calls methods of a `ProcessGroup`; whoever inherits from it is a backend. This
one sums CPU tensors in shared memory (`shared_memory`) and hands what else DDP needs (other
all-reduces, broadcast, all-gather, barrier) to the group that it was made from. It has no other
operations, and PyTorch does not know its members, so give it to DDP and not to other collectives:

    DistributedDataParallel(model, group=SharedMemoryGroup())            # ours
    torch.nn.parallel.DistributedDataParallel(model, process_group=SharedMemoryGroup())

An all-reduce is done when the call returns, so its handle has nothing left to wait for. It does not
overlap with backward; on a CPU that costs little, since communication needs the same cores.
"""

# PyTorch declares two overloads of every operation; its Python callers use the one with options.
# mypy: disable-error-code="override"
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.point_to_point import Group
from course_lib.shared_memory import SharedMemory


class Done(dist.Work):
    """The handle of an operation that is over: `wait` returns True, `result` the tensors."""

    def __init__(self, result: list[Tensor]) -> None:
        super().__init__()
        self._result = result
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future


class SharedMemoryGroup(dist.ProcessGroup):
    """A process group of the members of `inner` (None: all ranks), all on one machine.

    Args:
        inner: the group that does what is not summed in shared memory; None for all ranks.
        timeout: seconds, as of `SharedMemory`.

    Attributes:
        memory: the `SharedMemory`; tensors made by its `empty` are summed without being copied.

    Raises OSError and ValueError as `SharedMemory` does.
    """

    def __init__(self, inner: Group = None, timeout: float = 300.0) -> None:
        self.memory = SharedMemory(inner, timeout)
        super().__init__(self.memory.rank, self.memory.world_size)  # type: ignore[call-arg]
        self._inner: Any = dist.group.WORLD if inner is None else inner

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Sum `tensors`, of any shape, in place in shared memory, one after the other.

        Other operations, and tensors on a GPU, are the inner group's. Raises TimeoutError if a rank
        does not come.
        """
        summing = opts is None or opts.reduceOp == dist.ReduceOp.SUM
        if not summing or any(tensor.device.type != "cpu" for tensor in tensors):
            handle: dist.Work = self._inner.allreduce(tensors, opts)
            return handle
        for tensor in tensors:
            self.memory.all_reduce(tensor)
        return Done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        return self._inner.broadcast(tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self._inner.allgather(outputs, inputs, opts)

    def barrier(self, opts: Any = None) -> Any:
        return self._inner.barrier(opts or dist.BarrierOptions())

    def getBackendName(self) -> str:
        return "shared_memory"
