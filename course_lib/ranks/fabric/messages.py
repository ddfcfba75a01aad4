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
from course_lib.ranks.fabric.operation import Mismatch, Operation

Channel = tuple[str, int, int, int]
"""Messages match in order within: group, sender, receiver, tag."""


@dataclass
class _Channel:
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
        self._channels: defaultdict[Channel, _Channel] = defaultdict(_Channel)
        self._any_source: defaultdict[tuple[str, int, int], deque[Operation]] = defaultdict(deque)

    def send(self, send: Operation) -> None:
        assert send.peer is not None
        channel = self._channels[send.group, send.rank, send.peer, send.tag]
        anyone = self._any_source[send.group, send.peer, send.tag]
        if send.nbytes < self._eager_below:
            data = send.inputs[0].detach().clone()
            left, arrival = self._links.send(send.rank, send.peer, send.nbytes, send.posted)
            self._end(send, left)
            if channel.receives or anyone:
                self._hand_over(send, data, (channel.receives or anyone).popleft(), arrival)
            else:
                channel.arrived.append((send, data, arrival))
        elif channel.receives or anyone:
            self._transmit(send, (channel.receives or anyone).popleft(), send.posted)
        else:
            channel.sends.append(send)

    def receive(self, receive: Operation) -> None:
        channel = self._channel_for(receive)
        if channel is not None and channel.arrived:
            send, data, arrival = channel.arrived.popleft()
            self._hand_over(send, data, receive, max(arrival, receive.posted))
        elif channel is not None and channel.sends:
            self._transmit(channel.sends.popleft(), receive, receive.posted)
        elif receive.peer is None:
            self._any_source[receive.group, receive.rank, receive.tag].append(receive)
        else:
            key = (receive.group, receive.peer, receive.rank, receive.tag)
            self._channels[key].receives.append(receive)

    def _channel_for(self, receive: Operation) -> _Channel | None:
        """Return the channel that serves a receive; for any source, that of the first message."""
        group, rank, tag = receive.group, receive.rank, receive.tag
        if receive.peer is not None:
            return self._channels.get((group, receive.peer, rank, tag))
        found: list[tuple[float, int, _Channel]] = []
        for source in receive.members:
            channel = self._channels.get((group, source, rank, tag))
            if channel is not None and channel.arrived:
                found.append((channel.arrived[0][2], source, channel))
            elif channel is not None and channel.sends:
                found.append((channel.sends[0].posted, source, channel))
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
        for channel in self._channels.values():
            left += [*channel.sends, *channel.receives, *(send for send, *_ in channel.arrived)]
        for queue in self._any_source.values():
            left += queue
        return left


def _check_pair(send: Operation, receive: Operation) -> None:
    if send.numel != receive.numel or send.dtype != receive.dtype:
        raise Mismatch(
            f"Rank {send.rank} sends {send.numel} elements of {send.dtype}, but rank "
            f"{receive.rank} receives them as {receive.numel} elements of {receive.dtype}.",
            [send, receive],
        )
