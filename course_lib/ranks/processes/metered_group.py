"""A process group that shows and logs what it does.

`MeteredProcessGroup` passes every operation on to gloo or NCCL. Before that, it writes to the
`Board` what this rank enters. When the operation is over, it adds an `Event` to the rank's log.
PyTorch itself uses it as its process group. So it sees every operation: those of
``torch.distributed``, of `DistributedDataParallel`, and of code that does not know it.

Two rules make it possible to find hangs:

- *Before* gloo sees an operation, it is compared with what the other ranks entered. On different
  sizes gloo would crash, and it would silently take one dtype for another.
- A send of any size is complete when its receive is posted, as with NCCL. gloo does the same today.
  The board's counters are checked as well, so that this stays true if gloo changes, and so that
  polling works: gloo never reports a message as complete before somebody waits for it.
"""

from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks._torch.collective_table import (
    KINDS,
    Collective,
    check_tensors,
    reduction_of,
    sent_to_others,
    signature_of,
    splits_of,
)
from course_lib.ranks._torch.python_group import PythonGroup
from course_lib.ranks.processes.board_views import Message, MessageChannel, Wait
from course_lib.ranks.processes.gloo import launch
from course_lib.ranks.processes.gpu_group import GpuGroup
from course_lib.ranks.processes.metered_work import AnySourceWork, MeteredWork
from course_lib.ranks.processes.rank_recorder import MeteredOperation, RankRecorder
from course_lib.ranks.trace.event import Event, group_called

NAMES_PER_CALL = 1 << 20
"""The names of a rank's groups in call number c are c times this number, plus 1, plus 2, …"""


class MeteredProcessGroup(PythonGroup):
    """A process group around gloo or NCCL that shows and logs every operation.

    Args:
        members: its ranks, in order, as ranks of the whole world.
        name: the name of the group, the same on all members.
        recorder: the recorder of this rank.
        connect: makes the inner group; called again after a call that was given up.

    """

    registered = "metered"

    def __init__(
        self,
        members: tuple[int, ...],
        name: str,
        recorder: RankRecorder,
        connect: Callable[[], Any],
    ) -> None:
        super().__init__(recorder.rank, members, name)
        self._recorder = recorder
        self._connect = connect
        self._inner: Any = None
        self._met: set[int] = set()
        """The ranks with which this rank has started a message since the group connected."""
        self.key = zlib.crc32(name.encode()) + 1

    @functools.cached_property
    def label(self) -> str:
        """The group's name in text for people, which contains its number within the call."""
        name = self._name
        number = str(int(name) % NAMES_PER_CALL) if name.isdecimal() else name
        return group_called(number, str(self.group_desc))

    def connect(self) -> None:
        """Make the inner group; a further call replaces it by a new one."""
        self._inner = self._connect()
        self._met.clear()

    # Collectives -----------------------------------------------------------------------------

    def _collective(
        self, collective: Collective, arguments: tuple[Any, ...], options: Any
    ) -> dist.Work:
        if collective.one_by_one:  # functional collectives request several at once; gloo cannot
            outputs, inputs = arguments
            return self._one_by_one(collective.one_by_one, outputs, inputs, options)
        me, kind = self._recorder, KINDS[collective.kind]
        operations = collective.operations(arguments, self.size())
        tensors = [
            tensor
            for puts, gets in operations
            for tensor in (gets if kind.sized_by_what_it_gets else puts)
        ]
        root = self._peer(f"{kind.name} with root", options.rootRank) if kind.to_one else None
        for puts, gets in operations:
            check_tensors(kind.name, puts, gets, self.size(), root == me.rank)
        splits = splits_of(self._members, *operations[0]) if kind.uneven else None
        reduction = reduction_of(options.reduceOp) if kind.reduces else collective.variant
        signature = signature_of(kind.name, reduction, root, tensors)
        line = me.locate()
        limit = max(options.timeout, timedelta(0))
        seq = me.enter(self.key, self._members, signature, line, bool(limit), splits)
        all_puts = [tensor for puts, _ in operations for tensor in puts]
        sent = sent_to_others(kind.name, all_puts, self.rank())
        event = self._event(kind.name, tensors, root, seq, line)._replace(sent=sent)
        operation = MeteredOperation(me, event, Wait.COLLECTIVE, self.key)
        operation.launched()
        # The launch itself may block in gloo (barrier does), so show the rank as blocked already.
        operation.block(limited=bool(limit))
        inner_group = self._inner
        carrier = inner_group.carrier(tensors) if isinstance(inner_group, GpuGroup) else inner_group
        try:
            inner = launch(carrier, collective, arguments, options)
        except Exception:  # gloo refused it, or the limit is over
            operation.take_back(broken=bool(limit))
            operation.unblock()
            raise
        if not limit:  # else it must be seen until the wait ends: this rank goes on by itself
            operation.unblock()
        sliced = isinstance(carrier, dist.ProcessGroupGloo)
        work = MeteredWork(inner, operation, sliced=sliced, streams=not sliced, limit=limit)
        if sliced and getattr(options, "asyncOp", False):
            # Otherwise the operation would last, in the log, until the user waits for it.
            work.watch()
        return work

    def _one_by_one(self, method: str, outputs: Any, inputs: Any, options: Any) -> dist.Work:
        works: list[dist.Work] = []
        for output, part in zip(outputs, inputs, strict=True):
            if works:
                works[-1].wait()
            works.append(getattr(self, method)(output, part, options))
        return works[-1]

    # Point to point ------------------------------------------------------------------------

    def _message(self, kind: str, tensors: Any, peer: int | None, tag: int) -> dist.Work:
        if not 0 <= tag <= MessageChannel.MAX_TAG:
            raise ValueError(f"tag must be 0 to {MessageChannel.MAX_TAG}, got {tag}")
        puts, gets = (tensors, []) if kind == "send" else ([], tensors)
        check_tensors(kind, puts, gets, self.size(), peer == self._recorder.rank)
        self._recorder.slot(self.key, self._members)
        if peer is None:
            return self._from_anyone(tensors, tag)
        operation = self._announce(kind, tensors, peer, tag)
        launch = self._inner.send if kind == "send" else self._inner.recv
        connects = peer not in self._met
        if connects:
            operation.block()  # gloo may have to connect first
        try:
            inner = launch(tensors, self._members.index(peer), tag)
            self._met.add(peer)
        except Exception:
            operation.take_back()  # gloo refused it
            raise
        finally:
            if connects:
                operation.unblock()
        return MeteredWork(inner, operation)

    def _announce(self, kind: str, tensors: Any, peer: int, tag: int) -> MeteredOperation:
        channel = MessageChannel(kind == "send", peer, tag, self.key)
        message = Message(sum(tensor.numel() for tensor in tensors), _dtype(tensors))
        seq = self._recorder.start_message(channel, message)
        operation = self._operation(kind, tensors, peer, channel, seq)
        operation.launched()
        return operation

    def launches_batches(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether messages of these tensors can be launched together, as one operation."""
        inner = self._inner
        return isinstance(inner, GpuGroup) and inner.carrier(tensors) is not inner.gloo

    def batch(self, messages: Sequence[tuple[str, torch.Tensor, int, int]]) -> list[dist.Work]:
        """Launch messages together, so that none of them waits for another.

        `messages` has for each message its kind, its tensor, the other rank's position in the
        group, and its tag.
        """
        self._recorder.slot(self.key, self._members)
        started = [
            self._announce(kind, [tensor], self._members[index], tag)
            for kind, tensor, index, tag in messages
        ]
        nccl = self._inner.nccl
        started[0].block()  # the first batch of a group connects all its ranks
        try:
            nccl._start_coalescing()
            for kind, tensor, index, tag in messages:
                (nccl.send if kind == "send" else nccl.recv)([tensor], index, tag)
            inner = nccl._end_coalescing()
        finally:
            started[0].unblock()
        return [MeteredWork(inner, operation, streams=True) for operation in started]

    def _operation(
        self, kind: str, tensors: Any, peer: int | None, channel: MessageChannel, seq: int
    ) -> MeteredOperation:
        me, wait = self._recorder, Wait.SEND if kind == "send" else Wait.RECV
        event = self._event(kind, tensors, peer, seq, me.locate())._replace(tag=channel.tag)
        return MeteredOperation(me, event, wait, self.key, channel)

    def _event(
        self, kind: str, tensors: Sequence[torch.Tensor], peer: int | None, seq: int, line: str
    ) -> Event:
        now, nbytes = time.monotonic(), sum(map(_nbytes, tensors))
        return Event(
            self._recorder.rank, kind, self._members, peer, nbytes, _dtype(tensors), seq, now, now,
            line, self.label, waited=False,
        )  # fmt: skip

    def _from_anyone(self, tensors: Any, tag: int) -> dist.Work:
        me = self._recorder
        senders = [member for member in self._members if member != me.rank]

        def find() -> int | None:
            for peer in senders:
                sent = me.board.count(peer, MessageChannel(True, me.rank, tag, self.key))
                if sent > me.board.count(me.rank, MessageChannel(False, peer, tag, self.key)):
                    return peer
            return None

        waiting = MessageChannel.any_source(me.rank, tag, self.key)
        operation = self._operation("recv", tensors, None, waiting, 0)
        return AnySourceWork(
            operation, find, lambda peer: self._message("recv", tensors, peer, tag)
        )


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # a sparse tensor has no `nbytes`


def _dtype(tensors: Sequence[torch.Tensor]) -> str:
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
