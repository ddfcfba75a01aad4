"""What a rank does to its handles: which it never waits for, which buffers it touches too early.

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
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.ranks.explain.lines import TORCH, is_ours
from course_lib.ranks.fabric.operation import Operation
from course_lib.ranks.fabric.torch_hooks import remove_mode, watch_with
from course_lib.ranks.metered.collective_table import KINDS

_LOOK_ONLY_AT_SHAPES = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like",
                        "randn_like", "new_empty", "new_zeros", "new_ones", "new_full",
                        "sym_size", "sym_numel", "set_", "resize_"}  # fmt: skip
_KEPT = 100


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


@dataclass
class _Buffer:
    operation: Operation
    start: int
    end: int
    """Bytes of its memory."""
    gets: bool
    """Whether the operation writes it."""


class Handles:
    """The operations of one rank that it has launched and not waited for.

    Args:
        locate: returns the line of user code that is running.

    Attributes:
        found: the mistakes so far.

    """

    def __init__(self, locate: Callable[[], str]) -> None:
        self.found: list[Misuse] = []
        self._locate = locate
        self._open: dict[int, Operation] = {}
        self._memory: dict[int, list[_Buffer]] | None = None
        """Memory → its buffers; made when an operator comes, which is after few launches."""
        self._told: set[int] = set()
        self._mode = _Watch(self)
        self._ours = False

    def open(self, operation: Operation) -> None:
        """Note a launch, unless it is PyTorch's own: nobody else has its handle."""
        if _launched_by_torch():
            return
        if self._open:
            self._look_at_launch(operation)
        self._open[id(operation)] = operation
        self._memory = None
        watch_with(self._mode)

    def close(self, operation: Operation) -> None:
        """Note that an operation was waited for, or that its future was asked for."""
        if self._open.pop(id(operation), None) is None:
            return
        self._memory = None
        if not self._open:
            remove_mode(self._mode)

    def resume(self) -> None:
        """Go on watching after PyTorch has put back the modes that it found: after backward."""
        if self._open:
            watch_with(self._mode)

    def finish(self) -> None:
        """Note what the rank never waited for: it has ended."""
        for operation in self._open.values():
            self._note(operation, "", "")
        self._open.clear()
        self._memory = None
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
        if id(operation) not in self._told and len(self.found) < _KEPT:
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
        if self._ours or not self._open or func.is_view or func.namespace != "aten":
            return
        if func._opname in _LOOK_ONLY_AT_SHAPES:
            return
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor):
                    self._touch(tensor, writes)

    def _touch(self, tensor: torch.Tensor, writes: bool) -> None:
        for buffer in self._overlapping(tensor):
            if buffer.gets or writes:
                self._note(buffer.operation, "wrote to" if writes else "read", self._locate())

    def _overlapping(self, tensor: torch.Tensor) -> list[_Buffer]:
        span = _span(tensor)
        if span is None:
            return []
        if self._memory is None:
            self._memory = self._map()
        memory, start, end = span
        buffers = self._memory.get(memory, ())
        return [each for each in buffers if each.start < end and start < each.end]

    def _map(self) -> dict[int, list[_Buffer]]:
        found: dict[int, list[_Buffer]] = {}
        for operation in self._open.values():
            for tensor, gets in _buffers(operation):
                if (span := _span(tensor)) is not None:
                    found.setdefault(span[0], []).append(_Buffer(operation, *span[1:], gets))
        return found

    def _look_at_launch(self, operation: Operation) -> None:
        """Look whether a launch uses what others still fill, or fills what others still use."""
        for tensor, gets in _buffers(operation):
            for buffer in self._overlapping(tensor):
                other = buffer.operation
                # The collectives of one group follow one another, as on a stream of NCCL.
                messages = {"send", "recv"} & {other.kind, operation.kind}
                in_order = other.group == operation.group and not messages
                if not in_order and (buffer.gets or gets):
                    self._note(other, "wrote to" if gets else "read", operation.where)


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


def _buffers(operation: Operation) -> list[tuple[torch.Tensor, bool]]:
    """Return the tensors of an operation, and for each whether it is written."""
    kind = KINDS[operation.kind]
    if kind.in_place:
        # The root of a broadcast, and all but the root of a reduction, keep what they have.
        here = operation.peer == operation.rank
        gets = operation.peer is None or here == kind.reduces
        return [(tensor, gets) for tensor in operation.inputs]
    return [
        *((tensor, False) for tensor in operation.inputs),
        *((tensor, True) for tensor in operation.outputs),
    ]


def _span(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """Return a tensor's memory, and its first and last byte there; ``None`` if it has none."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    try:
        memory = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a wrapper around other tensors
        return None
    size = tensor.element_size()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset()
    return memory, int(start * size), int((start + last + 1) * size)


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
