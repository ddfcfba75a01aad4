"""ShardedOptimizer: the steps of one process, with one K-th of its state."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.ddp import DistributedDataParallel
from course_lib.ranks import RankError
from course_lib.sharded_optimizer import ShardedOptimizer, sharded_optimizer
from tests.helpers import zero_scenarios as scenarios
from tests.helpers.ddp_scenarios import WORLDS

WHO = ["averaged", "local", "sharded"]
ALL_STEPS = slice(None)


def train(name: str, mode, steps: slice = ALL_STEPS, groups: bool = False, saved=None):
    """Return the weights after these steps, and what to save; go on from what was `saved`."""
    net = scenarios.Awkward(seed=5 if saved else 0)
    cls, options = scenarios.OPTIMIZERS[name]
    options = {"gradients": mode, "bucket_cap_mb": 3e-4, **options}
    optimizer = ShardedOptimizer(scenarios.groups_of(net, groups), cls, **options)
    if saved:
        net.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    scenarios.run_steps(net, optimizer, scenarios.batches()[steps], mode == "averaged")
    state = {name: value.clone() for name, value in net.state_dict().items()}
    return scenarios.weights(net), (state, optimizer.state_dict())


@pytest.mark.parametrize("mode", WHO)
@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_weights_equal_those_of_one_process(ranks_of, on, k, mode):
    for name in scenarios.OPTIMIZERS:
        replicas = [weights for weights, _ in ranks_of(on, k).run(train, name, mode)]
        expected = scenarios.weights(scenarios.one_process(name)[0])
        for replica in replicas:
            scenarios.assert_equal(replica, expected)
            assert all(map(torch.equal, replica, replicas[0]))


def fewer_elements_than_ranks() -> Tensor:
    param = nn.Parameter(torch.ones(2))
    optimizer = ShardedOptimizer([param, nn.Parameter(torch.ones(0))], torch.optim.Adam, lr=0.5)
    param.grad = torch.ones(2)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    return param.detach()


def test_fewer_elements_than_ranks(ranks_of):
    for param in ranks_of("simulated", 4).run(fewer_elements_than_ranks):
        torch.testing.assert_close(param, torch.zeros(2), atol=1e-6, rtol=0)


# --- used as any optimizer --------------------------------------------------------------------


def unused(mode) -> tuple[list[Tensor], float]:
    """Rank 1's loss uses the second parameter only, rank 2's none."""
    params = [nn.Parameter(torch.ones(5)) for _ in range(2)]
    optimizer = ShardedOptimizer(
        params, torch.optim.SGD, gradients=mode, lr=1.0, bucket_cap_mb=1e-9
    )
    loss = sum(p.sum() for p in params[dist.get_rank() :])
    if isinstance(loss, Tensor):
        loss.backward()
    return [param.detach() for param in params], float(optimizer.step(lambda: 7.0))


@pytest.mark.parametrize("mode", ["local", "sharded"])
def test_what_a_rank_did_not_use_counts_as_zero(ranks_of, mode):
    for (first, second), returned in ranks_of("simulated", 3).run(unused, mode):
        torch.testing.assert_close(first, torch.full((5,), 1 - 1 / 3))
        torch.testing.assert_close(second, torch.full((5,), 1 - 2 / 3))
        assert returned == 7


def sharded(*, of: type = torch.optim.SGD, **options) -> ShardedOptimizer:
    return ShardedOptimizer(scenarios.Awkward().parameters(), of, **options)


def of_a_sparse_gradient() -> None:
    embedding = nn.Embedding(3, 2, sparse=True)
    optimizer = ShardedOptimizer(embedding.parameters(), torch.optim.SGD)
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda: sharded(of=torch.optim.LBFGS), "LBFGS needs whole tensors"),
        (lambda: sharded(gradients="mean"), '"averaged", "local" or "sharded"'),
        (lambda: sharded().add_param_group({"params": [torch.ones(1)]}), "give all groups"),
        (of_a_sparse_gradient, "sparse=False"),
    ],
)
def test_errors_say_what_to_do(ranks_of, program, message):
    with pytest.raises(RankError, match=message):
        ranks_of("simulated", 2).run(program)


# --- states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (1, 4)])
@pytest.mark.parametrize("name", scenarios.OPTIMIZERS)
def test_a_run_goes_on_with_another_number_of_ranks(ranks_of, name, before, after):
    first, rest = slice(3), slice(3, None)
    _, saved = ranks_of("simulated", before).run(train, name, "averaged", first, True)[0]
    expected = scenarios.weights(scenarios.one_process(name, groups=True)[0])
    results = ranks_of("simulated", after).run(train, name, "sharded", rest, True, saved)
    for replica, _ in results:
        scenarios.assert_equal(replica, expected)


# --- complex parameters ---------------------------------------------------------------------------


def complex_layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 5, dtype=torch.complex128)


def complex_loss(net: nn.Module, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(4, 3, generator=generator, dtype=torch.complex128)
    return net(x).abs().square().mean()


def clipped(gradients: str) -> tuple[Tensor, Tensor]:
    net = complex_layer()
    optimizer = ShardedOptimizer(net.parameters(), torch.optim.SGD, gradients=gradients, lr=0.1)
    wrapped = DistributedDataParallel(net) if gradients == "averaged" else net
    complex_loss(wrapped, dist.get_rank()).backward()
    norm = optimizer.clip_grad_norm_(0.1)
    optimizer.step()
    return norm, net.weight.detach()


@pytest.mark.parametrize("gradients", ["averaged", "local", "sharded"])
def test_complex_gradients_are_clipped_as_in_one_process(ranks_of, gradients):
    net = complex_layer()
    (sum(complex_loss(net, rank) for rank in range(3)) / 3).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    for replica in ranks_of("simulated", 3).run(clipped, gradients):
        torch.testing.assert_close(replica, (norm, net.weight.detach()))


# --- ZeRO-1 in one page ---------------------------------------------------------------------------


STEPS, FROZEN, UNUSED = 3, 1, 4
SHAPES = ((3, 2), (4,), (), (0,), (2, 2))


def draw(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(w, i != FROZEN) for i, w in enumerate(draw(0))]


def train_minimal(name: str) -> list[Tensor]:
    """Train in a group of all ranks but the last one, which is alone in another."""
    k, rank, params = dist.get_world_size(), dist.get_rank(), parameters()
    groups = [dist.new_group(members) for members in ([*range(k - 1)] or [0], [k - 1])]
    cls, options = scenarios.OPTIMIZERS[name]
    tied = (param for param in [*params, params[2], params[0]])
    memory = [param.data_ptr() for param in params]
    step = sharded_optimizer(tied, lambda chunk: cls(chunk, **options), groups[rank == k - 1 > 0])
    for number in range(STEPS):
        for i, gradient in enumerate(draw(1 + STEPS * rank + number)):
            unused = i == UNUSED and rank == number  # on one rank at a time
            params[i].grad = None if i == FROZEN or unused else gradient
        step()
    assert [param.data_ptr() for param in params] == memory
    return [param.detach() for param in params]


def mean_in_one_process(name: str, ranks: list[int]) -> list[Tensor]:
    cls, options = scenarios.OPTIMIZERS[name]
    params = parameters()
    optimizer = cls([p for i, p in enumerate(params) if i != FROZEN], **options)
    for number in range(STEPS):
        by_rank = [draw(1 + STEPS * rank + number) for rank in ranks]
        for rank, gradients in zip(ranks, by_rank, strict=True):
            gradients[UNUSED] *= rank != number
        for param, gradients in zip(params, zip(*by_rank, strict=True), strict=True):
            param.grad = torch.stack(gradients).mean(0)
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("name", scenarios.OPTIMIZERS)
@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_the_minimal_version_takes_the_steps_of_one_process(ranks_of, on, k, name):
    for rank, replica in enumerate(ranks_of(on, k).run(train_minimal, name)):
        members = [rank] if rank == k - 1 else [*range(k - 1)]
        scenarios.assert_equal(replica, mean_in_one_process(name, members))
