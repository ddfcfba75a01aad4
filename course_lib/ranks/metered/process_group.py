"""A process group that says what it does.

`MeteredProcessGroup` passes every operation on to gloo or NCCL. Before it does, it writes on the
`Board` what this rank enters; when the operation is over, it adds an `Event` to the rank's log.
Because it stands where PyTorch looks for a process group, it sees everything: calls of
``torch.distributed``, of `DistributedDataParallel`, and of code that has never heard of it.

Two rules make hangs findable:

- A collective is compared with what the other ranks entered *before* gloo sees it. gloo would
  crash on different sizes, and add up different dtypes as garbage without a word.
- A send is complete when its receive is posted, for every size, as with NCCL. gloo does the same
  today; that the board's counters are asked too keeps it so, and makes polling work: gloo never
  calls a message complete before somebody waits for it.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks.board.board import Wait
from course_lib.ranks.board.views import Channel
from course_lib.ranks.metered.collective_table import COLLECTIVES, Collective
from course_lib.ranks.metered.recorder import Event, Operation, Recorder, locator
from course_lib.ranks.metered.work import MeteredWork

__all__ = ["CollectiveMismatch", "Event", "MeteredProcessGroup", "Recorder", "install", "locator"]

_SIGNATURE = 96


class CollectiveMismatch(RuntimeError):
    """Raised on the rank that sees that its collective is not the one the others entered."""


_recorder: Recorder | None = None


def install(recorder: Recorder) -> None:
    """Make the backend ``metered`` known to torch.distributed in this process."""
    global _recorder
    _recorder = recorder
    if "metered" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "metered", _create, extended_api=True, devices=["cpu", "cuda"]
        )


def _create(options: Any, _: Any) -> MeteredProcessGroup:
    if _recorder is None:
        raise RuntimeError("the backend 'metered' exists only on ranks that Ranks(...) started")
    members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    rank, size, name = options.group_rank, options.group_size, options.group_id
    group = MeteredProcessGroup(rank, size, members, name, _recorder)
    # Connecting waits for the other members: that stands on the board as operation #0.
    connecting = Operation(
        _recorder, "new_group", members, None, 0, "", _recorder.locate(), Wait.COLLECTIVE,
        group.key, 0,
    )  # fmt: skip
    connecting.block()
    inner = dist.ProcessGroupNCCL if _nccl() else dist.ProcessGroupGloo
    with _without_greeting():
        group.connect(inner(options.store, rank, size, options.timeout))
    connecting.unblock()
    return group


@contextmanager
def _without_greeting() -> Iterator[None]:
    """Keep what gloo prints once it is connected, before PyTorch 2.11, out of a rank's output."""
    if torch.__version__ >= "2.11":
        yield
        return
    sys.stdout.flush()
    output = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(output, 1)
        os.close(output)


def _nccl() -> bool:
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call, no-any-return]


def _flat(tensors: torch.Tensor | Sequence[Any]) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for item in tensors for tensor in _flat(item)]


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _dtype(tensors: Sequence[torch.Tensor]) -> str:
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else ""


class MeteredProcessGroup(dist.ProcessGroup):
    """A process group around gloo or NCCL, whose every operation is shown and logged."""

    def __init__(
        self, rank: int, size: int, members: tuple[int, ...], name: str, recorder: Recorder
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._inner: Any = None
        self._members = members
        self._name = name
        self._recorder = recorder
        self.key = zlib.crc32(name.encode()) + 1
        self._slot = recorder.board.open_group(recorder.rank, self.key, members)

    def connect(self, inner: Any) -> None:
        """Pass operations on to `inner` from now on."""
        self._inner = inner

    # PyTorch asks a process group for these by name; without them it is "not set".
    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:
        return "metered"

    # Releases after 2.13 ask, of a Python group too, what its backend can do.
    supports_coalescing = supports_splitting = False

    def _get_backend(self, device: torch.device) -> Any:
        return self

    # Collectives -----------------------------------------------------------------------------

    def _collective(self, kind: Collective, arguments: tuple[Any, ...]) -> dist.Work:
        me, options = self._recorder, arguments[-1]
        tensors = [] if kind.tensors is None else _flat(arguments[kind.tensors])
        root = self._members[options.rootRank] if kind.rooted else None
        reduce_op = options.reduceOp if kind.reduces else None
        signature, where = _signature(kind, tensors, root, reduce_op), me.locate()
        seq = me.board.enter_collective(me.rank, self._slot, signature, where)
        self._compare(seq, signature)
        me.add_pending(1)
        operation = Operation(
            me, kind.name, self._members, root, _nbytes(tensors), _dtype(tensors), where,
            Wait.COLLECTIVE, self.key, seq,
        )  # fmt: skip
        launch = getattr(self._inner, kind.method, None) or getattr(self._inner, kind.old_method)
        # gloo may block inside the launch itself (barrier does), so the rank is shown from here on.
        operation.block()
        try:
            inner = launch(*arguments)
        except Exception:
            me.add_pending(-1)  # refused, so not under way
            raise
        finally:
            operation.unblock()
        emulated = me.link.carry_collective(operation, inner) if me.link is not None else None
        work = MeteredWork(inner, operation, emulated=emulated)
        if getattr(options, "asyncOp", False):
            # Otherwise an operation that is over would last, in the log, until someone waits.
            work.get_future()
        return work

    def _compare(self, seq: int, signature: str) -> None:
        me = self._recorder
        for other in self._members:
            entry = me.board.collective(other, self.key, seq) if other != me.rank else None
            if entry is not None and entry[0] != signature:
                raise CollectiveMismatch(
                    f"collective #{seq} of this group is '{signature}' on rank {me.rank} "
                    f"but '{entry[0]}' on rank {other} ({entry[1]})"
                )

    # Functional collectives, and so DTensor, ask for several at once. gloo has no such thing.

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._one_by_one("all_gather_single", outputs, inputs, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        return self._one_by_one("reduce_scatter_single", outputs, inputs, opts)

    # Names of PyTorch's releases before 2.13.
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _one_by_one(self, method: str, outputs: Any, inputs: Any, options: Any) -> dist.Work:
        works: list[dist.Work] = []
        for output, part in zip(outputs, inputs, strict=True):
            if works:
                works[-1].wait()
            works.append(getattr(self, method)(output, part, opts=options))
        return works[-1]

    # Point to point ------------------------------------------------------------------------

    def send(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        return self._message(Wait.SEND, tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        return self._message(Wait.RECV, tensors, peer, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        raise NotImplementedError(
            "recv without a source is not supported here (NCCL has none either): "
            "name the rank, as in dist.recv(tensor, src=0)"
        )

    def _message(self, wait: Wait, tensors: Any, peer: int, tag: int) -> dist.Work:
        me, other, sends = self._recorder, self._members[peer], wait is Wait.SEND
        if not 0 <= tag <= Channel.MAX_TAG:
            raise ValueError(f"tag must be 0 to {Channel.MAX_TAG}, got {tag}")
        flat, kind = _flat(tensors), "send" if sends else "recv"
        channel = Channel(sends, other, tag, self.key)
        other_end = channel.other_end(me.rank)
        seq = me.board.start_message(me.rank, channel)
        me.add_pending(1)
        operation = Operation(
            me, kind, self._members, other, _nbytes(flat), _dtype(flat), me.locate(), wait,
            self.key, seq, channel,
        )  # fmt: skip
        launch = self._inner.send if sends else self._inner.recv
        try:
            inner = launch(tensors, peer, tag)
        except Exception:
            me.add_pending(-1)
            raise
        emulated = me.link.carry_message(operation) if me.link is not None else None
        return MeteredWork(
            inner,
            operation,
            arrived=None if me.alone else lambda: me.board.count(other, other_end) >= seq,
            emulated=emulated,
        )


def _signature(
    kind: Collective, tensors: Sequence[torch.Tensor], root: int | None, reduce_op: Any
) -> str:
    """Return what must be the same on every rank that takes part."""
    words = [kind.name]
    if reduce_op is not None:
        words.append(str(getattr(reduce_op, "op", reduce_op)).rpartition(".")[2].lower())
    if root is not None:
        words.append(f"root={root}")
    if tensors:
        words.append(_dtype(tensors))
        if kind.sized:
            words.append(f"{sum(tensor.numel() for tensor in tensors)} elements")
    return " ".join(words)[:_SIGNATURE]


def _method(kind: Collective) -> Callable[..., dist.Work]:
    def method(self: MeteredProcessGroup, *arguments: Any, opts: Any = None) -> dist.Work:
        given = arguments[kind.arguments] if len(arguments) > kind.arguments else opts
        options = kind.options() if given is None else given
        return self._collective(kind, (*arguments[: kind.arguments], options))

    return method


for _kind in COLLECTIVES:
    setattr(MeteredProcessGroup, _kind.method, _method(_kind))
    if _kind.old_method:
        setattr(MeteredProcessGroup, _kind.old_method, _method(_kind))
