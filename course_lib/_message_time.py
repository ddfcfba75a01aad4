"""The time of one message: the formula of `cost_model`, of `Network.time` and of simulated ranks.

It stands here because neither side may import the other: rungs know no ranks, and ranks no rung.
`cost_model` explains the terms, and adds up the messages of an algorithm.
"""

from typing import Protocol


class Network(Protocol):
    """The properties of a network that the formula needs."""

    @property
    def latency(self) -> float:
        """α, seconds per message."""

    @property
    def bandwidth(self) -> float:
        """β, bytes per second, of one rank in each direction."""

    @property
    def overhead(self) -> float:
        """o, seconds that a message occupies its sender, and the same for its receiver."""


def message_time(nbytes: float, network: Network) -> float:
    """Return o + α + n/β + o: the seconds of one message of n = `nbytes` on a free network."""
    return occupancy(nbytes, network) + delay(network)


def occupancy(nbytes: float, network: Network) -> float:
    """Return b = o + n/β: how long n = `nbytes` occupy the sender, and then the receiver."""
    return network.overhead + nbytes / network.bandwidth


def delay(network: Network) -> float:
    """Return α' = α + o: how long after leaving its sender a message has arrived.

    Messages that start at the same time pay it together, once.
    """
    return network.latency + network.overhead
