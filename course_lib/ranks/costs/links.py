"""The links of a network in use: when a message starts, when it has left, when it arrives."""

from __future__ import annotations

from course_lib._message_time import delay, occupancy
from course_lib.ranks.costs.network import Network, Port, Route


class Links:
    """Keeps, for every port, the time until which it is busy. Ports serve in the order of calls."""

    def __init__(self, network: Network, world_size: int) -> None:
        self.network = network
        self.world_size = world_size
        self._free: dict[Port, float] = {}
        self._routes: dict[tuple[int, int], Route] = {}

    def free_from(self, source: int, target: int, ready: float) -> float:
        """Return the first time, from `ready` on, at which a message can start."""
        start, free = ready, self._free
        for port, begins, _ in self._route(source, target).ports:
            until = free.get(port, 0.0) - begins
            if until > start:
                start = until
        return start

    def send(self, source: int, target: int, nbytes: int, ready: float) -> tuple[float, float]:
        """Send one message; return (time at which it has left, time at which it has arrived).

        It starts at the first time, from `ready` on, for which every port of its route is free when
        the message gets to this port:

            start   = max(ready, free[port] - begins[port])   over the ports
            left    = start + (o + n/β)
            arrival = left + (α + o)
        """
        route = self._route(source, target)
        left = self.free_from(source, target, ready) + occupancy(nbytes, route)
        for port, _, ends in route.ports:
            self._free[port] = left + ends
        return left, left + delay(route)

    def _route(self, source: int, target: int) -> Route:
        route = self._routes.get((source, target))
        if route is None:
            route = self.network.route(source, target, self.world_size)
            self._routes[source, target] = route
        return route
