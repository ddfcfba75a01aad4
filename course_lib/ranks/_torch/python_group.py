"""The base class of this package's process groups. It has what PyTorch needs of a Python group.

Every collective, however it was called, arrives at `_collective`, and every message at `_message`.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from course_lib.ranks._torch.collective_table import (
    COLLECTIVES,
    MONITORED_BARRIER,
    Collective,
    pieces,
)
from course_lib.ranks._torch.compiler import untraced
from course_lib.ranks._torch.process_world import is_registered
from course_lib.ranks.explain.words import in_short
from course_lib.ranks.trace.event import group_called


class PythonGroup(dist.ProcessGroup):
    """One process group of one rank.

    Args:
        rank: this rank, as a rank of the whole world.
        members: the group's ranks, in order, as ranks of the whole world.
        name: the name of the group, the same on all members.

    """

    backend = "gloo"
    """The backend name that scripts see, because they may branch on it."""
    registered = ""
    """The name under which the backend is registered with PyTorch. It cannot be "gloo", because
    DDP's C++ code treats every backend of that name as gloo itself."""

    def __init_subclass__(cls) -> None:
        # Releases from 2.15 on attach PyTorch's recorder to each group. It needs one from C++.
        not_attached: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        not_attached.add(cls.registered)
        untraced(cls)

    def __init__(self, rank: int, members: tuple[int, ...], name: str) -> None:
        super().__init__(members.index(rank), len(members))  # type: ignore[call-arg]
        self._members = members
        self._name = name

    @functools.cached_property  # every operation asks for it
    def label(self) -> str:
        """The group's name in text for people; see `Event.group_name`."""
        return group_called(self._name, str(self.group_desc))

    @property
    def members(self) -> tuple[int, ...]:
        """The group's ranks, in order, as ranks of the whole world."""
        return self._members

    @abstractmethod
    def _collective(
        self, collective: Collective, arguments: tuple[Any, ...], options: Any
    ) -> dist.Work:
        """Launch a collective, with the arguments of PyTorch's longer form."""

    @abstractmethod
    def _message(self, kind: str, tensors: Any, peer: int | None, tag: int) -> dist.Work:
        """Launch a send or a recv; `peer` is a rank of the whole world, or ``None`` for any."""

    def __repr__(self) -> str:
        return f"<{self.label or 'process group'}: ranks {in_short(self._members)}>"

    # PyTorch looks up these methods by name; without them, it says that they are "not set".
    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:
        return self.registered

    # Releases after 2.13 also check what the backend of a Python group supports.
    supports_coalescing = supports_splitting = False

    def _get_backend(self, device: torch.device) -> Any:
        return self

    # Saving a checkpoint in the background needs a group that takes tensors of the CPU.
    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")]

    def register_pre_hook(self, *_: Any) -> None:
        """Refuse what would never run: PyTorch runs hooks of operations, since 2.14, in C++."""
        raise NotImplementedError(
            "a hook on a process group's operations does not run here: look at ranks.trace, or use "
            'the groups of PyTorch itself with Ranks(…, on="cpu", metered=False)'
        )

    register_post_hook = register_pre_hook

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks. A barrier is always monitored here, and names all missing ranks."""
        options = dist.BarrierOptions()
        if timeout is not None:
            seconds = isinstance(timeout, int | float)
            options.timeout = timedelta(seconds=timeout) if seconds else timeout
        _method(MONITORED_BARRIER)(self, options).wait()

    def gather_single(self, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> dist.Work:
        """Gather into the rows of one tensor. PyTorch has this since 2.14."""
        at_root = options.rootRank == self.rank()
        return self.gather([pieces(output, self.size())] if at_root else [], [tensor], options)

    # Point to point ------------------------------------------------------------------------

    def send(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        return self._launch_message("send", tensors, self._peer("send to", peer), tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        return self._launch_message("recv", tensors, self._peer("recv from", peer), tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        return self._launch_message("recv", tensors, None, tag)

    def _launch_message(self, kind: str, tensors: Any, peer: int | None, tag: int) -> dist.Work:
        _check_contiguous(kind, tensors)
        if tag < 0:
            raise ValueError(f"tag must be 0 or more, got {tag}")
        return self._message(kind, tensors, peer, tag)

    def _peer(self, action: str, peer: int) -> int:
        if not 0 <= peer < len(self._members):
            message = f"{action} rank {peer}: the ranks of this group have the numbers 0 to "
            message += str(len(self._members) - 1)
            if self._members != tuple(range(len(self._members))):
                message += f" (global ranks: {', '.join(map(str, self._members))})"
            raise ValueError(message)
        return self._members[peer]


def _check_contiguous(kind: str, tensors: Any) -> None:
    """Refuse what gloo and NCCL refuse, on all kinds of ranks and with the same message."""
    if any(tensor.layout is torch.strided and not tensor.is_contiguous() for tensor in tensors):
        if kind == "recv":  # data received into a contiguous copy of x would not be in x
            raise ValueError(
                f"{kind} needs a contiguous tensor: receive into a new tensor y, then call "
                "x.copy_(y)"
            )
        raise ValueError(f"{kind} needs a contiguous tensor: make one with x.contiguous()")


def _method(collective: Collective) -> Callable[..., dist.Work]:
    def method(self: PythonGroup, *args: Any, opts: Any = None) -> dist.Work:
        arguments, extra_args = args[: collective.arguments], args[collective.arguments :]
        options = extra_args[0] if extra_args else opts or collective.options()
        if arguments and isinstance(arguments[0], torch.Tensor) and collective.in_place:
            arguments = ([arguments[0]],)  # DDP does so with its map of used parameters
        return self._collective(collective, arguments, options)

    method.__name__ = collective.method
    return method


def _with_name_of_pytorch(before: Any, in_full: Callable[[dist.Backend], str]) -> Any:
    """Wrap a function that names a group's backend: for ours, `in_full` writes the name."""

    @untraced
    @functools.wraps(before)
    def named(group: Any = None) -> Any:
        name, python_group = before(group), _ours(group)
        backends = [part.rpartition(":")[2] for part in name.split(",")]
        if python_group is None or not any(map(is_registered, backends)):
            return name
        return in_full(dist.Backend(python_group.backend))

    return named


def _monitored_barrier(before: Any) -> Any:
    """Wrap ``monitored_barrier``, which PyTorch has only for gloo, to accept a `PythonGroup`."""

    @untraced
    @functools.wraps(before)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        python_group = _ours(group)
        if python_group is None:
            before(group, timeout, wait_all_ranks)
        else:
            python_group.monitored_barrier(timeout, wait_all_ranks)

    return monitored_barrier


def _ours(group: Any) -> PythonGroup | None:
    """Return the group, or the default group for ``None``, if it is a `PythonGroup`."""
    resolved = dist.group.WORLD if group is None else group
    return resolved if isinstance(resolved, PythonGroup) else None


STAND_INS: dict[str, Callable[[Any], Any]] = {
    "get_backend": lambda before: _with_name_of_pytorch(before, lambda backend: backend),
    "get_backend_config": lambda before: _with_name_of_pytorch(
        before, lambda backend: str(distributed_c10d.BackendConfig(backend))
    ),
    "monitored_barrier": _monitored_barrier,
}
"""Name of a function of ``torch.distributed`` → a wrapper that makes it work with `PythonGroup`."""


for _each in COLLECTIVES:
    setattr(PythonGroup, _each.method, _method(_each))
    if _each.old_method:
        setattr(PythonGroup, _each.old_method, _method(_each))
untraced(PythonGroup)
