"""A process group over shared memory: a custom backend, for our DDP and for PyTorch's.

`torch.distributed` calls methods of a `ProcessGroup`; every class that inherits from it is a
backend. This one sums CPU tensors in shared memory (`shared_memory`) and passes everything else to
the group that it was made from. You can use it wherever a group is expected:

    >>> from course_lib.ddp import DistributedDataParallel
    >>> from course_lib.peer_memory import shared_memory_group
    >>> model = DistributedDataParallel(model, group=shared_memory_group())

PyTorch's DDP takes it as `process_group`.

An all-reduce is done when the call returns, so `wait()` on its handle returns at once. It does not
overlap with backward. On a CPU that costs little, because communication needs the same cores.
"""

# PyTorch declares two overloads of every operation; its Python callers use the one with options.
# mypy: disable-error-code="override"
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives import Group, place_in
from course_lib.peer_memory.shared_memory import SharedMemory

NAME = "shared_memory"
"""The name of the backend."""


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
    """The process group that `shared_memory_group` returns.

    Attributes:
        memory: the `SharedMemory`; tensors made by its `empty` are summed without being copied.

    """

    def __init__(self, inner: dist.ProcessGroup, timeout: float) -> None:
        self.memory = SharedMemory(inner, timeout)
        super().__init__(self.memory.rank, self.memory.world_size)  # type: ignore[call-arg]
        self._inner = inner
        self._name = ""

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Sum `tensors`, of any shape, in place in shared memory, one after the other.

        The inner group handles other operations and tensors on a GPU. Raises TimeoutError if a rank
        does not call, TypeError for a sparse tensor.
        """
        if not isinstance(opts, dist.AllreduceOptions):  # the short form: an operation or None
            operation, opts = opts, dist.AllreduceOptions()
            opts.reduceOp = dist.ReduceOp.SUM if operation is None else operation
        summing = opts.reduceOp == dist.ReduceOp.SUM
        if not summing or any(tensor.device.type != "cpu" for tensor in tensors):
            return self._inner.allreduce(tensors, opts)
        for tensor in tensors:
            self.memory.all_reduce(tensor)
        return Done(tensors)

    # PyTorch calls these methods by name; without them the group's name is "not set".
    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:
        return NAME


def shared_memory_group(inner: Group = None, timeout: float = 300.0) -> SharedMemoryGroup:
    """Return a process group of the members of `inner` (None: all ranks), all on one machine.

    All members must call. Like a group from `new_group`, it is known to `torch.distributed`, and
    `destroy_process_group` frees it. `timeout` is in seconds. Raises OSError and ValueError as
    `SharedMemory` does.
    """
    place_in(inner)
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    given = (dist.group.WORLD if inner is None else inner, timeout)
    members = dist.get_process_group_ranks(inner)
    # Its ranks must be numbered as in the inner group.
    order: dict[str, Any] = {} if members == sorted(members) else {"sort_ranks": False}
    group = dist.new_group(
        members, backend=NAME, pg_options=given, use_local_synchronization=True, **order
    )
    assert isinstance(group, SharedMemoryGroup)
    return group


def _create(_: Any, given: tuple[dist.ProcessGroup, float]) -> SharedMemoryGroup:
    return SharedMemoryGroup(*given)


def _handed_on(name: str) -> Callable[..., Any]:
    def method(self: SharedMemoryGroup, *arguments: Any, **options: Any) -> Any:
        return getattr(self._inner, name)(*arguments, **options)

    return method


for _name in (
    *("broadcast", "reduce", "allgather", "gather", "scatter", "reduce_scatter", "alltoall"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single"),
    *("_allgather_base", "_reduce_scatter_base", "alltoall_base"),  # before PyTorch 2.13
    *("allreduce_coalesced", "allgather_coalesced", "barrier"),
    *("send", "recv", "recv_anysource"),
):
    setattr(SharedMemoryGroup, _name, _handed_on(_name))
