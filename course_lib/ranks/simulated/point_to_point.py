"""Messages between two ranks: which send meets which receive, and when the bytes are there.

A send waits for its receive (a rendezvous), whatever its size, unless the network lets small ones
leave early. Messages of one sender, receiver, group and tag meet in the order of their posting.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from course_lib.ranks.costs.links import Links
from course_lib.ranks.costs.network import Network
from course_lib.ranks.simulated.operation import Mismatch, Operation

Envelope = tuple[str, int, int, int]
"""Group, sender, receiver and tag, which a send and its receive must share. MPI's word."""


@dataclass
class _Pending:
    """Messages of one envelope that have not met their other side, in order."""

    sends: deque[Operation] = field(default_factory=deque)
    receives: deque[Operation] = field(default_factory=deque)
    arrived: deque[tuple[Operation, torch.Tensor, float]] = field(default_factory=deque)
    """Eager messages: the send, its bytes, and when they arrived."""


class Messages:
    """The sends and receives of a fabric that have not met yet.

    Args:
        network: says which sends are small enough to leave early.
        links: carry the messages.
        end: called with each operation and its end, in virtual seconds.

    """

    def __init__(
        self, network: Network, links: Links, end: Callable[[Operation, float], None]
    ) -> None:
        self._eager_below = network.eager_below
        self._links = links
        self._end = end
        self._pending: defaultdict[Envelope, _Pending] = defaultdict(_Pending)
        self._any_source: defaultdict[tuple[str, int, int], deque[Operation]] = defaultdict(deque)

    def send(self, send: Operation) -> None:
        assert send.peer is not None
        pending = self._pending[send.group, send.rank, send.peer, send.tag]
        anyone = self._any_source[send.group, send.peer, send.tag]
        if send.nbytes < self._eager_below:
            data = send.inputs[0].detach().clone()
            left, arrival = self._links.send(send.rank, send.peer, send.nbytes, send.posted)
            self._end(send, left)
            if pending.receives or anyone:
                self._hand_over(send, data, (pending.receives or anyone).popleft(), arrival)
            else:
                pending.arrived.append((send, data, arrival))
        elif pending.receives or anyone:
            self._transmit(send, (pending.receives or anyone).popleft(), send.posted)
        else:
            pending.sends.append(send)

    def receive(self, receive: Operation) -> None:
        pending = self._pending_for(receive)
        if pending is not None and pending.arrived:
            send, data, arrival = pending.arrived.popleft()
            self._hand_over(send, data, receive, max(arrival, receive.posted))
        elif pending is not None and pending.sends:
            self._transmit(pending.sends.popleft(), receive, receive.posted)
        elif receive.peer is None:
            self._any_source[receive.group, receive.rank, receive.tag].append(receive)
        else:
            key = (receive.group, receive.peer, receive.rank, receive.tag)
            self._pending[key].receives.append(receive)

    def _pending_for(self, receive: Operation) -> _Pending | None:
        """Return the pending that serves a receive; for any source, that of the first message."""
        group, rank, tag = receive.group, receive.rank, receive.tag
        if receive.peer is not None:
            return self._pending.get((group, receive.peer, rank, tag))
        found: list[tuple[float, int, _Pending]] = []
        for source in receive.members:
            pending = self._pending.get((group, source, rank, tag))
            if pending is not None and pending.arrived:
                found.append((pending.arrived[0][2], source, pending))
            elif pending is not None and pending.sends:
                found.append((pending.sends[0].posted, source, pending))
        return min(found, key=lambda item: item[:2])[2] if found else None

    def _transmit(self, send: Operation, receive: Operation, ready: float) -> None:
        _check_pair(send, receive)
        left, arrival = self._links.send(send.rank, receive.rank, send.nbytes, ready)
        self._hand_over(send, send.inputs[0], receive, arrival)
        self._end(send, left)

    def _hand_over(
        self, send: Operation, data: torch.Tensor, receive: Operation, arrival: float
    ) -> None:
        _check_pair(send, receive)
        receive.peer = send.rank
        target = receive.outputs[0]
        if not (data.is_meta or target.is_meta):
            with torch.no_grad():
                target.copy_(data if data.shape == target.shape else data.reshape(target.shape))
        self._end(receive, arrival)

    def unserved(self) -> list[Operation]:
        """Return the operations that have met no partner."""
        left: list[Operation] = []
        for pending in self._pending.values():
            left += [*pending.sends, *pending.receives, *(send for send, *_ in pending.arrived)]
        for queue in self._any_source.values():
            left += queue
        return left


def _check_pair(send: Operation, receive: Operation) -> None:
    if send.numel != receive.numel or send.dtype != receive.dtype:
        raise Mismatch(
            [send, receive],
            f"Rank {send.rank} sends {send.numel} elements of {send.dtype}, but rank "
            f"{receive.rank} receives them as {receive.numel} elements of {receive.dtype}.",
        )
