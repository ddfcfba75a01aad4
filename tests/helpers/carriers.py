"""Ranks on everything that can carry what they send: programs must not see which one it is."""

import functools

from course_lib.ranks import Ranks
from tests.helpers.carried_ranks import CarriedRanks
from tests.helpers.emulated_nccl import emulate

# The fabric in this process, gloo, NCCL's semantics over gloo, the grader's network.
CARRIERS = ("simulated", "cpu", "nccl", "sockets")


@functools.cache
def _started(carrier: str, k: int, timeout: float) -> Ranks:
    on = "cpu" if carrier in ("nccl", "sockets") else carrier
    return Ranks(k, on=on, timeout=timeout, metered=carrier != "sockets")


def ranks_on(carrier: str, k: int, timeout: float = 300) -> Ranks | CarriedRanks:
    """Return ranks that all tests of a worker share: each must leave them in order."""
    ranks = _started(carrier, k, timeout)
    if carrier == "sockets":
        return CarriedRanks(ranks)
    if carrier == "nccl":
        ranks.run(emulate, delay=0.002)  # ranks that were started anew do not yet
    return ranks
