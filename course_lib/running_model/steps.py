"""How many steps each way needs until the held-out loss reaches the target.

    >>> from course_lib.running_model.steps import RATES, run, tuned_rate
    >>> tuned_rate("gossip") in RATES
    True

The file steps.csv has what `run` has returned. All ways are tried alike: AdamW with each of RATES,
on the first two seeds. The rate with the fewest steps is tried on all seeds. The ranks' mean
weights count; with a server, the server's. A way with the weights of another way after every step
(`Way.like`) is not tried again.
"""

import csv
import math
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from course_lib.ranks import Network, Ranks
from course_lib.running_model.problem import DEVICE, NETWORK, held_out_loss, new_model
from course_lib.running_model.training import train_one_way
from course_lib.running_model.ways import WAYS

TARGET = 2.7
"""Nats per byte, over the held-out rows."""
RATES = (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2)
SEEDS = range(5)
TUNING_SEEDS = SEEDS[:2]
LIMIT, EVERY = 200, 2
"""A way may take `LIMIT` steps; its held-out loss is looked at after `EVERY` steps."""
FILE = Path(__file__).with_name("steps.csv")


class Try(NamedTuple):
    """One training: the steps are infinite if the target was not reached."""

    way: str
    rate: float
    seed: int
    steps: float


def _train(way: str, rate: float, seed: int) -> float:
    """Train on this rank to the target; return the steps. With a server, only rank 0 knows them."""
    steps, reached = 0, math.inf
    looks_alone = WAYS[way].prepare is None
    mean, loss = new_model(), torch.zeros(1)

    def after_step(model: nn.Module) -> bool:
        nonlocal steps, reached
        steps += 1
        if steps % EVERY or reached < math.inf:
            return reached < math.inf
        weights = parameters_to_vector(model.parameters()).detach()
        if not looks_alone:
            weights /= dist.get_world_size()
            dist.all_reduce(weights)
        if dist.get_rank() == 0:
            vector_to_parameters(weights, mean.parameters())
            loss.fill_(held_out_loss(mean))
        if not looks_alone:
            dist.broadcast(loss, 0)
        if loss <= TARGET:
            reached = steps
        return reached < math.inf

    train_one_way(way, LIMIT, rate, seed, after_step)
    return reached


def run(way: str, rate: float, seed: int) -> Try:
    """Train once; return how many steps it took to the target."""
    torch.set_num_threads(1)
    by_time = WAYS[way].prepare is None  # then the order of the gradients depends on the clock
    network, device = (NETWORK, DEVICE) if by_time else (Network(0.0, 1e30), None)
    with Ranks(WAYS[way].world_size, on="simulated", network=network, device=device) as ranks:
        return Try(way, rate, seed, ranks.run(_train, way, rate, seed)[0])


@cache
def tries() -> tuple[Try, ...]:
    """Return all tries in steps.csv."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return tuple(
            Try(line["way"], float(line["rate"]), int(line["seed"]), float(line["steps"]))
            for line in csv.DictReader(file)
        )


def tuned_rate(way: str) -> float:
    """Return the rate with the fewest steps on the first seeds; of two such rates, the smaller."""

    def steps(rate: float) -> float:
        return fmean(_steps_of(way, rate, seed) for seed in TUNING_SEEDS)

    return min(RATES, key=lambda rate: (steps(rate), rate))


def _steps_of(way: str, rate: float, seed: int) -> float:
    return next(t.steps for t in tries() if t[:3] == (way, rate, seed))


def all_steps(way: str) -> list[float]:
    """Return the steps of a way at its tuned rate, one number for each seed."""
    trained_as = WAYS[way].like or way
    rate = tuned_rate(trained_as)
    return [_steps_of(trained_as, rate, seed) for seed in SEEDS]


def mean_steps(way: str) -> float:
    """Return the mean steps of a way over the seeds; infinite if one did not reach the target."""
    return fmean(all_steps(way))
