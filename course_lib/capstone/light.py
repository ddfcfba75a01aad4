"""The speed of light: a time that no schedule of some work can beat."""

from __future__ import annotations

from collections.abc import Iterable


def speed_of_light(
    flops: Iterable[float],
    sent: Iterable[float],
    received: Iterable[float],
    rate: float,
    bandwidth: float,
) -> float:
    """Return T = max over the ranks k of max(F_k/φ, S_k/β, R_k/β), in seconds.

    A rank computes, sends and receives at the same time at best. So it needs at least the longest
    of the three times, and the slowest rank sets the time of all. Latency and waiting come on top.

    Args:
        flops: F_k, the floating-point operations of each rank.
        sent: S_k, the bytes that each rank sends.
        received: R_k, the bytes that each rank receives.
        rate: φ, operations per second of a rank.
        bandwidth: β, bytes per second of a rank, each way.

    """
    work = zip(flops, sent, received, strict=True)
    return max(max(f / rate, s / bandwidth, r / bandwidth) for f, s, r in work)
