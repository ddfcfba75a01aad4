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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks.board.pages import SIGNATURE
from course_lib.ranks.board.views import Channel, Wait
from course_lib.ranks.explain.errors import CollectiveMismatch
from course_lib.ranks.metered.collective_table import (
    KINDS,
    Collective,
    reduction_of,
    signature_of,
)
from course_lib.ranks.metered.emulated_link import EmulatedLink
from course_lib.ranks.metered.python_group import PythonGroup
from course_lib.ranks.metered.recorder import MeteredOperation, Recorder
from course_lib.ranks.metered.work import MeteredWork

_installed: tuple[Recorder, EmulatedLink | None] | None = None


def install(recorder: Recorder, link: EmulatedLink | None = None) -> None:
    """Make the backend ``metered`` known to torch.distributed in this process.

    `link`: this rank's end of an emulated network, if there is one.
    """
    global _installed
    _installed = recorder, link
    if "metered" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "metered", _create, extended_api=True, devices=["cpu", "cuda"]
        )


def _create(options: Any, _: Any) -> MeteredProcessGroup:
    if _installed is None:
        raise RuntimeError("the backend 'metered' exists only on ranks that Ranks(...) started")
    recorder, link = _installed
    members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    group = MeteredProcessGroup(members, options.group_id, recorder, link)
    # Connecting waits for the other members: that stands on the board as operation #0.
    connecting = MeteredOperation(
        recorder, "new_group", members, None, 0, "", recorder.locate(), Wait.COLLECTIVE,
        group.key, 0,
    )  # fmt: skip
    connecting.block()
    inner = dist.ProcessGroupNCCL if _nccl() else dist.ProcessGroupGloo
    with _without_greeting():
        group.connect(inner(options.store, options.group_rank, options.group_size, options.timeout))
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


class MeteredProcessGroup(PythonGroup):
    """A process group around gloo or NCCL, whose every operation is shown and logged."""

    backend = "metered"

    def __init__(
        self,
        members: tuple[int, ...],
        name: str,
        recorder: Recorder,
        link: EmulatedLink | None = None,
    ) -> None:
        super().__init__(recorder.rank, members, name)
        self._inner: Any = None
        self._recorder = recorder
        self._link = link
        self.key = zlib.crc32(name.encode()) + 1
        self._slot = recorder.board.open_group(recorder.rank, self.key, members)

    def connect(self, inner: Any) -> None:
        """Pass operations on to `inner` from now on."""
        self._inner = inner

    # Collectives -----------------------------------------------------------------------------

    def _collective(
        self, collective: Collective, arguments: tuple[Any, ...], options: Any
    ) -> dist.Work:
        if collective.one_by_one:  # functional collectives ask for several; gloo has no such thing
            outputs, inputs = arguments
            return self._one_by_one(collective.one_by_one, outputs, inputs, options)
        launch = getattr(self._inner, collective.method, None)
        launch = launch or getattr(self._inner, collective.old_method)
        me, kind = self._recorder, KINDS[collective.kind]
        operations = collective.operations(arguments, self.size())
        tensors = [
            tensor
            for puts, gets in operations
            for tensor in (gets if kind.sized_by_what_it_gets else puts)
        ]
        root = self._members[options.rootRank] if kind.to_one else None
        reduction = reduction_of(options.reduceOp) if kind.reduces else ""
        signature = signature_of(kind.name, reduction, root, tensors)[:SIGNATURE]
        where = me.locate()
        seq = me.board.enter_collective(me.rank, self._slot, signature, where)
        self._compare(seq, signature)
        me.add_pending(1)
        operation = MeteredOperation(
            me, kind.name, self._members, root, _nbytes(tensors), _dtype(tensors), where,
            Wait.COLLECTIVE, self.key, seq, group_name=self.label,
        )  # fmt: skip
        # gloo may block inside the launch itself (barrier does), so the rank is shown from here on.
        operation.block()
        try:
            inner = launch(*arguments, options)
        except Exception:
            me.add_pending(-1)  # refused, so not under way
            raise
        finally:
            operation.unblock()
        emulated = self._link.carry_collective(operation, inner) if self._link else None
        work = MeteredWork(inner, operation, emulated=emulated)
        if getattr(options, "asyncOp", False):
            # Otherwise an operation that is over would last, in the log, until someone waits.
            work.watch()
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

    def _one_by_one(self, method: str, outputs: Any, inputs: Any, options: Any) -> dist.Work:
        works: list[dist.Work] = []
        for output, part in zip(outputs, inputs, strict=True):
            if works:
                works[-1].wait()
            works.append(getattr(self, method)(output, part, options))
        return works[-1]

    # Point to point ------------------------------------------------------------------------

    def _message(self, kind: str, tensors: Any, peer: int | None, tag: int) -> dist.Work:
        if peer is None:
            raise NotImplementedError(
                "recv without a source is not supported here (NCCL has none either): "
                "name the rank, as in dist.recv(tensor, src=0)"
            )
        me, sends = self._recorder, kind == "send"
        if not 0 <= tag <= Channel.MAX_TAG:
            raise ValueError(f"tag must be 0 to {Channel.MAX_TAG}, got {tag}")
        channel = Channel(sends, peer, tag, self.key)
        other_end = channel.other_end(me.rank)
        seq = me.board.start_message(me.rank, channel)
        me.add_pending(1)
        operation = MeteredOperation(
            me, kind, self._members, peer, _nbytes(tensors), _dtype(tensors), me.locate(),
            Wait.SEND if sends else Wait.RECV, self.key, seq, channel,
            group_name=self.label,
        )  # fmt: skip
        launch = self._inner.send if sends else self._inner.recv
        try:
            inner = launch(tensors, self._members.index(peer), tag)
        except Exception:
            me.board.take_back_message(me.rank, channel)  # refused, so never started
            me.add_pending(-1)
            raise
        emulated = self._link.carry_message(operation) if self._link else None
        return MeteredWork(
            inner,
            operation,
            arrived=None if me.alone else lambda: me.board.count(peer, other_end) >= seq,
            emulated=emulated,
        )


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _dtype(tensors: Sequence[torch.Tensor]) -> str:
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
