"""The contestants: each of the course's algorithms as one step of training.

`prepare(model, lr)` sets up one rank and returns a function that takes a step with one batch. All
communication code is imported; this module only combines it:

    ring            one ring of our own per tensor, after backward      sync_per_parameter
    flat            one all-reduce of all gradients, after backward     sync_flat
    bucketed        all-reduces beside backward                         DistributedDataParallel
    8-bit, 1-bit, top-k, PowerSGD   the same, compressed                compression_hook
    decentralized   weights mix with two neighbours', beside backward   Gossip
    local SGD       an average of the weights every 8 steps             LocalSGD
    DiLoCo          every 8 steps an outer step                         DiLoCo
    asynchronous, bounded staleness: a server, which is one rank more   ParameterServer, serve

`dist.all_reduce` is a ring, as in NCCL for long tensors. The server is a rank like the others. Its
one port receives all gradients and sends all weights, one message after the other. It computes its
updates on the same device. For learning rates see `rates`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from course_lib.collectives import place_in, ring_all_reduce
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
from course_lib.gradient_sync import sync_flat, sync_per_parameter
from course_lib.local_sgd import DiLoCo, LocalSGD
from course_lib.who_wins.problem import backward
from course_lib.who_wins.rates import rate_of

Batch = tuple[Tensor, Tensor]
Step = Callable[[Batch], None]
Prepare = Callable[[nn.Module, float], Step]

EVERY = 8
"""Steps between two meetings of local SGD and of DiLoCo."""
KIBIBYTE = 1 / 1024
"""In PyTorch's megabytes, which are 2**20 bytes."""


@dataclass(frozen=True)
class Algorithm:
    """One contestant.

    Args:
        letter: its letter on the map.
        prepare: see the module; None if a server sends the weights.
        server: options of `serve`.
        same_as: another algorithm with the same weights after every step, which a test checks. Its
            training then counts for both.
        period: steps after which the pattern of messages repeats.
        differ: whether the ranks' weights differ between two meetings.

    """

    letter: str
    prepare: Prepare | None = None
    server: Mapping[str, int] | None = None
    same_as: str | None = None
    period: int = 1
    differ: bool = False


def _after_backward(sync: Callable[..., None], **options: object) -> Prepare:
    def prepare(model: nn.Module, lr: float) -> Step:
        optimizer = torch.optim.SGD(model.parameters(), lr)

        def step(batch: Batch) -> None:
            optimizer.zero_grad()
            backward(model, batch)
            sync(model.parameters(), **options)
            optimizer.step()

        return step

    return prepare


def _beside_backward(
    bucket_kib: float, compressor: Callable[[], Compressor] | None = None
) -> Prepare:
    def prepare(model: nn.Module, lr: float) -> Step:
        optimizer = torch.optim.SGD(model.parameters(), lr)
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


def _with_neighbours(model: nn.Module, lr: float) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr)
    gossip = Gossip(optimizer, ring_mixing(place_in(None)[1]))

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        with gossip:
            backward(model, batch)
        optimizer.step()

    return step


def _local_sgd(model: nn.Module, lr: float) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr)
    return _alone(model, optimizer, LocalSGD(optimizer, EVERY))


def _diloco(model: nn.Module, lr: float) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    return _alone(model, optimizer, DiLoCo(optimizer, EVERY))


def _alone(model: nn.Module, optimizer: torch.optim.Optimizer, meeting: LocalSGD | DiLoCo) -> Step:
    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        backward(model, batch)
        meeting.step()

    return step


_ALL = float("inf")

ALGORITHMS: dict[str, Algorithm] = {
    "ring": Algorithm(
        "R", _after_backward(sync_per_parameter, all_reduce=ring_all_reduce), same_as="flat"
    ),
    "flat": Algorithm("F", _after_backward(sync_flat)),
    "bucketed": Algorithm("B", _beside_backward(16), same_as="flat"),
    "8-bit": Algorithm("8", _beside_backward(_ALL, Uniform8Bit)),
    "1-bit": Algorithm("1", _beside_backward(_ALL, lambda: ErrorFeedback(OneBit()))),
    "top-k": Algorithm("T", _beside_backward(_ALL, lambda: ErrorFeedback(TopK(0.01)))),
    "PowerSGD": Algorithm("P", _beside_backward(_ALL, lambda: ErrorFeedback(PowerSGD(2)))),
    "asynchronous": Algorithm("A", server={}),
    "bounded staleness": Algorithm("S", server={"bound": 2}),
    "decentralized": Algorithm("D", _with_neighbours, differ=True),
    "local SGD": Algorithm("L", _local_sgd, period=EVERY, differ=True),
    "DiLoCo": Algorithm("O", _diloco, period=EVERY, differ=True),
}
"""The algorithms by their names on the map."""


def learning_rate(name: str) -> float:
    """Return the learning rate of an algorithm."""
    return rate_of(ALGORITHMS[name].same_as or name)


COMPARED_BY_BAGUA = ("flat", "bucketed", "8-bit", "1-bit", "asynchronous", "decentralized")
"""The families that BAGUA's paper compares; they also get a map of their own."""
