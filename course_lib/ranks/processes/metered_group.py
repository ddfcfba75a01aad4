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

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks._torch.collective_table import (
    KINDS,
    Collective,
    reduction_of,
    sent_to_others,
    signature_of,
)
from course_lib.ranks._torch.python_group import PythonGroup
from course_lib.ranks.explain.errors import CollectiveMismatch
from course_lib.ranks.explain.words import counted
from course_lib.ranks.processes.board import SIGNATURE
from course_lib.ranks.processes.board_views import Message, MessageChannel, Wait
from course_lib.ranks.processes.emulated_network import EmulatedLink
from course_lib.ranks.processes.gloo import launch
from course_lib.ranks.processes.gpu_group import GpuGroup
from course_lib.ranks.processes.metered_work import AnySourceWork, MeteredWork
from course_lib.ranks.processes.rank_recorder import MeteredOperation, RankRecorder
from course_lib.ranks.trace.event import group_called

NAMES_PER_CALL = 1 << 20
"""The names of a rank's groups in call number c are c times this number, plus 1, plus 2, …"""


class MeteredProcessGroup(PythonGroup):
    """A process group around gloo or NCCL that shows and logs every operation.

    Args:
        members: its ranks, in order, as ranks of the whole world.
        name: the name of the group, the same on all members.
        recorder: the recorder of this rank.
        link: this rank's end of an emulated network, if there is one.
        connect: makes the inner group; called again after a call that was given up.

    """

    registered = "metered"

    def __init__(
        self,
        members: tuple[int, ...],
        name: str,
        recorder: RankRecorder,
        link: EmulatedLink | None,
        connect: Callable[[], Any],
    ) -> None:
        super().__init__(recorder.rank, members, name)
        self._recorder = recorder
        self._link = link
        self._connect = connect
        self._inner: Any = None
        self._met: set[int] = set()
        """The ranks with which this rank has started a message since the group connected."""
        self.key = zlib.crc32(name.encode()) + 1
        self._slot, self._opened_in = -1, -1

    @property
    def label(self) -> str:
        """The group's name in text for people, which contains its number within the call."""
        name = self._name
        number = str(int(name) % NAMES_PER_CALL) if name.isdecimal() else name
        return group_called(number, str(self.group_desc))

    def connect(self) -> None:
        """Make the inner group; a further call replaces it by a new one."""
        self._inner = self._connect()
        self._met.clear()

    def _place(self) -> int:
        """Return this group's slot on the board in the current call."""
        me = self._recorder
        if self._opened_in != me.calls:
            self._slot = me.board.open_group(me.rank, self.key, self._members)
            self._opened_in = me.calls
        return self._slot

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
        reduction = reduction_of(options.reduceOp) if kind.reduces else collective.variant
        signature = signature_of(kind.name, reduction, root, tensors)[:SIGNATURE]
        where = me.locate()
        seq = me.board.enter_collective(me.rank, self._place(), signature, where)
        what = f"collective #{seq} of this group"
        compare_entries(me, self._members, self.key, seq, signature, what)
        me.add_pending(1)
        operation = MeteredOperation(
            me, kind.name, self._members, root, _nbytes(tensors), _dtype(tensors), where,
            Wait.COLLECTIVE, self.key, seq, group_name=self.label,
            sent=sent_to_others(kind.name, _puts(operations), self.rank()),
        )  # fmt: skip
        # The launch itself may block in gloo (barrier does), so show the rank as blocked already.
        limit = max(options.timeout, timedelta(0))
        operation.block(limited=bool(limit))
        whole = self._inner
        carrier = whole.carrier(tensors) if isinstance(whole, GpuGroup) else whole
        try:
            inner = launch(carrier, collective, arguments, options)
        except Exception:
            me.add_pending(-1)  # gloo refused it, so it is not under way
            if limit:
                self._take_back()
            else:
                me.board.take_back_collective(me.rank, self._place())
            raise
        finally:
            operation.unblock()
        emulated = None
        if self._link is not None:
            sizes = [tensor.numel() * tensor.element_size() for tensor in _puts(operations)]
            emulated = self._link.carry(operation, sizes, inner)
        sliced = isinstance(carrier, dist.ProcessGroupGloo)
        arrived = None if sliced else lambda: self._all_entered(seq)
        work = MeteredWork(
            inner, operation, arrived, emulated=emulated, sliced=sliced, streams=not sliced,
            limit=limit, take_back=self._take_back,
        )  # fmt: skip
        if sliced and getattr(options, "asyncOp", False):
            # Otherwise the operation would last, in the log, until the user waits for it.
            work.watch()
        return work

    def _take_back(self) -> None:
        """Count one collective less, because this rank's own time limit for it is over."""
        self._recorder.board.take_back_collective(self._recorder.rank, self._place())
        self._recorder.broken = True

    def _all_entered(self, seq: int) -> bool:
        board, me = self._recorder.board, self._recorder.rank
        others = (member for member in self._members if member != me)
        return all(board.collectives_entered(other, self.key) >= seq for other in others)

    def _one_by_one(self, method: str, outputs: Any, inputs: Any, options: Any) -> dist.Work:
        works: list[dist.Work] = []
        for output, part in zip(outputs, inputs, strict=True):
            if works:
                works[-1].wait()
            works.append(getattr(self, method)(output, part, options))
        return works[-1]

    # Point to point ------------------------------------------------------------------------

    def _message(self, kind: str, tensors: Any, peer: int | None, tag: int) -> dist.Work:
        me, sends = self._recorder, kind == "send"
        if not 0 <= tag <= MessageChannel.MAX_TAG:
            raise ValueError(f"tag must be 0 to {MessageChannel.MAX_TAG}, got {tag}")
        self._place()
        if peer is None:
            return self._from_anyone(tensors, tag)
        operation, channel = self._announce(kind, tensors, peer, tag)
        launch = self._inner.send if sends else self._inner.recv
        connects = peer not in self._met
        if connects:
            operation.block()  # gloo may have to connect first
        try:
            inner = launch(tensors, self._members.index(peer), tag)
            self._met.add(peer)
        except Exception:
            me.board.take_back_message(me.rank, channel)  # gloo refused it, so it did not start
            me.add_pending(-1)
            raise
        finally:
            if connects:
                operation.unblock()
        emulated = None
        if self._link is not None:
            emulated = self._link.carry(operation, [operation.bytes], None)
        return MeteredWork(
            inner, operation, arrived=self._both_started(operation, channel), emulated=emulated,
            take_back=lambda: self._take_back_message(channel),
        )  # fmt: skip

    def _announce(
        self, kind: str, tensors: Any, peer: int, tag: int
    ) -> tuple[MeteredOperation, MessageChannel]:
        me = self._recorder
        channel = MessageChannel(kind == "send", peer, tag, self.key)
        what = Message(sum(tensor.numel() for tensor in tensors), _dtype(tensors))
        seq = me.board.start_message(me.rank, channel, what)
        self._compare_message(seq, channel, what)
        me.add_pending(1)
        return self._operation(kind, tensors, peer, channel, seq), channel

    def _take_back_message(self, channel: MessageChannel) -> None:
        """Count one message less, because this rank's own time limit for it is over."""
        self._recorder.board.take_back_message(self._recorder.rank, channel)
        self._recorder.broken = True

    def _both_started(
        self, operation: MeteredOperation, channel: MessageChannel
    ) -> Callable[[], bool]:
        me = self._recorder
        other_end = channel.other_end(me.rank)
        return lambda: me.board.count(channel.peer, other_end) >= operation.seq

    def launches_batches(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether messages of these tensors can be launched together, as one operation."""
        inner = self._inner
        return isinstance(inner, GpuGroup) and inner.carrier(tensors) is not inner.gloo

    def batch(self, messages: Sequence[tuple[str, torch.Tensor, int, int]]) -> list[dist.Work]:
        """Launch messages together, so that none of them waits for another.

        `messages` has for each message its kind, its tensor, the other rank's position in the
        group, and its tag.
        """
        self._place()
        started = []
        for kind, tensor, index, tag in messages:
            started.append(self._announce(kind, [tensor], self._members[index], tag))
        nccl = self._inner.nccl
        started[0][0].block()  # the first batch of a group connects all its ranks
        try:
            nccl._start_coalescing()
            for kind, tensor, index, tag in messages:
                (nccl.send if kind == "send" else nccl.recv)([tensor], index, tag)
            inner = nccl._end_coalescing()
        finally:
            started[0][0].unblock()
        return [
            MeteredWork(inner, operation, self._both_started(operation, channel), streams=True)
            for operation, channel in started
        ]

    def _operation(
        self, kind: str, tensors: Any, peer: int | None, channel: MessageChannel, seq: int
    ) -> MeteredOperation:
        me, wait = self._recorder, Wait.SEND if kind == "send" else Wait.RECV
        return MeteredOperation(
            me, kind, self._members, peer, _nbytes(tensors), _dtype(tensors), me.locate(),
            wait, self.key, seq, channel, group_name=self.label,
        )  # fmt: skip

    def _compare_message(self, seq: int, channel: MessageChannel, mine: Message) -> None:
        me = self._recorder
        other_end = channel.other_end(me.rank)
        theirs = me.board.message(channel.peer, other_end, seq)
        if theirs is None or theirs == mine:
            return
        me.board.see_mismatch(me.rank)
        verbs = ("sends", "receives") if channel.sends else ("receives", "sends")
        raise CollectiveMismatch(
            f"rank {me.rank} {verbs[0]} {counted(mine.numel, 'element')} of {mine.dtype}, but rank "
            f"{channel.peer} {verbs[1]} {counted(theirs.numel, 'element')} of {theirs.dtype}"
        )

    def _from_anyone(self, tensors: Any, tag: int) -> dist.Work:
        me = self._recorder
        others = [member for member in self._members if member != me.rank]

        def find() -> int | None:
            for peer in others:
                sent = me.board.count(peer, MessageChannel(True, me.rank, tag, self.key))
                if sent > me.board.count(me.rank, MessageChannel(False, peer, tag, self.key)):
                    return peer
            return None

        waiting = MessageChannel.any_source(me.rank, tag, self.key)
        operation = self._operation("recv", tensors, None, waiting, 0)
        return AnySourceWork(
            operation, find, lambda peer: self._message("recv", tensors, peer, tag)
        )


def compare_entries(
    recorder: RankRecorder, members: Sequence[int], key: int, seq: int, signature: str, what: str
) -> None:
    """Compare what this rank enters with what the other members have entered.

    Raises:
        CollectiveMismatch: another rank has entered something different.

    """
    for other in members:
        entry = recorder.board.collective(other, key, seq) if other != recorder.rank else None
        if entry is not None and entry[0] != signature:
            recorder.board.see_mismatch(recorder.rank)
            raise CollectiveMismatch(
                f"{what} is '{signature}' on rank {recorder.rank} "
                f"but '{entry[0]}' on rank {other} ({entry[1]})"
            )


def _puts(operations: Sequence[tuple[Sequence[torch.Tensor], Any]]) -> list[torch.Tensor]:
    return [tensor for puts, _ in operations for tensor in puts]


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _dtype(tensors: Sequence[torch.Tensor]) -> str:
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
