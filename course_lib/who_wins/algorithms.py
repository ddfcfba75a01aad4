"""The contestants: each of the course's algorithms as one step of training.

The steps are those of the registry, `running_model.ways`, on a problem of their own:

    flat            one all-reduce of all gradients, after backward
    bucketed        all-reduces during backward
    8-bit, 1-bit, top-k, PowerSGD   one bucket, compressed
    1-bit Adam      momenta in one bit, after four exact steps
    decentralized   mean with two neighbours' weights, during backward
    one peer        mean with one other rank's weights, during backward
    local SGD       an average of the weights every 8 steps
    one average     each rank trains alone; one average at the end
    DiLoCo          an outer step every 8 steps
    asynchronous, bounded staleness: a server, on an additional rank

The network's library implements `dist.all_reduce`. Two contestants always use rings. All others use
the fastest of ring, direct and one-shot all-reduce on each network, as a tuned library does.

The server is a rank like the others. Its one port receives all gradients and sends all weights, one
message after the other. It computes its updates on the same kind of device, with its own optimizer.
For optimizers and learning rates see `settings`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from course_lib.compression import ErrorFeedback, OneBit, PowerSGD, TopK, Uniform8Bit
from course_lib.decentralized import one_peer_mixing
from course_lib.gradient_sync import sync_flat
from course_lib.local_sgd import DiLoCo, LocalSGD
from course_lib.running_model.ways import (
    EVERY,
    Prepare,
    averaged,
    gossip,
    one_bit_adam,
    one_rank,
    overlapped,
    synchronized,
)
from course_lib.who_wins.settings import Setting, tuned

_CAP = 16 / 1024
"""MiB in a bucket: 16 KiB."""

AllReduce = Literal["ring", "direct", "one-shot"]
RING: tuple[AllReduce, ...] = ("ring",)
BEST: tuple[AllReduce, ...] = ("ring", "direct", "one-shot")


@dataclass(frozen=True)
class Algorithm:
    """One contestant.

    Args:
        prepare: see `running_model.ways`; None if a server sends the weights.
        all_reduce: the algorithms for `dist.all_reduce`; on each network the fastest is used.
        server: options of `serve`.
        same_as: an algorithm that has the same weights after every step, which a test checks. Its
            training counts for both. With a server, this holds only if all workers are equally
            fast.
        period: steps after which the pattern of messages repeats.
        differ: whether the ranks' weights differ between two averages.

    """

    prepare: Prepare | None = None
    all_reduce: tuple[AllReduce, ...] = BEST
    server: Mapping[str, int] | None = None
    same_as: str | None = None
    period: int = 1
    differ: bool = False


_ALL = float("inf")
_EXACT_STEPS = 4
"""Steps of 1-bit Adam before it compresses, about a fifth of those to the target."""

ALGORITHMS: dict[str, Algorithm] = {
    "flat, ring": Algorithm(synchronized(sync_flat), RING, same_as="flat"),
    "flat": Algorithm(synchronized(sync_flat)),
    "bucketed, ring": Algorithm(overlapped(_CAP), RING, same_as="flat"),
    "bucketed": Algorithm(overlapped(_CAP), same_as="flat"),
    "8-bit": Algorithm(overlapped(_ALL, Uniform8Bit)),
    "1-bit": Algorithm(overlapped(_ALL, lambda: ErrorFeedback(OneBit()))),
    "1-bit Adam": Algorithm(one_bit_adam(_EXACT_STEPS)),
    "top-k": Algorithm(overlapped(_ALL, lambda: ErrorFeedback(TopK(0.01)))),
    "PowerSGD": Algorithm(overlapped(_ALL, lambda: ErrorFeedback(PowerSGD(2)))),
    "asynchronous": Algorithm(server={}),
    "bounded staleness": Algorithm(server={"bound": 2}, same_as="asynchronous"),
    "decentralized": Algorithm(gossip(), differ=True),
    "one peer": Algorithm(gossip(one_peer_mixing), period=2, differ=True),
    "local SGD": Algorithm(averaged(LocalSGD), period=EVERY, differ=True),
    "one average": Algorithm(one_rank, differ=True),
    "DiLoCo": Algorithm(averaged(DiLoCo), period=EVERY, differ=True),
}
"""The algorithms by their names on the map."""


def setting_of(name: str) -> Setting:
    """Return the tuned optimizer and learning rate of an algorithm."""
    return tuned(ALGORITHMS[name].same_as or name)
