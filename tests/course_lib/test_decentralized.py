"""Gossip equals W w - γ g of all ranks in one process, and mixes as fast as its eigenvalue says."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import mse_loss

from course_lib import decentralized
from course_lib.decentralized import (
    Gossip,
    Mixing,
    check_mixing,
    complete_mixing,
    consensus_distance,
    exponential_mixing,
    random_pairs,
    ring_mixing,
    second_eigenvalue,
    torus_mixing,
)
from course_lib.ranks import Ranks
from course_lib.sharding import shard
from tests.helpers.ddp_scenarios import WORLDS, batches, mlp, own_shards

STEPS, LR = 5, 0.3


def mixing_of(name: str, k: int) -> Mixing:
    if name == "torus":
        return torus_mixing(k // 2, 2) if k % 2 == 0 else torus_mixing(1, k)
    made: Mixing = getattr(decentralized, name)(k)
    return made


NAMES = ["ring_mixing", "torus", "exponential_mixing", "complete_mixing", "random_pairs"]


def train(name: str) -> Tensor:
    """Return this rank's weights after 5 steps, from other weights and other rows on each rank."""
    net = mlp(seed=dist.get_rank())
    optimizer = torch.optim.SGD(net.parameters(), LR)
    gossip = Gossip(optimizer, mixing_of(name, dist.get_world_size()))
    for x, y in own_shards(steps=STEPS):
        optimizer.zero_grad()
        with gossip:
            mse_loss(net(x), y).backward()
        optimizer.step()
    return vector(net.parameters())


def vector(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def by_hand(name: str, k: int) -> Tensor:
    nets = [mlp(seed=rank) for rank in range(k)]
    for t, (x, y) in enumerate(batches(steps=STEPS)):
        mixing = mixing_of(name, k)
        matrix = mixing if isinstance(mixing, Tensor) else mixing(t)
        weights = torch.stack([vector(net.parameters()) for net in nets])
        for i, net in enumerate(nets):
            net.zero_grad()
            mse_loss(net(shard(x, k, i)), shard(y, k, i)).backward()
        gradients = torch.stack([vector(p.grad for p in net.parameters()) for net in nets])
        for net, new in zip(nets, matrix @ weights - LR * gradients, strict=True):
            torch.nn.utils.vector_to_parameters(new, net.parameters())
    return torch.stack([vector(net.parameters()) for net in nets])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_gossip_equals_its_formula(ranks_of, on, k, name):
    replicas = torch.stack(ranks_of(on, k).run(train, name))
    torch.testing.assert_close(replicas, by_hand(name, k), rtol=1e-12, atol=1e-13)


def test_messages_go_to_neighbours_only():
    for name, peers in (("ring_mixing", {1, 7}), ("exponential_mixing", {4, 6, 7})):
        ranks = Ranks(8, on="simulated")
        ranks.run(train, name)
        sent = [e for e in ranks.trace.operations if e.rank == 0 and "send" in e.kind]
        assert {event.peer for event in sent} == peers
        assert len(sent) == STEPS * len(peers)


def decay(mixing: str, start: Tensor, steps: int) -> list[float]:
    param = torch.nn.Parameter(start[dist.get_rank()].clone())
    gossip = Gossip(torch.optim.SGD([param], LR), mixing_of(mixing, dist.get_world_size()))
    distances = [consensus_distance([param])]
    for _ in range(steps):
        with gossip:
            pass  # without gradients
        distances.append(consensus_distance([param]))
    return distances


@pytest.mark.parametrize("k", [4, 8, pytest.param(16, marks=pytest.mark.large)])
def test_consensus_decays_by_the_second_eigenvalue(k):
    start = torch.randn(k, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    steps = {4: 6, 8: 20, 16: 60}[k]
    distances = Ranks(k, on="simulated").run(decay, "ring_mixing", start, steps)[0]
    eigenvalue = (1 + 2 * math.cos(2 * math.pi / k)) / 3  # of a circulant matrix
    assert second_eigenvalue(ring_mixing(k)) == pytest.approx(eigenvalue, rel=1e-9)
    assert distances[-1] / distances[-2] == pytest.approx(eigenvalue, rel=0.01)
    assert all(b <= eigenvalue * a * (1 + 1e-9) for a, b in pairwise(distances))


@given(st.integers(1, 12), st.integers(1, 5))
def test_every_mixing_is_doubly_stochastic_and_shrinks_distances(rows, columns):
    k = rows * columns
    matrices = [ring_mixing(k), exponential_mixing(k), complete_mixing(k)]
    matrices += [torus_mixing(rows, columns), random_pairs(k, seed=1)(7)]
    for matrix in matrices:
        check_mixing(matrix, k)
        generator = torch.Generator().manual_seed(k)
        start = torch.randn(k, 3, generator=generator, dtype=torch.float64)
        mixed = matrix @ start
        torch.testing.assert_close(mixed.mean(0), start.mean(0))
        before, after = ((w - w.mean(0)).norm() for w in (start, mixed))
        assert after <= second_eigenvalue(matrix) * before + 1e-9


@pytest.mark.parametrize(
    ("matrix", "why"),
    [
        (torch.eye(3), "4 ranks need a mixing matrix of 4 × 4, not of 3 × 3"),
        (torch.tensor(1.0), "no dimension"),
        (torch.full((4, 4), float("nan")), "numbers that are 0 or more"),
        (torch.eye(4).roll(1, 0) * 0.5, "row 0 sums to 0.5, not 1"),
        (torch.eye(4)[[0, 0, 2, 3]], "column 0 sums to 2, not 1, so mixing would change the mean"),
    ],
)
def test_a_matrix_that_does_not_mix_is_refused(matrix, why):
    with pytest.raises(ValueError, match=why):
        check_mixing(matrix, 4)


def in_a_group() -> Tensor:
    group = dist.new_group([1, 3])
    param = torch.nn.Parameter(torch.tensor([float(dist.get_rank())], dtype=torch.float64))
    optimizer = torch.optim.SGD([param], LR)
    if dist.get_rank() in (1, 3):
        with Gossip(optimizer, ring_mixing(2), group):
            pass
    else:
        with pytest.raises(ValueError, match="not a member"):
            Gossip(optimizer, ring_mixing(2), group)
    return param.detach()


@pytest.mark.parametrize("on", ["simulated", "cpu"])
def test_row_i_is_for_number_i_of_the_group(ranks_of, on):
    # A ring of two: a third is one's own, two thirds come from the only neighbour, on both sides.
    expected = [0.0, (1 + 2 * 3) / 3, 2.0, (3 + 2 * 1) / 3]
    assert torch.cat(ranks_of(on, 4).run(in_a_group)).tolist() == pytest.approx(expected)
