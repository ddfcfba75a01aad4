"""The contestants: each of the course's algorithms as one step of training.

`prepare(model, optimizer)` sets up one rank and returns a function that takes a step with one
batch. All communication code is imported; this module only combines it:

    flat            one all-reduce of all gradients, after backward     sync_flat
    bucketed        all-reduces during backward                         DistributedDataParallel
    8-bit, 1-bit, top-k, PowerSGD   one bucket, compressed              compression_hook
    decentralized   mean with two neighbours' weights, during backward  Gossip
    local SGD       an average of the weights every 8 steps             LocalSGD
    DiLoCo          an outer step every 8 steps                         DiLoCo
    asynchronous, bounded staleness: a server, on an additional rank    ParameterServer, serve

The network's library implements `dist.all_reduce`. Two contestants always use rings. All others use
the fastest of ring, direct and one-shot all-reduce on each network, as a tuned library does.

The server is a rank like the others. Its one port receives all gradients and sends all weights, one
message after the other. It computes its updates on the same kind of device, with its own optimizer.
For optimizers and learning rates see `settings`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from course_lib.collectives import place_in
from course_lib.compression import (
    CompressionState,
    Compressor,
    ErrorFeedback,
    OneBit,
    PowerSGD,
    TopK,
    Uniform8Bit,
    compression_hook,
)
from course_lib.ddp import DistributedDataParallel
from course_lib.decentralized import Gossip, ring_mixing
from course_lib.gradient_sync import sync_flat
from course_lib.local_sgd import DiLoCo, LocalSGD
from course_lib.who_wins.problem import backward
from course_lib.who_wins.settings import Setting, tuned

Batch = tuple[Tensor, Tensor]
Step = Callable[[Batch], None]
Prepare = Callable[[nn.Module, torch.optim.Optimizer], Step]

EVERY = 8
"""Steps between two averages of local SGD, and between two outer steps of DiLoCo."""
KIBIBYTE = 1 / 1024
"""A kibibyte in PyTorch's megabytes, which are 2**20 bytes."""


AllReduce = Literal["ring", "direct", "one-shot"]
RING: tuple[AllReduce, ...] = ("ring",)
BEST: tuple[AllReduce, ...] = ("ring", "direct", "one-shot")


@dataclass(frozen=True)
class Algorithm:
    """One contestant.

    Args:
        prepare: see the module; None if a server sends the weights.
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


def _flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        backward(model, batch)
        sync_flat(model.parameters())
        optimizer.step()

    return step


def _beside_backward(
    bucket_kib: float, compressor: Callable[[], Compressor] | None = None
) -> Prepare:
    def prepare(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        cap = bucket_kib * KIBIBYTE
        # The replicas are equal from the start, so DDP's first broadcast is skipped.
        wrapped = DistributedDataParallel(model, cap, cap, init_sync=False)
        if compressor is not None:
            wrapped.register_comm_hook(CompressionState(compressor()), compression_hook)

        def step(batch: Batch) -> None:
            optimizer.zero_grad()
            backward(wrapped, batch)
            optimizer.step()

        return step

    return prepare


def _with_neighbours(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    gossip = Gossip(optimizer, ring_mixing(place_in(None)[1]))

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        with gossip:
            backward(model, batch)
        optimizer.step()

    return step


def _alone(meeting: type[LocalSGD] | type[DiLoCo]) -> Prepare:
    def prepare(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        together = meeting(optimizer, EVERY)

        def step(batch: Batch) -> None:
            optimizer.zero_grad()
            backward(model, batch)
            together.step()

        return step

    return prepare


_ALL = float("inf")

ALGORITHMS: dict[str, Algorithm] = {
    "flat, ring": Algorithm(_flat, RING, same_as="flat"),
    "flat": Algorithm(_flat),
    "bucketed, ring": Algorithm(_beside_backward(16), RING, same_as="flat"),
    "bucketed": Algorithm(_beside_backward(16), same_as="flat"),
    "8-bit": Algorithm(_beside_backward(_ALL, Uniform8Bit)),
    "1-bit": Algorithm(_beside_backward(_ALL, lambda: ErrorFeedback(OneBit()))),
    "top-k": Algorithm(_beside_backward(_ALL, lambda: ErrorFeedback(TopK(0.01)))),
    "PowerSGD": Algorithm(_beside_backward(_ALL, lambda: ErrorFeedback(PowerSGD(2)))),
    "asynchronous": Algorithm(server={}),
    "bounded staleness": Algorithm(server={"bound": 2}, same_as="asynchronous"),
    "decentralized": Algorithm(_with_neighbours, differ=True),
    "local SGD": Algorithm(_alone(LocalSGD), period=EVERY, differ=True),
    "DiLoCo": Algorithm(_alone(DiLoCo), period=EVERY, differ=True),
}
"""The algorithms by their names on the map."""


def setting_of(name: str) -> Setting:
    """Return the tuned optimizer and learning rate of an algorithm."""
    return tuned(ALGORITHMS[name].same_as or name)
