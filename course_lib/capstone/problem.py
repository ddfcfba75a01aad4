"""The problem of the race: its parameters, its data, and the model to train.

Every seed gives a new problem: clusters of points with a label each, and fresh noise. So nobody can
know the weights in advance. One draw tells nothing about the next, except how hard it is: all draws
are equally hard.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.ranks import Device, Network

DEVICE = Device(flops=50e9)
"""The device of every rank: 50 GFLOP/s."""
OVERHEAD = 200e-6
"""Seconds that every gradient costs in addition to its operations: about forty kernel launches."""


@dataclass(frozen=True)
class Race:
    """The parameters of a case.

    Args:
        target: the loss to reach, in nats, on held-out rows, which no rank has.
        latency: the network's latency in seconds.
        bandwidth: the network's bandwidth in bytes per second.
        world_size: number of ranks K.
        rows: rows of each rank.
        features: numbers in a row.
        hidden: width of the network's hidden layer.
        classes: number of labels.
        clusters: clusters per label, an even number: half of them lie opposite the others.
        noise: standard deviation of a point around its centre, in every feature.
        skew: share of a rank's rows from its own clusters (cluster number modulo K). Its other
            rows, and the held-out rows, come from all clusters equally.

    """

    target: float = 0.12
    latency: float = 2e-3
    bandwidth: float = 3.125e6
    world_size: int = 4
    rows: int = 512
    features: int = 64
    hidden: int = 256
    classes: int = 10
    clusters: int = 6
    noise: float = 1.0
    skew: float = 0.8

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Race:
        """Return the race of a case's parameters; further parameters are ignored."""
        names = {parameter.name for parameter in fields(cls)}
        return cls(**{name: value for name, value in parameters.items() if name in names})

    @property
    def network(self) -> Network:
        """The network, which sets the cost of messages."""
        return Network(self.latency, self.bandwidth)

    def seconds(self, rows: int) -> float:
        """Return the virtual seconds of the gradient of this many rows.

        Forward multiplies each row with each weight, and backward does so twice, without the
        gradient of the rows themselves.
        """
        first, second = self.features * self.hidden, self.hidden * self.classes
        return OVERHEAD + rows * (4 * first + 6 * second) / DEVICE.flops


@dataclass(frozen=True)
class Draw:
    """One draw of the problem.

    Attributes:
        weights: the model's weights before training; the same on all ranks.
        x: for each rank, its rows, (rows, features), float32.
        y: for each rank, its labels, (rows,), int64.
        held: held-out rows and labels, which no rank has.

    """

    weights: list[Tensor]
    x: list[Tensor]
    y: list[Tensor]
    held: tuple[Tensor, Tensor]


@functools.lru_cache(maxsize=4)
def draw(race: Race, seed: str) -> Draw:
    """Return the draw of a seed; its numbers are float32, even if the default dtype is not.

    The last four draws are kept: do not change their tensors.
    """
    digest = hashlib.sha256(seed.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    # Centres are orthogonal or opposite, so every draw is a rotation of every other draw. Each
    # label has opposite centres, so the mean of its rows contains no information, and a model
    # without a hidden layer learns nothing. So computing class means in one all-reduce cannot win.
    count = race.classes * race.clusters
    centres = torch.linalg.qr(randn(race.features, count // 2)).Q.T * math.sqrt(race.features)
    centres = torch.cat([centres, -centres])

    def rows(number: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
        clusters = torch.randint(count, (number,), generator=generator)
        if rank is not None:
            is_skewed = torch.rand(number, generator=generator, dtype=torch.float32) < race.skew
            of_rank = clusters - clusters % race.world_size + rank
            clusters = torch.where(is_skewed & (of_rank < count), of_rank, clusters)
        x = centres[clusters] + race.noise * randn(number, race.features)
        return x, clusters % race.classes

    rank_rows = [rows(race.rows, rank) for rank in range(race.world_size)]
    shapes = [param.shape for param in model_of(race).parameters()]
    weights = [
        randn(*shape) / math.sqrt(shape[-1])
        if len(shape) > 1
        else torch.zeros(shape, dtype=torch.float32)
        for shape in shapes
    ]
    return Draw(weights, [x for x, _ in rank_rows], [y for _, y in rank_rows], rows(4096))


def model_of(race: Race, weights: Sequence[Tensor] = ()) -> nn.Module:
    """Return the network to train, with these weights, without drawing random numbers."""
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(race.features, race.hidden), nn.ReLU(), nn.Linear(race.hidden, race.classes)
        )
    layers = [module for module in model if isinstance(module, nn.Linear)]
    for layer, weight, bias in zip(layers, weights[::2], weights[1::2], strict=bool(weights)):
        layer.weight, layer.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
    return model
