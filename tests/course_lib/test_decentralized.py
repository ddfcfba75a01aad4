"""Gossip equals W w - γ g of all ranks in one process; matrices, and the references of 08."""

import math

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
    check_mixing,
    choose_graph,
    complete_mixing,
    consensus_distance,
    decentralized_step,
    exponential_mixing,
    metropolis_weights,
    random_pairs,
    ring_mixing,
    second_eigenvalue,
    spectral_gap,
    start_mixing,
    torus_mixing,
)
from course_lib.sharding import shard
from tests.helpers.ddp_scenarios import WORLDS, batches, mlp, own_shards

STEPS, LR = 5, 0.3


def mixing_of(name: str, k: int):
    if name == "torus":
        return torus_mixing(k // 2, 2) if k % 2 == 0 else torus_mixing(1, k)
    return getattr(decentralized, name)(k)


NAMES = ["ring_mixing", "torus", "exponential_mixing", "complete_mixing", "random_pairs"]


def train(name: str) -> tuple[Tensor, float]:
    """Return this rank's weights after 5 steps, from other weights and other rows on each rank.

    With them, how far the ranks are from their mean.
    """
    net = mlp(seed=dist.get_rank())
    optimizer = torch.optim.SGD(net.parameters(), LR)
    gossip = Gossip(optimizer, mixing_of(name, dist.get_world_size()))
    for x, y in own_shards(steps=STEPS):
        optimizer.zero_grad()
        with gossip:
            mse_loss(net(x), y).backward()
        optimizer.step()
    return vector(net.parameters()), consensus_distance(net.parameters())


def vector(tensors) -> Tensor:
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
    replicas, distances = zip(*ranks_of(on, k).run(train, name), strict=True)
    expected = by_hand(name, k)
    torch.testing.assert_close(torch.stack(replicas), expected, rtol=1e-12, atol=1e-13)
    distance = float((expected - expected.mean(0)).norm()) / k**0.5
    assert distances == pytest.approx([distance] * k, rel=1e-9, abs=1e-12)


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
    ("matrix", "message"),
    [
        (torch.eye(3), "4 ranks need a mixing matrix of 4 × 4, not of 3 × 3"),
        (torch.tensor(1.0), "no dimension"),
        (torch.full((4, 4), float("nan")), "numbers that are 0 or more"),
        (torch.eye(4).roll(1, 0) * 0.5, "row 0 sums to 0.5, not 1"),
        (torch.eye(4)[[0, 0, 2, 3]], "column 0 sums to 2, not 1, so mixing would change the mean"),
    ],
)
def test_a_matrix_that_does_not_mix_is_refused(matrix, message):
    with pytest.raises(ValueError, match=message):
        check_mixing(matrix, 4)


def in_a_group() -> Tensor:
    group = dist.new_group([1, 3])
    param = torch.nn.Parameter(torch.tensor([float(dist.get_rank())], dtype=torch.float64))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], LR)
    if dist.get_rank() in (1, 3):
        gossip = Gossip(optimizer, ring_mixing(2), group)
        optimizer.add_param_group({"params": [param]})  # one that joins later is mixed, too
        with gossip:
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


# The references of assignment 08 ------------------------------------------------------------------

LINKS = [(1, 0), (1, 2), (0, 1), (2, 3), (2, 3), (1, 3)]


def test_metropolis_weights_are_doubly_stochastic_and_zero_without_a_link():
    weights = metropolis_weights(iter(LINKS), 5)
    expected = [
        *([3 / 4, 1 / 4, 0, 0, 0], [1 / 4, 1 / 4, 1 / 4, 1 / 4, 0]),
        *([0, 1 / 4, 5 / 12, 1 / 3, 0], [0, 1 / 4, 1 / 3, 5 / 12, 0], [0, 0, 0, 0, 1]),
    ]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))
    check_mixing(weights, 5)


def mixing_matrix(k: int) -> Tensor:
    """Return a matrix that is not symmetric; rank 0 of three or more ranks has no own share."""
    turn = torch.eye(k).roll(1, 1)
    return (turn + turn @ turn + torch.eye(k).flip(0)).double() / 3


def groups_of(k: int) -> list[list[int]]:
    return [[1, 2, 3], [0]] if k == 4 else [list(range(k))]


def mix_two(k: int, bad_rank: int) -> list[Tensor]:
    """Mix two tensors at once among the ranks of each group, and return the results."""
    rank = dist.get_rank()
    groups = [dist.new_group(members) for members in groups_of(k)]
    group = groups[-1 if rank == 0 else 0]
    weights = mixing_matrix(dist.get_world_size(group))
    tensors = own_tensors(rank, bad_rank)
    before = [tensor.clone() for tensor in tensors]
    finishes = [start_mixing(tensor, weights, group) for tensor in tensors]
    results = [finish() for finish in finishes]
    torch.testing.assert_close(tensors, before, rtol=0, atol=0, equal_nan=True)
    memory = {tensor.data_ptr() for tensor in (*results, *tensors)}
    assert len(memory) == 4
    return results


def own_tensors(rank: int, bad_rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    first = torch.randn(3, 2, generator=generator, dtype=torch.float64).T
    if rank == bad_rank:
        first[0, 0] = math.inf
    return [first, torch.randn((), generator=generator, dtype=torch.float64)]


@pytest.mark.parametrize(("on", "k"), WORLDS)
@pytest.mark.parametrize("bad_rank", [-1, 1])
def test_start_mixing_gives_a_row_of_the_matrix_times_all_tensors(ranks_of, on, k, bad_rank):
    results = ranks_of(on, k).run(mix_two, k, bad_rank)
    for members in groups_of(k):
        weights = mixing_matrix(len(members))
        for n in range(2):
            for me, rank in enumerate(members):
                terms = [
                    weights[me, j] * own_tensors(other, bad_rank)[n]
                    for j, other in enumerate(members)
                    if weights[me, j] or j == me
                ]
                torch.testing.assert_close(
                    results[rank][n], torch.stack(terms).sum(0), rtol=1e-14, atol=0, equal_nan=True
                )


def decentralized_steps(k: int) -> list[list[Tensor]]:
    """Take three steps; the loss of rank 0 does not use the second parameter."""
    params, history = own_params(dist.get_rank()), []
    for param in params:
        param.grad = torch.ones_like(param)
    memory = [param.data_ptr() for param in params]
    for step in range(3):

        def loss() -> Tensor:
            used = [param for i, param in enumerate(params) if i != 1 or dist.get_rank()]
            return sum((p**3).sum() for p in used) / 3

        decentralized_step(iter(params), loss, LR / (step + 1), mixing_matrix(k))
        history.append([param.detach().clone() for param in params])
    assert memory == [param.data_ptr() for param in params]
    return history


def own_params(rank: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(rank)
    drawn = [torch.rand(n, 2, generator=generator, dtype=torch.float64).T for n in (3, 1, 0)]
    return [torch.nn.Parameter(tensor) for tensor in drawn]


@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_decentralized_step_equals_its_formula(ranks_of, on, k):
    histories = ranks_of(on, k).run(decentralized_steps, k)
    w = [torch.stack(stacked) for stacked in zip(*map(own_params, range(k)), strict=True)]
    for step in range(3):
        for i, stacked in enumerate(w):
            gradient = stacked.detach() ** 2
            if i == 1:
                gradient[0] = 0
            mixed = (mixing_matrix(k) @ stacked.detach().flatten(1)).view_as(stacked)
            w[i] = mixed - LR / (step + 1) * gradient
            for rank in range(k):
                torch.testing.assert_close(histories[rank][step][i], w[i][rank], rtol=1e-13, atol=0)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
def test_the_spectral_gap_is_that_of_the_formula(k):
    ring = [abs(1 + 2 * math.cos(2 * math.pi * n / k)) / 3 for n in range(1, k)]
    assert spectral_gap(ring_mixing(k)) == pytest.approx(1 - max(ring, default=0))
    assert second_eigenvalue(ring_mixing(k)) == pytest.approx(max(ring, default=0), abs=1e-9)
    turn = torch.eye(k).roll(1, 1)  # its eigenvalues are complex, and their absolute value is 1
    assert spectral_gap(turn) == pytest.approx(float(k == 1), abs=1e-6)


def test_choose_graph_takes_the_fastest():
    ring, complete = ring_mixing(8), complete_mixing(8)
    far, slow = (10**4, 20e-3, 1e8), (10**8, 20e-6, 1e9)
    once = 20e-3 + 7 * 10**4 / 1e8
    assert choose_graph(iter([ring, complete]), *far, 1e-3) == (1, pytest.approx(once))
    all_reduce = 2 * 7 * (20e-6 + 10**8 / 8 / 1e9)
    assert choose_graph([ring, complete], *slow, 1e-3) == (None, pytest.approx(all_reduce))


@pytest.mark.parametrize(("tolerance", "steps"), [(1.0, 1), (0.5, 1), (0.3, 2), (0.25, 2)])
def test_a_power_of_the_eigenvalue_that_equals_the_tolerance_is_enough(tolerance, steps):
    half = torch.tensor([[3.0, 1], [1, 3]]) / 4
    swap = torch.tensor([[0.0, 1], [1, 0]])
    seconds = steps * (1e-3 + 10**5 / 1e9)
    chosen = choose_graph([swap, half], 10**5, 1e-3, 1e9, tolerance)
    all_reduce = 2 * (1e-3 + 10**5 / 2 / 1e9)
    assert chosen == (
        (1, pytest.approx(seconds)) if steps == 1 else (None, pytest.approx(all_reduce))
    )


def test_a_step_waits_for_the_rank_that_sends_most():
    """Columns are counted, without the rank itself: here rows have 2 others, and column 0 has 3."""
    pairs = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)) / 2
    weights = pairs @ (torch.eye(4) + torch.eye(4).roll(1, 1)) / 2
    assert (weights != 0).sum(1).tolist() == [3, 3, 3, 3]
    assert (weights != 0).sum(0).tolist() == [4, 2, 4, 2]
    index, seconds = choose_graph([weights], 10**6, 1.0, 1e9, 1.0)
    assert (index, seconds) == (0, pytest.approx(1 + 3e-3))
