"""The cost model: how long a collective takes, from its bytes, the number of ranks and the network.

    >>> from course_lib.cost_model import Link, ring_all_reduce_time
    >>> ring_all_reduce_time(100e6, world_size=8, network=Link(latency=10e-6, bandwidth=10e9))
    0.01764

A message of n bytes takes α + n/β seconds: the `latency` α (s) until its first byte arrives, and
the time for n bytes to pass at the `bandwidth` β (bytes/s). A rank sends and receives at the same
time, one message each; ranks do not slow one another down. For an algorithm, the model counts how
many messages follow one another, and how many bytes pass the busiest link one after the other.

Messages that a rank starts at once pay their latency together. But starting or receiving a message
is still work. It costs an `overhead` of o seconds on the sender, before the first byte, and again
on the receiver, after the last byte. So a message takes α' + b seconds, with α' = α + o and
b = o + n/β, and k messages at once take α' + kb. The formulas below are written for o = 0. For a
different o, read every latency as α', and every message's n/β as b: a message alone takes
α + 2o + n/β.

`network` is anything with the attributes `latency`, `bandwidth` and `overhead`, such as `Link`
below. Times are in seconds, sizes in bytes, K = `world_size`, log is to base 2. K and the number of
segments are at least 1, which is not checked.

Real networks differ: many ranks may share a link, a GPU's links are faster inside a node, and
adding takes time. People still use the model to choose algorithms and bucket sizes: fit its two
numbers to measurements, predict, and compare.

R. W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", 1994;
D. Culler et al., "LogP: Towards a Realistic Model of Parallel Computation", PPoPP 1993 (overhead);
R. Thakur, R. Rabenseifner and W. Gropp, 2005 (see `collectives`); nccl-tests, doc/PERFORMANCE.md.
"""

from collections.abc import Callable
from typing import NamedTuple

from course_lib._message_time import Network as Network
from course_lib._message_time import delay, occupancy
from course_lib._message_time import message_time as message_time


class Link(NamedTuple):
    """The numbers of a network: α in seconds, β in bytes per second, o in seconds per message."""

    latency: float
    bandwidth: float
    overhead: float = 0.0


# --- one to all -----------------------------------------------------------------------------------


def naive_broadcast_time(nbytes: float, world_size: int, network: Network) -> float:
    """Return α + (K-1) n/β seconds: the root's one link carries K - 1 messages; 0 for K = 1."""
    return (world_size > 1) * delay(network) + (world_size - 1) * occupancy(nbytes, network)


def tree_broadcast_time(nbytes: float, world_size: int, network: Network) -> float:
    """Return ceil(log K) (α + n/β) seconds; a `reduce` takes as long.

    This is exact if K is a power of two. Otherwise no rank is that far from the root, and a
    broadcast may end up to that many latencies earlier.
    """
    return (world_size - 1).bit_length() * message_time(nbytes, network)


def pipelined_broadcast_time(
    nbytes: float, world_size: int, network: Network, segments: int = 8
) -> float:
    """Return (K-1) α + (s + K - 2) n/(sβ) seconds for s = `segments`; 0 for K = 1."""
    if world_size == 1:
        return 0.0
    pieces = segments + world_size - 2
    return (world_size - 1) * delay(network) + pieces * occupancy(nbytes / segments, network)


# --- all ranks to all ranks -----------------------------------------------------------------------


def ring_reduce_scatter_time(nbytes: float, world_size: int, network: Network) -> float:
    """Return (K-1) (α + n/(Kβ)) seconds, n being the whole tensor; an all-gather takes as long."""
    return (world_size - 1) * message_time(nbytes / world_size, network)


def all_to_all_time(nbytes: float, world_size: int, network: Network) -> float:
    """Return (K-1) (α + n/(Kβ)) seconds: K - 1 of a rank's K chunks leave, one after the other."""
    return (world_size - 1) * message_time(nbytes / world_size, network)


def central_all_reduce_time(nbytes: float, world_size: int, network: Network) -> float:
    """Return 2α + 2(K-1) n/β seconds: all bytes pass one rank's link, in and out; 0 for K = 1."""
    return 2 * naive_broadcast_time(nbytes, world_size, network)


def tree_all_reduce_time(nbytes: float, world_size: int, network: Network) -> float:
    """Return 2 ceil(log K) (α + n/β) seconds: a reduce and a broadcast."""
    return 2 * tree_broadcast_time(nbytes, world_size, network)


def ring_all_reduce_time(nbytes: float, world_size: int, network: Network) -> float:
    """Return 2(K-1) (α + n/(Kβ)) seconds; for large n about 2(K-1)/K n/β, below 2n/β for any K."""
    return 2 * ring_reduce_scatter_time(nbytes, world_size, network)


def halving_doubling_all_reduce_time(nbytes: float, world_size: int, network: Network) -> float:
    """Return 2 log(p) α + 2(p-1)/p n/β seconds, p being the largest power of two up to K.

    If p < K, add 2(α + n/β) for the ranks that give their tensor to others.
    """
    steps = world_size.bit_length() - 1
    power = 1 << steps
    time = (
        2 * steps * message_time(0, network) + 2 * (power - 1) / power * nbytes / network.bandwidth
    )
    return time + (2 * message_time(nbytes, network) if power < world_size else 0.0)


def direct_all_reduce_time(nbytes: float, world_size: int, network: Network) -> float:
    """Return 2α + 2(K-1) n/(Kβ) seconds: the ring's bytes, in two batches; 0 for K = 1."""
    return 2 * naive_broadcast_time(nbytes / world_size, world_size, network)


def one_shot_all_reduce_time(nbytes: float, world_size: int, network: Network) -> float:
    """Return α + (K-1) n/β seconds: everybody sends everything to everybody; 0 for K = 1."""
    return naive_broadcast_time(nbytes, world_size, network)


def hierarchical_all_reduce_time(
    nbytes: float, ranks_per_node: int, nodes: int, inside: Network, between: Network
) -> float:
    """Return 2(L-1) (α₁ + n/(Lβ₁)) + 2(M-1) (α₂ + n/(LMβ₂)) seconds: rings inside, and between.

    L = `ranks_per_node`, M = `nodes`; α₁ and β₁ belong to `inside`, α₂ and β₂ to `between`. β₂ is
    the bandwidth of one rank: if the L ranks of a node share a link of bandwidth β, give β/L.
    """
    inner = ring_all_reduce_time(nbytes, ranks_per_node, inside)
    return inner + ring_all_reduce_time(nbytes / ranks_per_node, nodes, between)


def in_network_all_reduce_time(nbytes: float, world_size: int, network: Network) -> float:
    """Return 2α + n/β seconds: the switch adds while the bytes pass; 0 for K = 1.

    Every rank sends its n bytes to the switch once and receives the sum once. The sum begins to
    come back while the rest is still on its way. This is an ideal, derived time. No algorithm in
    `collectives` reaches it, because there the ranks add. See R. Graham et al., "Scalable
    Hierarchical Aggregation Protocol (SHArP)", COMHPC 2016.
    """
    return (world_size > 1) * (2 * delay(network) + nbytes / network.bandwidth)


ALL_REDUCE_TIMES: dict[str, Callable[[float, int, Network], float]] = {
    "central": central_all_reduce_time,
    "tree": tree_all_reduce_time,
    "ring": ring_all_reduce_time,
    "halving_doubling": halving_doubling_all_reduce_time,
    "direct": direct_all_reduce_time,
    "one_shot": one_shot_all_reduce_time,
}
"""Name → seconds as a function of (bytes, K, network); `collectives` has the algorithms."""


def fastest_all_reduce(nbytes: float, world_size: int, network: Network) -> str:
    """Return the name, a key of `ALL_REDUCE_TIMES`, of the algorithm with the least time."""
    times = {name: time(nbytes, world_size, network) for name, time in ALL_REDUCE_TIMES.items()}
    return min(times, key=lambda name: times[name])


def best_all_reduce_time(
    nbytes: float,
    world_size: int,
    between: Network,
    inside: Network | None = None,
    node_size: int = 8,
) -> float:
    """Return the seconds of the fastest all-reduce: any of `ALL_REDUCE_TIMES`, or two levels.

    Two levels are among the choices if `inside`, the network of a node, is given and nodes of
    `node_size` ranks hold all `world_size` ranks. `between` then has the bandwidth of one rank.
    """
    times = [time(nbytes, world_size, between) for time in ALL_REDUCE_TIMES.values()]
    if inside is not None and world_size % node_size == 0:
        shape = (node_size, world_size // node_size)
        times.append(hierarchical_all_reduce_time(nbytes, *shape, inside, between))
    return min(times)


# --- rates ----------------------------------------------------------------------------------------


def bus_bandwidth(nbytes: float, seconds: float, world_size: int) -> float:
    """Return 2(K-1)/K n/t: the bytes per second through each rank's link in an all-reduce.

    Unlike n/t, the algorithm bandwidth, it can be compared with that of the hardware for any K.
    """
    return 2 * (world_size - 1) / world_size * nbytes / seconds
