"""The network and devices of simulated ranks.

A message of ``n`` bytes that starts at time ``t`` arrives at ``t + latency + n / bandwidth``
(the α–β model of Hockney, 1994). It occupies its sender's outgoing port from ``t`` to
``t + n / bandwidth``, and its receiver's incoming port for the same duration, ``latency`` later. A
port carries one message at a time, first come, first served. A rank can send and receive at the
same time.

A message can also cost its two ranks work: an ``overhead`` of o seconds at each end (D. Culler et
al., "LogP", PPoPP 1993). Then it takes ``o + latency + n / bandwidth + o``. The sender's o comes
before the first byte leaves. Its next message starts only after this o and the time of the bytes.
So of K messages that are ready at once, one leaves every ``o + n / bandwidth``. The receiver's o
comes after the last byte, and the message has arrived when this o is over. Unlike LogP's processor,
a rank sends and receives at the same time, as its ports do, and also computes meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Literal, NamedTuple, get_args

from course_lib._message_time import delay, message_time

AllReduceAlgorithm = Literal["ring", "tree", "central", "halving-doubling", "direct", "one-shot"]

Port = tuple[str, int]
"""One end of a link: its kind and its owner, such as ``("out", 3)``."""


_LONGEST = 1 << 63
"""Upper limit for the bytes of a message."""


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


class Route(NamedTuple):
    """The route of a message."""

    ports: tuple[tuple[Port, float, float], ...]
    """(port, begins, ends) for each port, in seconds. The message occupies the port from ``begins``
    after its start until ``ends`` after it has left its sender."""
    latency: float
    bandwidth: float
    overhead: float


@dataclass(frozen=True)
class Network:
    """The costs of messages.

    Args:
        latency: α, seconds from the start of a message until its first byte arrives.
        bandwidth: β, bytes per second of one port, in each direction.
        overhead: o, seconds of a rank's work for each message that it sends or receives.
        topology: with ``"switch"``, every rank reaches every other through its one outgoing port.
            With ``"ring"``, only neighbours have links; a message to a rank h steps away takes the
            shorter way round, costs h latencies, and occupies the h links on its way.
        eager_below: messages with fewer bytes leave without waiting for their receive. With 0,
            every send waits for its receive, as with NCCL, so unsafe programs always deadlock.
        node_size: ranks per node, for a network of two levels; ``None`` for one level.
        inside: the network inside a node; `latency` and `bandwidth` then apply between nodes.
        shared_port: whether the ranks of a node share one port to the other nodes.
        all_reduce: the algorithm that gives the time of ``dist.all_reduce``.

    Raises:
        ValueError: a number is not possible for a network.

    """

    latency: float
    bandwidth: float
    overhead: float = 0.0
    topology: Literal["switch", "ring"] = "switch"
    eager_below: int = 0
    node_size: int | None = None
    inside: Network | None = None
    shared_port: bool = False
    all_reduce: AllReduceAlgorithm = "ring"

    def __post_init__(self) -> None:
        for name, minimum in (("latency", "0 seconds"), ("overhead", "0 seconds per message")):
            value = getattr(self, name)
            if not (_is_number(value) and 0 <= value < math.inf):
                raise ValueError(f"{name} must be {minimum} or more, got {value!r}")
        if not (_is_number(self.bandwidth) and self.bandwidth > 0):
            raise ValueError(f"bandwidth must be above 0 bytes per second, got {self.bandwidth!r}")
        if not math.isfinite(_LONGEST / self.bandwidth):
            raise ValueError(
                f"bandwidth is too small: with {self.bandwidth!r} bytes per second, the time of a "
                "long message would be infinite"
            )
        if not (_is_number(self.eager_below) and self.eager_below >= 0):
            raise ValueError(f"eager_below must be 0 bytes or more, got {self.eager_below!r}")
        if (self.node_size is None) != (self.inside is None):
            raise ValueError("a two-level network needs both node_size=… and inside=Network(…)")
        if self.node_size is not None and not (
            isinstance(self.node_size, int) and self.node_size >= 1
        ):
            raise ValueError(f"node_size must be 1 or more ranks, got {self.node_size!r}")
        if self.inside is not None and self.topology != "switch":
            raise ValueError(
                'topology="ring" cannot join nodes: a switch always joins them. For a ring inside '
                'each node, write inside=Network(…, topology="ring")'
            )
        for name, choices in (
            ("topology", ("switch", "ring")),
            ("all_reduce", get_args(AllReduceAlgorithm)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )

    def time(self, nbytes: int) -> float:
        """Return o + α + n/β + o, the seconds of one message of `nbytes` on a free link."""
        return message_time(nbytes, self)

    def route(self, source: int, target: int, world_size: int) -> Route:
        """Return the route from rank `source` to rank `target`."""
        if self.inside is not None and self.node_size is not None:
            nodes = source // self.node_size, target // self.node_size
            if nodes[0] == nodes[1]:
                first = nodes[0] * self.node_size
                size = min(self.node_size, world_size - first)
                way = self.inside.route(source - first, target - first, size)
                ports = tuple(
                    ((f"{kind} inside", at + first), *times) for (kind, at), *times in way.ports
                )
                return way._replace(ports=ports)  # type: ignore[arg-type]
            if self.shared_port:
                shared = ("node out", nodes[0]), ("node in", nodes[1])
                return self._over(shared, (0.0, self.latency), source, target)
        if self.topology == "ring":
            return self._around_ring(source, target, world_size)
        # A rank's port is also busy during the rank's overhead: no other message can pass then.
        ports = ((("out", source), 0.0, 0.0), (("in", target), delay(self), delay(self)))
        return Route(ports, self.latency, self.bandwidth, self.overhead)

    def _over(
        self, shared: Sequence[Port], delays: Sequence[float], source: int, target: int
    ) -> Route:
        """Return the route over ports that ranks share. No rank's overhead occupies these ports."""
        latency = self.latency if self.topology == "switch" else len(shared) * self.latency
        route = Route((), latency, self.bandwidth, self.overhead)
        ports = tuple(
            (port, self.overhead + gap, gap) for port, gap in zip(shared, delays, strict=True)
        )
        if self.overhead:
            sends, receives = ("sends", source), ("receives", target)
            ports = ((sends, 0.0, 0.0), *ports, (receives, delay(route), delay(route)))
        return route._replace(ports=ports)

    def _around_ring(self, source: int, target: int, world_size: int) -> Route:
        right = (target - source) % world_size
        step = 1 if right <= world_size - right else -1
        hops = min(right, world_size - right)
        side = "right" if step == 1 else "left"
        links = [(side, (source + i * step) % world_size) for i in range(hops)]
        return self._over(links, [i * self.latency for i in range(hops)], source, target)


@dataclass(frozen=True)
class Device:
    """The costs of computation.

    Args:
        flops: floating-point operations per second of one rank's device.
        memory_bandwidth: bytes per second. An operator takes the time of its arithmetic or of its
            memory traffic, whichever is longer (the roofline). If infinite, traffic is free.
        slowdown: rank → factor by which its computation takes longer. For example, ``{3: 2.0}``
            makes rank 3 a straggler.

    Raises:
        ValueError: a number is not possible for a device.

    """

    flops: float = math.inf
    memory_bandwidth: float = math.inf
    slowdown: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (_is_number(self.flops) and self.flops > 0):
            raise ValueError(f"flops must be above 0 operations per second, got {self.flops!r}")
        if not (_is_number(self.memory_bandwidth) and self.memory_bandwidth > 0):
            raise ValueError(
                f"memory_bandwidth must be above 0 bytes per second, got {self.memory_bandwidth!r}"
            )
        if not all(_is_number(factor) and factor > 0 for factor in self.slowdown.values()):
            raise ValueError(f"each slowdown must be a factor above 0, got {dict(self.slowdown)!r}")

    def time(self, flops: float, nbytes: float = 0.0) -> float:
        """Return the seconds that `flops` operations on `nbytes` of memory traffic take."""
        return max(flops / self.flops, nbytes / self.memory_bandwidth)
