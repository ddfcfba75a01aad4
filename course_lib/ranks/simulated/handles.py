"""Misuse of handles: a rank never waits for one, or touches a buffer too early.

From the launch of an operation to its ``wait()``, its buffers belong to the network: what it
receives may not be read or written, what it sends may not be written. Real networks punish a
mistake now and then, with numbers that are slightly wrong. Here every operator that touches such a
buffer is seen; what goes past PyTorch's operators (``numpy()``, ``tolist()``, ``print``) is not.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.ranks._torch.collective_table import KINDS
from course_lib.ranks._torch.this_thread import remove_mode, watch_with
from course_lib.ranks.explain.lines import TORCH, is_ours
from course_lib.ranks.simulated.operation import Operation

_LOOK_ONLY_AT_SHAPES = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like",
                        "randn_like", "new_empty", "new_zeros", "new_ones", "new_full",
                        "sym_size", "sym_numel", "set_", "resize_"}  # fmt: skip
MAX_MISUSES = 100
"""The number of misuses of one rank that are kept."""


class Misuse(NamedTuple):
    """One mistake with a handle."""

    rank: int
    what: str
    """The operation: ``all_reduce #1``."""
    did: str
    """``""``: it was never waited for; else ``read`` or ``wrote to``."""
    launched: str
    """The line of the operation."""
    where: str
    """The line of the mistake."""


class _Buffer(NamedTuple):
    operation: Operation
    memory: int
    start: int
    end: int
    """Bytes of its memory."""
    gets: bool
    """Whether the operation writes it."""


class Handles:
    """The operations of one rank that it has launched and not waited for.

    Most operations are waited for at once. So nothing is found out about one before another is
    launched or an operator comes.

    Args:
        locate: returns the line of user code that is running.
        watched: whether anybody wants to know.

    Attributes:
        found: the mistakes so far.

    """

    def __init__(self, locate: Callable[[], str], watched: bool = True) -> None:
        self.found: list[Misuse] = []
        self._locate = locate
        self._watched = watched
        self._open: dict[Operation, list[_Buffer]] = {}
        self._unread: Operation | None = None
        """The one whose buffers are not known yet."""
        self._memory: dict[int, list[_Buffer]] = {}
        """Memory → the buffers there."""
        self._told: set[int] = set()
        self._mode = _Watch(self)
        self._ours = False

    def open(self, operation: Operation) -> None:
        """Note a launch, unless it is PyTorch's own: nobody else has its handle."""
        if not self._watched or _launched_by_torch():
            return
        if self._open:
            self._read()
            buffers = _buffers(operation)
            self._look_at_launch(operation, buffers)
            self._add(operation, buffers)
        else:
            self._open[operation] = []
            self._unread = operation
        watch_with(self._mode)

    def close(self, operation: Operation) -> None:
        """Note that an operation was waited for, or that its future was asked for."""
        buffers = self._open.pop(operation, None)
        if buffers is None:
            return
        if operation is self._unread:
            self._unread = None
        self._told.discard(id(operation))  # which another may have later
        if not self._open:
            self._memory.clear()
            remove_mode(self._mode)
        else:
            for buffer in buffers:
                self._memory[buffer.memory].remove(buffer)

    def resume(self) -> None:
        """Go on watching after PyTorch has put back the modes that it found: after backward."""
        if self._open:
            watch_with(self._mode)

    def finish(self) -> None:
        """Note what the rank never waited for: it has ended."""
        for operation in self._open:
            self._note(operation, "", "")
        self._open.clear()
        self._memory.clear()
        self._unread = None
        remove_mode(self._mode)

    def forget(self) -> None:
        """Let go of the mode that shows the operators, which holds the handles."""
        del self._mode

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Let this package look at tensors."""
        before, self._ours = self._ours, True
        try:
            yield
        finally:
            self._ours = before

    def _note(self, operation: Operation, did: str, where: str) -> None:
        if id(operation) not in self._told and len(self.found) < MAX_MISUSES:
            self._told.add(id(operation))
            what = operation.kind
            if what in ("send", "recv"):
                other = "any rank" if operation.peer is None else f"rank {operation.peer}"
                what += f" {'to' if what == 'send' else 'from'} {other}"
            else:
                what += f" #{operation.seq}"
            self.found.append(Misuse(operation.rank, what, did, operation.where, where))

    # Operators --------------------------------------------------------------------------------

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at what an operator touches."""
        if self._ours or not self._open:
            return
        for place, name, writes in _tensors_of(func):
            value = args[place] if place < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor):
                    self._touch(tensor, writes)

    def _touch(self, tensor: torch.Tensor, writes: bool) -> None:
        self._read()
        if (memory := _memory(tensor)) not in self._memory:
            return
        start, end = _extent(tensor)
        for buffer in self._memory[memory]:
            if (buffer.gets or writes) and buffer.start < end and start < buffer.end:
                self._note(buffer.operation, "wrote to" if writes else "read", self._locate())

    def _read(self) -> None:
        if self._unread is not None:
            self._add(self._unread, _buffers(self._unread))
            self._unread = None

    def _add(self, operation: Operation, buffers: list[_Buffer]) -> None:
        self._open[operation] = buffers
        for buffer in buffers:
            self._memory.setdefault(buffer.memory, []).append(buffer)

    def _look_at_launch(self, operation: Operation, buffers: list[_Buffer]) -> None:
        """Look whether a launch uses what others still fill, or fills what others still use."""
        for _, memory, start, end, gets in buffers:
            for buffer in self._memory.get(memory, ()):
                if not ((buffer.gets or gets) and buffer.start < end and start < buffer.end):
                    continue
                other = buffer.operation
                # The collectives of one group follow one another, as on a stream of NCCL.
                messages = {"send", "recv"} & {other.kind, operation.kind}
                if messages or other.group != operation.group:
                    self._note(other, "wrote to" if gets else "read", operation.where)


@functools.lru_cache(maxsize=4096)
def _tensors_of(func: Any) -> tuple[tuple[int, str, bool], ...]:
    """Return of an operator's arguments that hold tensors: place, name, and whether it writes."""
    if func.is_view or func.namespace != "aten" or func._opname in _LOOK_ONLY_AT_SHAPES:
        return ()
    return tuple(
        (place, argument.name, argument.alias_info is not None and argument.alias_info.is_write)
        for place, argument in enumerate(func._schema.arguments)
        if "Tensor" in str(argument.type)
    )


_FOLDER = os.path.dirname(dist.__file__)
_THROUGH = (
    *(os.path.join(_FOLDER, name) for name in ("distributed_c10d.py", "c10d_logger.py")),
    contextlib.__file__,
)
"""Files whose functions hand on what someone else calls."""


@functools.cache
def _whose(name: str) -> str:
    """Return whose a file is: ``"torch"``, ``"user"``, or ``""`` if it hands on calls."""
    if is_ours(name) or name in _THROUGH:
        return ""
    return "torch" if name.startswith(TORCH) else "user"


def _launched_by_torch() -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if whose := _whose(frame.f_code.co_filename):
            return whose == "torch"
        frame = frame.f_back
    return True


def _buffers(operation: Operation) -> list[_Buffer]:
    """Return where the tensors of an operation lie, and which of them it writes."""
    kind = KINDS[operation.kind]
    if kind.in_place:
        # The root of a broadcast, and all but the root of a reduction, keep what they have.
        here = operation.peer == operation.rank
        gets = operation.peer is None or here == kind.reduces
        given = [(operation.inputs, gets)]
    else:
        given = [(operation.inputs, False), (operation.outputs, True)]
    return [
        _Buffer(operation, memory, *_extent(tensor), gets)
        for tensors, gets in given
        for tensor in tensors
        if (memory := _memory(tensor)) is not None
    ]


def _memory(tensor: torch.Tensor) -> int | None:
    """Return what names a tensor's memory; ``None`` if it has none."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a wrapper around other tensors
        return None


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its memory, and the one after its last."""
    size, start = tensor.element_size(), tensor.storage_offset()
    if tensor.is_contiguous():
        count = tensor.numel()
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        count = sum((n - 1) * step for n, step in steps) + 1
    return int(start * size), int((start + count) * size)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows every operator to the handles."""

    def __init__(self, handles: Handles) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._handles = handles

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._handles.look(func, args, kwargs)
        return func(*args, **kwargs)
