"""The training problem: model, data, device, and target.

A network of 8,970 weights (36 kB of gradients) learns the digits on four workers with 16 rows each.
Two ratios matter on a network: the time to send a gradient (its bytes over the bandwidth), and the
latency, each divided by the time to compute a gradient. So a small model on a slow device stands
for a large one on a fast device. The device here does 50 million operations per second, so a
gradient takes about 20 ms. Its memory bandwidth is 60 MB/s: one pass over the gradients takes about
a thirtieth of that, and compression makes several such passes. (For BERT-large at 4,096 tokens per
GPU, 100 TFLOP/s and 0.9 TB/s it is a twenty-eighth, *derived* from 6 operations and 8 bytes per
weight.)

Messages leave at once, as over a socket with a large buffer (`Network.eager_below`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from course_lib.data import digits
from course_lib.ranks import Device, Network

Look = list[Tensor]
"""The weights at one moment, one tensor per parameter."""


@dataclass(frozen=True)
class Problem:
    """The training that all algorithms compete in.

    Args:
        workers: K, the number of ranks that compute gradients.
        rows: rows in the batch of one worker.
        target: the loss over all training rows at which the clock stops.
        straggler: the factor by which worker 1 is slower; 1 for equal workers.
        steps: the most steps (with a server: gradients of each worker) that an algorithm may take
            to reach the target.

    Raises:
        ValueError: the straggler's factor is not above 0.

    """

    workers: int = 4
    rows: int = 16
    target: float = 0.4
    straggler: float = 1.0
    steps: int = 64

    def __post_init__(self) -> None:
        if not self.straggler > 0:
            raise ValueError(f"straggler must be above 0, got {self.straggler}")

    @property
    def device(self) -> Device:
        """The device of a worker."""
        return Device(
            flops=50e6, memory_bandwidth=60e6,
            slowdown={} if self.straggler == 1 else {1: self.straggler},
        )  # fmt: skip


def network_of(latency: float, bandwidth: float) -> Network:
    """Return the network of `latency` seconds and `bandwidth` bytes per second."""
    return Network(latency, bandwidth, eager_below=1 << 60)


def new_model(seed: int) -> nn.Sequential:
    """Return the initial model of a training with `seed`; it is the same on all ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    )


def gradient_bytes() -> int:
    """Return the bytes of all gradients."""
    return sum(4 * param.numel() for param in new_model(0).parameters())


@lru_cache(maxsize=1)
def training_rows() -> tuple[Tensor, Tensor]:
    """Return the images and labels of the training set."""
    images, labels = digits()[0].tensors
    return images, labels


def batches(problem: Problem, seed: int, worker: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one worker's batches without end: random rows of its own share of the data."""
    images, labels = (tensor[worker :: problem.workers] for tensor in training_rows())
    draw = torch.Generator().manual_seed(1_000 * seed + worker)
    while True:
        rows = torch.randint(len(images), (problem.rows,), generator=draw)
        yield images[rows], labels[rows]


def backward(forward: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> None:
    """Compute the gradient of one batch, and write it to `.grad`."""
    images, labels = batch
    nn.functional.cross_entropy(forward(images), labels).backward()  # type: ignore[no-untyped-call]


def look_at(model: nn.Module) -> Look:
    """Return a copy of the weights. It uses NumPy, so that the copy costs no virtual time."""
    return [torch.from_numpy(p.detach().numpy().copy()) for p in model.parameters()]


def mean_of(looks: Sequence[Look]) -> Look:
    """Return the mean of several ranks' weights."""
    return [torch.stack(of_ranks).mean(0) for of_ranks in zip(*looks, strict=True)]


@torch.no_grad()
def loss_of(look: Look) -> float:
    """Return the loss over all training rows with these weights."""
    model = new_model(0)
    for param, value in zip(model.parameters(), look, strict=True):
        param.copy_(value)
    images, labels = training_rows()
    return float(nn.functional.cross_entropy(model(images), labels))


def steps_to(target: float, looks: list[Look]) -> int | None:
    """Return the first step, from 1, with a loss of at most `target`; None if there is none."""
    for step, look in enumerate(looks, 1):
        if loss_of(look) <= target:
            return step
    return None
