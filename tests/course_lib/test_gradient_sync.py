"""Three ways to average gradients: each equal to one machine with the whole batch, at its price."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from course_lib import gradient_sync
from course_lib.bucketing import MEGABYTE
from course_lib.ddp import broadcast_module_states, verify_same_model
from course_lib.ranks import RankError, Ranks
from tests.helpers import ddp_scenarios as scenarios

STRATEGIES = {
    "per parameter": gradient_sync.sync_per_parameter,
    "flat": gradient_sync.sync_flat,
    "bucketed": gradient_sync.sync_bucketed,
}


def train(strategy: str) -> list[torch.Tensor]:
    """Start from different weights on every rank; return the weights after 5 steps."""
    net = scenarios.mlp(seed=dist.get_rank())
    broadcast_module_states(net)
    optimizer = scenarios.sgd(net)
    options = {}
    if strategy == "bucketed":
        options = {"bucket_cap_mb": 500 / MEGABYTE, "first_bucket_mb": 100 / MEGABYTE}
    for x, y in scenarios.own_shards():
        optimizer.zero_grad()
        mse_loss(net(x), y).backward()
        STRATEGIES[strategy](net.parameters(), **options)
        optimizer.step()
    return scenarios.state_of(net)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("on", "k"), scenarios.WORLDS)
def test_five_steps_equal_those_of_one_machine(ranks_of, on, k, strategy):
    scenarios.expect(
        ranks_of(on, k).run(train, strategy), scenarios.one_machine(scenarios.mlp(seed=0))
    )


@pytest.mark.parametrize(("on", "k"), [("simulated", 4), ("cpu", 2)])
def test_number_of_collectives(ranks_of, on, k):
    ranks = ranks_of(on, k)
    counts = {}
    for strategy in STRATEGIES:
        ranks.run(train, strategy)
        counts[strategy] = [ranks.trace.calls(r)["all_reduce"] for r in range(k)]
    # From the last, in bytes: 24 | 216 + 72 | 648 | 72 | 432, under caps of 100 and then 500.
    assert counts == {
        "per parameter": [6 * scenarios.STEPS] * k,
        "flat": [scenarios.STEPS] * k,
        "bucketed": [5 * scenarios.STEPS] * k,
    }


def odd_parameters(strategy: str) -> list[torch.Tensor | None]:
    rank = dist.get_rank()
    params = {
        "used": torch.ones(3),
        "on rank 1 only": torch.ones(2, 2),
        "nowhere": torch.ones(1),
        "frozen": torch.ones(4),
        "half": torch.ones(5, dtype=torch.float16),
    }
    for name, param in params.items():
        param.requires_grad_(name != "frozen")
    params["used"].grad = torch.full((3,), float(rank))
    params["half"].grad = torch.full((5,), float(rank), dtype=torch.float16)
    if rank == 1:
        params["on rank 1 only"].grad = torch.full((2, 2), 3.0)
    tied = [*params.values(), params["used"]]
    STRATEGIES[strategy](tied)
    return [param.grad for param in params.values()]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("on", ["simulated", "cpu"])
def test_missing_frozen_tied_and_half(ranks_of, on, strategy):
    for grads in ranks_of(on, 3).run(odd_parameters, strategy):
        used, partly, nowhere, frozen, half = grads
        torch.testing.assert_close(used, torch.full((3,), 1.0))
        torch.testing.assert_close(partly, torch.full((2, 2), 1.0))
        assert torch.equal(nowhere, torch.zeros(1))
        assert frozen is None
        torch.testing.assert_close(
            half, torch.full((5,), 1.0, dtype=torch.float16), rtol=2e-3, atol=0
        )


# --- states ---------------------------------------------------------------------------------------


def different(difference: str) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    if dist.get_rank() == 2:
        if difference == "shape":
            net[0] = nn.Linear(3, 5)
        elif difference == "dtype":
            net[0].double()
        elif difference == "name":
            net = nn.Sequential(nn.Linear(3, 4), nn.Identity(), nn.BatchNorm1d(4))
        elif difference == "more":
            net[1].register_buffer("mask", torch.ones(2))
        elif difference == "frozen":
            net[0].bias.requires_grad_(False)
        elif difference == "buffer":
            net[1].running_var = torch.ones(7)
    verify_same_model(net)


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ("shape", r"rank 0 has .*'0\.weight' \(4, 3\) .* rank 2 has .*'0\.weight' \(5, 3\)"),
        ("dtype", r"rank 0 has .*float32, where rank 2 has .*'0\.weight' .*float64"),
        ("name", r"rank 0 has parameter '1\.weight' .* rank 2 has parameter '2\.weight'"),
        ("more", r"rank 0 has nothing more, where rank 2 has buffer '1\.mask' \(2,\)"),
        ("frozen", r"rank 0 has .*32, where rank 2 has .*'0\.bias' .*, frozen"),
        ("buffer", r"rank 0 has .*'1\.running_var' \(4,\) .* rank 2 has .*_var' \(7,\)"),
    ],
)
def test_different_models_are_named(ranks_of, difference, message):
    with pytest.raises(RankError, match=message):
        ranks_of("simulated", 3).run(different, difference)


def of_a_sparse_gradient(strategy: str) -> None:
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    STRATEGIES[strategy](embedding.parameters())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sparse_gradient_is_refused(strategy):
    with pytest.raises(RankError, match=r"TypeError: .*sparse=False"):
        Ranks(2, on="simulated").run(of_a_sparse_gradient, strategy)
