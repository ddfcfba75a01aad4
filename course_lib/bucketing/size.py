"""The size of buckets: when a step with overlap ends, and which size makes it end soonest.

    >>> from course_lib.bucketing import best_bucket_bytes
    >>> nbytes = best_bucket_bytes(100e6, backward=20e-3, world_size=8, network=network)

Communication can begin when the first bucket is complete, and ends after the last one. Small
buckets begin early, but each one pays the latency. Large buckets pay it less often, but begin late:

    backward    |  B/m  |  B/m  |  B/m  |               m buckets of n/m bytes
    network             | t(n/m) | t(n/m) | t(n/m) |

Times are in seconds, sizes in bytes, K = `world_size`; t(n) is the time of an all-reduce of n
bytes, as `cost_model` counts it.

S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from collections.abc import Callable, Sequence

from course_lib.cost_model import Network, message_time, ring_all_reduce_time


def overlapped_time(
    bucket_bytes: Sequence[float],
    backward: float,
    world_size: int,
    network: Network,
    all_reduce_time: Callable[[float, int, Network], float] = ring_all_reduce_time,
) -> float:
    """Return when backward and all all-reduces are over, in seconds from the start of backward.

    The gradients become ready at a constant rate during the `backward` seconds. The buckets are
    given in the order in which they become ready. They are reduced one at a time, each as soon as
    it is ready and the previous one is done. One bucket with everything gives B + t(n): no overlap.
    """
    total = sum(bucket_bytes) or 1.0
    ready = end = 0.0
    for nbytes in bucket_bytes:
        ready += backward * nbytes / total
        end = max(end, ready) + all_reduce_time(nbytes, world_size, network)
    return max(end, backward)


def best_bucket_bytes(
    nbytes: float, backward: float, world_size: int, network: Network, largest_count: int = 10_000
) -> float:
    """Return the size, n/m bytes, of equal buckets that minimises `overlapped_time` with a ring.

    Each of m buckets costs o = 2(K-1) α in addition to its bytes (a network's overhead adds to α
    twice, see `cost_model`), so many buckets are expensive. But the first bucket is sent only after
    B/m seconds, and the last one ends after backward, so few buckets overlap badly:

        T(m) = max(B/m + m o + w,  B + o + w/m)       w = 2(K-1)/K n/β,  B = `backward`

    If communication dominates, the first term decides, and its minimum is at m = √(B/o). The
    function tries m = 1 … `largest_count`. Raises ValueError if `largest_count` is below 1.
    """
    overhead = 2 * (world_size - 1) * message_time(0, network)
    wire = 2 * (world_size - 1) / world_size * nbytes / network.bandwidth

    def time(count: int) -> float:
        return max(backward / count + count * overhead + wire, backward + overhead + wire / count)

    return nbytes / min(range(1, largest_count + 1), key=time)
