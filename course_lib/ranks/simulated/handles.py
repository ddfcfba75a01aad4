"""Misuse of handles: a rank never waits for one, or touches a buffer too early.

From the launch of an operation to its ``wait()``, its buffers belong to the network. A receive
buffer must be neither read nor written; a send buffer must not be written. On real networks such a
mistake sometimes gives slightly wrong numbers. This module sees every operator that touches such a
buffer. It does not see access without an operator (``numpy()``, ``tolist()``, ``print``).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.ranks._torch.collective_table import KINDS
from course_lib.ranks._torch.this_thread import remove_mode, watch_with
from course_lib.ranks.explain.lines import TORCH, frames_from, is_ours
from course_lib.ranks.explain.waiting import operation_in_words
from course_lib.ranks.simulated.operation import Operation

_LOOK_ONLY_AT_SHAPES = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like",
                        "randn_like", "new_empty", "new_zeros", "new_ones", "new_full",
                        "sym_size", "sym_numel", "set_", "resize_"}  # fmt: skip
MAX_MISUSES = 100
"""The largest number of misuses that are kept per rank."""


class Misuse(NamedTuple):
    """One mistake with a handle."""

    rank: int
    name: str
    """The operation, for example ``all_reduce #1``."""
    did: str
    """``read`` or ``wrote to``; empty if the rank never waited for the operation."""
    launched: str
    """The line of the operation."""
    where: str
    """The line of the mistake."""

    @property
    def words(self) -> str:
        """What the rank did, as the end of a sentence."""
        at = f" ({self.launched})" if self.launched else ""
        if not self.did:
            return f"never waited for {self.name}{at}: keep the handle and call its wait()."
        return f"{self.did} the buffer of {self.name}{at} before its wait(): {self.where}."


class _Buffer(NamedTuple):
    operation: Operation
    memory: int
    start: int
    end: int
    """The buffer is the bytes from `start` to `end` of its memory."""
    gets: bool
    """Whether the operation writes the buffer."""


class Handles:
    """The operations of one rank that it has launched and not waited for.

    Args:
        locate: returns the line of user code that is running.

    Attributes:
        misuses: the mistakes so far.

    """

    def __init__(self, locate: Callable[[], str]) -> None:
        self.misuses: list[Misuse] = []
        self._locate = locate
        self._open: dict[Operation, list[_Buffer]] = {}
        self._memory: dict[int, list[_Buffer]] = {}
        """Memory → the buffers in it."""
        self._reported: set[int] = set()
        self._mode = _Watch(self)

    def open(self, operation: Operation) -> None:
        """Note a launch, unless PyTorch launched it for itself: users never see that handle."""
        if _launched_by_torch():
            return
        buffers = _buffers(operation)
        self._look_at_launch(operation, buffers)
        self._open[operation] = buffers
        for buffer in buffers:
            self._memory.setdefault(buffer.memory, []).append(buffer)
        watch_with(self._mode)

    def close(self, operation: Operation) -> None:
        """Note that the rank waited for an operation or asked for its future."""
        buffers = self._open.pop(operation, None)
        if buffers is None:
            return
        self._reported.discard(id(operation))  # a later operation may have the same id
        if not self._open:
            self._memory.clear()
            remove_mode(self._mode)
        else:
            for buffer in buffers:
                self._memory[buffer.memory].remove(buffer)

    def resume(self) -> None:
        """Go on watching after backward or compiled code: PyTorch has restored what was before.

        It may have restored only one of two: the stack of modes, and whether there are any.
        """
        remove_mode(self._mode)
        watch_with(self._mode)
        if not self._open:
            remove_mode(self._mode)

    def finish(self) -> None:
        """Note the operations that the rank, which has ended, never waited for."""
        for operation in self._open:
            self._note(operation, "", "")
        self._open.clear()
        self._memory.clear()
        remove_mode(self._mode)

    def forget(self) -> None:
        """Delete the dispatch mode, because it holds a reference to the handles."""
        del self._mode

    def _note(self, operation: Operation, did: str, line: str) -> None:
        if id(operation) not in self._reported and len(self.misuses) < MAX_MISUSES:
            self._reported.add(id(operation))
            name = operation_in_words(operation.kind, seq=operation.seq, peer=operation.peer)
            self.misuses.append(Misuse(operation.rank, name, did, operation.where, line))

    # Operators --------------------------------------------------------------------------------

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the tensors that an operator touches."""
        if not self._open:
            return
        for index, name, writes in _tensors_of(func):
            value = args[index] if index < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor):
                    self._touch(tensor, writes)

    def _touch(self, tensor: torch.Tensor, writes: bool) -> None:
        if (memory := _memory(tensor)) not in self._memory:
            return
        start, end = _extent(tensor)
        for buffer in self._memory[memory]:
            if (buffer.gets or writes) and buffer.start < end and start < buffer.end:
                self._note(buffer.operation, "wrote to" if writes else "read", self._locate())

    def _look_at_launch(self, operation: Operation, buffers: list[_Buffer]) -> None:
        """Check that a launch neither uses what an open operation fills nor fills what it uses."""
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
    """Return index, name, and whether it is written, for each tensor argument of an operator."""
    if func.is_view or func.namespace != "aten" or func._opname in _LOOK_ONLY_AT_SHAPES:
        return ()
    return tuple(
        (index, argument.name, argument.alias_info is not None and argument.alias_info.is_write)
        for index, argument in enumerate(func._schema.arguments)
        if "Tensor" in str(argument.type)
    )


_FOLDER = os.path.dirname(dist.__file__)
_THROUGH = (
    *(os.path.join(_FOLDER, name) for name in ("distributed_c10d.py", "c10d_logger.py")),
    contextlib.__file__,
)
"""Files whose functions only pass on calls of their callers."""


@functools.cache
def _whose(name: str) -> str:
    """Return the owner of a file: ``"torch"``, ``"user"``, or ``""`` if it only passes on calls."""
    if is_ours(name) or name in _THROUGH:
        return ""
    return "torch" if name.startswith(TORCH) else "user"


def _launched_by_torch() -> bool:
    for frame in frames_from(sys._getframe(1)):
        if owner := _whose(frame.f_code.co_filename):
            return owner == "torch"
    return True


def _buffers(operation: Operation) -> list[_Buffer]:
    """Return where in memory the tensors of an operation are, and which of them it writes."""
    kind = KINDS[operation.kind]
    if kind.in_place:
        # Not written: the buffers of a broadcast's root and of a reduction's non-root ranks.
        at_root = operation.peer == operation.rank
        gets = operation.peer is None or at_root == kind.reduces
        accesses = [(operation.inputs, gets)]
    else:
        accesses = [(operation.inputs, False), (operation.outputs, True)]
    return [
        _Buffer(operation, memory, *_extent(tensor), gets)
        for tensors, gets in accesses
        for tensor in tensors
        if (memory := _memory(tensor)) is not None
    ]


def _memory(tensor: torch.Tensor) -> int | None:
    """Return a number that identifies a tensor's memory; ``None`` if it has no memory."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a wrapper around other tensors
        return None


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor's bytes begin in its memory, and where they end (exclusive)."""
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
