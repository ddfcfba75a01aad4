"""Messages between two ranks: which send meets which receive, and when the bytes arrive.

A send of any size waits for its receive (a rendezvous), unless the network lets small messages
leave early. Messages with the same sender, receiver, group and tag are matched in the order of
their posting.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from course_lib.ranks.costs.links import Links
from course_lib.ranks.explain.mismatch import differing
from course_lib.ranks.simulated.operation import Mismatch, Operation

Envelope = tuple[str, int, int, int]
"""Group, sender, receiver and tag, which a send and its receive must share. The term is MPI's."""


class _Sent(NamedTuple):
    """A message that waits for its receive."""

    send: Operation
    data: torch.Tensor | None = None
    """A copy of its data, if it left early; else ``None``: it leaves when its receive is posted."""
    arrival: float = 0.0
    """When it arrives, if it left early."""

    @property
    def known(self) -> float:
        """The time from which its receiver can know of it."""
        return self.send.posted if self.data is None else self.arrival


@dataclass
class _Pending:
    """Sends and receives of one envelope that have not met their partner, in order."""

    sends: deque[_Sent] = field(default_factory=deque)
    receives: deque[tuple[int, Operation]] = field(default_factory=deque)
    """Receives, each with its number among all receives."""


class Messages:
    """The sends and receives of a fabric that have not met yet.

    Args:
        links: carry the messages; their network says which sends are small enough to leave early.
        end: called with each operation and its end, in virtual seconds.

    """

    def __init__(self, links: Links, end: Callable[[Operation, float], None]) -> None:
        self._eager_below = links.network.eager_below
        self._links = links
        self._end = end
        self._pending: defaultdict[Envelope, _Pending] = defaultdict(_Pending)
        self._any_source: defaultdict[tuple[str, int, int], deque[tuple[int, Operation]]] = (
            defaultdict(deque)
        )
        self._receives = 0

    def send(self, send: Operation) -> None:
        assert send.peer is not None
        pending = self._pending[send.group, send.rank, send.peer, send.tag]
        sent = _Sent(send)
        if send.nbytes < self._eager_below:
            data = send.inputs[0].detach().clone()
            left, arrival = self._links.send(send.rank, send.peer, send.nbytes, send.posted)
            sent = _Sent(send, data, arrival)
            self._end(send, left)
        anyone = self._any_source[send.group, send.peer, send.tag]
        waiting = [queue for queue in (pending.receives, anyone) if queue]
        if waiting:  # if a receive waits, no earlier message does: this send overtakes none
            first = min(waiting, key=lambda queue: queue[0][0])
            self._meet(sent, first.popleft()[1], send.posted)
        else:
            pending.sends.append(sent)

    def receive(self, receive: Operation) -> None:
        self._receives += 1
        pending = self._pending_for(receive)
        if pending is not None and pending.sends:
            self._meet(pending.sends.popleft(), receive, receive.posted)
        elif receive.peer is None:
            key = receive.group, receive.rank, receive.tag
            self._any_source[key].append((self._receives, receive))
        else:
            envelope = receive.group, receive.peer, receive.rank, receive.tag
            self._pending[envelope].receives.append((self._receives, receive))

    def _pending_for(self, receive: Operation) -> _Pending | None:
        """Return where to look for a receive's message.

        A receive from any source takes the message that its rank could know of first.
        """
        group, rank, tag = receive.group, receive.rank, receive.tag
        if receive.peer is not None:
            return self._pending.get((group, receive.peer, rank, tag))
        ready: list[tuple[float, int, _Pending]] = []
        for source in receive.members:
            pending = self._pending.get((group, source, rank, tag))
            if pending is not None and pending.sends:
                ready.append((pending.sends[0].known, source, pending))
        return min(ready, key=lambda item: item[:2])[2] if ready else None

    def _meet(self, sent: _Sent, receive: Operation, ready: float) -> None:
        """Let a message and its receive meet at `ready`."""
        if sent.data is None:
            self._transmit(sent.send, receive, ready)
        else:
            self._hand_over(sent.send, sent.data, receive, max(sent.arrival, ready))

    def _transmit(self, send: Operation, receive: Operation, ready: float) -> None:
        _check_pair(send, receive)
        left, arrival = self._links.send(send.rank, receive.rank, send.nbytes, ready)
        self._hand_over(send, send.inputs[0], receive, arrival)
        self._end(send, left)

    def _hand_over(
        self, send: Operation, data: torch.Tensor, receive: Operation, arrival: float
    ) -> None:
        _check_pair(send, receive)
        receive.peer, receive.seq = send.rank, send.seq
        target = receive.outputs[0]
        if not data.is_meta:
            with torch.no_grad():
                target.copy_(data if data.shape == target.shape else data.reshape(target.shape))
        self._end(receive, arrival)

    def unserved(self) -> list[Operation]:
        """Return the operations that have met no partner."""
        left: list[Operation] = []
        for pending in self._pending.values():
            left += [sent.send for sent in pending.sends]
            left += [receive for _, receive in pending.receives]
        for queue in self._any_source.values():
            left += [receive for _, receive in queue]
        return left


def _check_pair(send: Operation, receive: Operation) -> None:
    sent, received = (send.numel, send.dtype), (receive.numel, receive.dtype)
    if sent != received:
        raise Mismatch([send, receive], f"{differing(send.rank, sent, receive.rank, received)}.")
    if send.inputs[0].is_meta != receive.outputs[0].is_meta:
        without = send if send.inputs[0].is_meta else receive
        raise Mismatch(
            [send, receive],
            f"Rank {send.rank} sends to rank {receive.rank}, but the tensor of rank {without.rank} "
            "is on the device meta and has no values.",
        )
