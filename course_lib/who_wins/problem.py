"""What is trained, on what, and when it is trained well enough.

A network of 8,970 weights (36 kB of gradients) learns the digits on four workers with 16 rows each.
What matters on a network are two ratios: bytes of a gradient over bandwidth, and latency, each
beside the seconds that a gradient takes to compute. So a small model on a slow device stands for a
large one on a fast device. The device here does 50 million operations per second, which makes a
gradient about 20 ms, and its memory passes 60 MB/s: then one pass over the gradients, such as
compression makes several of, takes about a thirtieth of that. (BERT-large at 4,096 tokens per GPU,
100 TFLOP/s and 0.9 TB/s: a twenty-eighth, *derived* from 6 operations and 8 bytes per weight.)

Messages leave at once, as over a socket with a large buffer (`Network.eager_below`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from course_lib.data import digits
from course_lib.ranks import Device, Network

Look = list[Tensor]
"""The weights of one moment, one tensor per parameter."""


@dataclass(frozen=True)
class Problem:
    """The training that all algorithms compete in.

    Args:
        workers: K, ranks that compute gradients.
        rows: of the batch of one worker.
        target: the loss over all training rows at which the clock stops.
        straggler: how much slower worker 1 computes; 1 for equal workers.
        steps: after which an algorithm is said not to reach the target; with a server, gradients
            of each worker.

    Raises:
        ValueError: a number that no training has.

    """

    workers: int = 4
    rows: int = 16
    target: float = 0.4
    straggler: float = 1.0
    steps: int = 96

    def __post_init__(self) -> None:
        if self.workers < 2 or min(self.rows, self.steps) < 1:
            raise ValueError(
                f"{self.workers} workers, {self.rows} rows, {self.steps} steps: too few to train"
            )
        if not self.target > 0 or not self.straggler > 0:
            raise ValueError("target and straggler are above 0")

    @property
    def device(self) -> Device:
        """What a worker computes on."""
        return Device(
            flops=50e6, memory_bandwidth=60e6,
            slowdown={} if self.straggler == 1 else {1: self.straggler},
        )  # fmt: skip


def network_of(latency: float, bandwidth: float) -> Network:
    """Return the network of `latency` seconds and `bandwidth` bytes per second."""
    return Network(latency, bandwidth, eager_below=1 << 60)


def new_model(seed: int) -> nn.Sequential:
    """Return the model as training with `seed` begins with it: the same on all ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    )


def gradient_bytes() -> int:
    """Return the bytes of all gradients."""
    return sum(4 * param.numel() for param in new_model(0).parameters())


@lru_cache(maxsize=1)
def training_rows() -> tuple[Tensor, Tensor]:
    """Return images and labels that are trained on."""
    images, labels = digits()[0].tensors
    return images, labels


def batches(problem: Problem, seed: int, worker: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one worker's batches without end: rows of its own share of the data, drawn anew."""
    images, labels = (each[worker :: problem.workers] for each in training_rows())
    draw = torch.Generator().manual_seed(1_000 * seed + worker)
    while True:
        rows = torch.randint(len(images), (problem.rows,), generator=draw)
        yield images[rows], labels[rows]


def backward(forward: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> None:
    """Compute the gradient of one batch, into `.grad`."""
    images, labels = batch
    nn.functional.cross_entropy(forward(images), labels).backward()  # type: ignore[no-untyped-call]


def look_at(model: nn.Module) -> Look:
    """Return a copy of the weights. By NumPy: looking is no operator, and costs no virtual time."""
    return [torch.from_numpy(p.detach().numpy().copy()) for p in model.parameters()]


def mean_of(looks: list[Look]) -> Look:
    """Return the mean of several ranks' weights."""
    return [torch.stack(each).mean(0) for each in zip(*looks, strict=True)]


@torch.no_grad()
def loss_of(look: Look) -> float:
    """Return the loss over all training rows with these weights."""
    model = new_model(0)
    for param, value in zip(model.parameters(), look, strict=True):
        param.copy_(value)
    images, labels = training_rows()
    return float(nn.functional.cross_entropy(model(images), labels))


def steps_to(target: float, looks: list[Look]) -> int | None:
    """Return after which step, from 1, the loss is at most `target`; None if it never is."""
    for step, look in enumerate(looks, 1):
        if loss_of(look) <= target:
            return step
    return None
