"""The links of a network in use: when a message starts, when it has left, when it is there."""

from __future__ import annotations

from collections import Counter

from course_lib.ranks.costs.network import Network, Port, Route


class Links:
    """Keeps, for every port, until when it is busy. Ports serve in the order of the calls."""

    def __init__(self, network: Network, world_size: int) -> None:
        self.network = network
        self.world_size = world_size
        self._free: dict[Port, float] = {}
        self._routes: dict[tuple[int, int], Route] = {}
        self._count: Counter[tuple[int, int]] = Counter()

    def send(self, source: int, target: int, nbytes: int, ready: float) -> tuple[float, float]:
        """Send one message; return (time at which it has left, time at which it has arrived).

        It starts at the first moment, from `ready` on, at which every port of its route is free
        when its first byte gets there:

            start   = max(ready, free[port] - delay[port])   over the ports
            left    = start + n/β
            arrival = start + α + n/β
        """
        key = (source, target)
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = self.network.route(source, target, self.world_size)
        ports, latency, bandwidth = route
        busy = nbytes / bandwidth
        if self.network.jitter:
            factor = self.network.stretch(source, target, self._count[key])
            self._count[key] += 1
            busy, latency = busy * factor, latency * factor
        free = self._free
        start = ready
        for port, delay in ports:
            until = free.get(port, 0.0) - delay
            if until > start:
                start = until
        left = start + busy
        for port, delay in ports:
            free[port] = left + delay
        return left, left + latency
