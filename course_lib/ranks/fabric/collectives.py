"""Collectives: who has entered, whether they agree, and what happens when the last one is there."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from course_lib.ranks.costs.collective_time import start_collective
from course_lib.ranks.costs.links import Links
from course_lib.ranks.costs.network import Network
from course_lib.ranks.costs.transfer import Transfer
from course_lib.ranks.fabric.operation import NEW_GROUP, Mismatch, Operation, stream_of
from course_lib.ranks.fabric.values import apply_collective


@dataclass(eq=False)
class Running:
    """A collective that all its ranks have entered."""

    parts: list[Operation]
    """In the order of the group."""
    transfer: Transfer
    offered: float = math.inf
    """When it next wants to go on, as far as the fabric knows."""


class Collectives:
    """The collectives of a fabric that are not over.

    Args:
        network: says which algorithms they take.
        links: carry their messages.
        end: called with each operation and its end, in virtual seconds.
        offer: called with a time, and with a collective that can go on then.

    """

    def __init__(
        self,
        network: Network,
        links: Links,
        end: Callable[[Operation, float], None],
        offer: Callable[[float, Running], None],
    ) -> None:
        self._network = network
        self._links = links
        self._end = end
        self._offer = offer
        self._open: dict[tuple[bool, str, int], dict[int, Operation]] = {}
        # A group's collectives follow one another on each rank, as on a stream of NCCL.
        self._streams: defaultdict[tuple[str, int], deque[tuple[Running, int]]] = defaultdict(deque)

    def enter(self, operation: Operation) -> None:
        """Let one rank enter; when it is the last, move the data, and let the messages begin.

        Raises:
            Mismatch: the ranks do not call the same.

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
        if operation.kind == "all_to_all":
            _check_splits(parts)
        root = 0 if operation.peer is None else operation.members.index(operation.peer)
        sizes = [[t.numel() * t.element_size() for t in part.inputs] for part in parts]
        itemsize = operation.nbytes // operation.numel if operation.numel else 1
        transfer = start_collective(
            operation.kind, self._network, self._links, operation.members, sizes, root, itemsize
        )
        apply_collective(
            operation.kind,
            operation.op,
            root,
            [part.inputs for part in parts],
            [part.outputs for part in parts],
        )
        running = Running(parts, transfer)
        for member, part in enumerate(parts):
            stream = self._streams[part.group, part.rank]
            stream.append((running, member))
            if len(stream) == 1:
                transfer.enter(member, part.posted)
        self._want(running)

    def go_on(self, running: Running, until: float) -> None:
        """Send what a collective can send before `until`."""
        running.offered = math.inf
        for member in running.transfer.advance(until):
            part, end = running.parts[member], running.transfer.times[member]
            stream = self._streams[part.group, part.rank]
            stream.popleft()
            if stream:
                following, place = stream[0]
                following.transfer.enter(place, max(end, following.parts[place].posted))
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


def _check_splits(parts: list[Operation]) -> None:
    for i, sender in enumerate(parts):
        for j, receiver in enumerate(parts):
            sent, got = sender.inputs[j].numel(), receiver.outputs[i].numel()
            if sent != got:
                raise Mismatch(
                    parts,
                    f"In all_to_all, rank {sender.rank} sends {sent} elements to rank "
                    f"{receiver.rank}, which expects {got}.",
                )
