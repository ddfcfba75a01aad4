"""Collectives: which ranks have entered, whether they agree, and what happens after the last one.

`_torch.collective_table` says what each collective does to the tensors. A collective occupies the
ports only after its last rank has entered. Until then, the ports are free for other messages. On
each rank, the collectives of a group run one after the other, as on a stream of NCCL.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from course_lib.ranks._torch.collective_table import KINDS, splits_of
from course_lib.ranks.costs.collective_time import rounds_of
from course_lib.ranks.costs.links import Links
from course_lib.ranks.costs.transfer import Transfer
from course_lib.ranks.explain.mismatch import differing_splits
from course_lib.ranks.simulated.operation import NEW_GROUP, Mismatch, Operation, stream_of


@dataclass(eq=False)
class Running:
    """A collective that all its ranks have entered."""

    parts: Sequence[Operation]
    """The parts of the ranks, in the order of the group."""
    transfer: Transfer
    offered: float = math.inf
    """The time of its latest `offer`: when it next wants to go on."""


class Collectives:
    """The collectives of a fabric that are not over.

    Args:
        links: carry their messages; their network chooses the algorithms.
        end: called with each operation and its end, in virtual seconds.
        offer: called with a time, and with a collective that can go on then.

    """

    def __init__(
        self,
        links: Links,
        end: Callable[[Operation, float], None],
        offer: Callable[[float, Running], None],
    ) -> None:
        self._links = links
        self._end = end
        self._open: dict[tuple[bool, str, int], dict[int, Operation]] = {}
        self._offer = offer
        self._streams: defaultdict[tuple[str, int], deque[tuple[Running, int]]] = defaultdict(deque)
        """(group, rank) → the collectives under way there, and the place of the rank in each."""
        self._over: defaultdict[tuple[str, int], float] = defaultdict(float)
        """(group, rank) → the end of the latest collective there whose end is known, in seconds."""

    def enter(self, operation: Operation) -> None:
        """Let one rank enter; if it is the last, move the data and start the messages.

        Raises:
            Mismatch: the ranks do not call the same collective.

        """
        key = (*stream_of(operation), operation.seq)
        entered = self._open.setdefault(key, {})
        entered[operation.rank] = operation
        first = next(iter(entered.values()))
        same = operation is first or operation.members == first.members
        if not same or operation.signature() != first.signature():
            raise Mismatch(list(entered.values()))
        if len(entered) < len(operation.members):
            return
        del self._open[key]
        parts = [entered[member] for member in operation.members]
        if operation.kind == NEW_GROUP:
            for part in parts:
                self._end(part, part.posted)
            return
        if KINDS[operation.kind].uneven:
            members = operation.members
            splits = {part.rank: splits_of(members, part.inputs, part.outputs) for part in parts}
            if difference := differing_splits(splits):
                raise Mismatch(parts, difference)
        root = 0 if operation.peer is None else operation.members.index(operation.peer)
        sizes = [[t.numel() * t.element_size() for t in part.inputs] for part in parts]
        itemsize = operation.nbytes // operation.numel if operation.numel else 1
        rounds = rounds_of(operation.kind, self._links.network, sizes, root, itemsize)
        transfer = Transfer(self._links, operation.members, rounds)
        effect = KINDS[operation.kind].effect
        # Tensors on the device meta have no values.
        if effect and not any(t.is_meta for part in parts for t in (*part.inputs, *part.outputs)):
            inputs, outputs = [part.inputs for part in parts], [part.outputs for part in parts]
            with torch.no_grad():
                effect(inputs, outputs, root, operation.op)
        running = Running(parts, transfer)
        for member, part in enumerate(parts):
            stream = self._streams[part.group, part.rank]
            stream.append((running, member))
            if len(stream) == 1:  # else it begins when the previous one is over on this rank
                transfer.enter(member, max(part.posted, self._over[part.group, part.rank]))
        self._want(running)

    def go_on(self, running: Running, until: float) -> None:
        """Send the messages that a collective can send before `until`."""
        running.offered = math.inf
        for member in running.transfer.advance(until):
            part, end = running.parts[member], running.transfer.times[member]
            stream = self._streams[part.group, part.rank]
            stream.popleft()
            self._over[part.group, part.rank] = end
            if stream:
                following, next_member = stream[0]
                following.transfer.enter(next_member, max(end, following.parts[next_member].posted))
                self._want(following)
            self._end(part, end)
        self._want(running)

    def _want(self, running: Running) -> None:
        start = running.transfer.next_start()
        if start is not None and start < running.offered:
            running.offered = start
            self._offer(start, running)

    def unserved(self) -> list[Operation]:
        """Return the operations whose collective is not complete."""
        return [operation for entered in self._open.values() for operation in entered.values()]
