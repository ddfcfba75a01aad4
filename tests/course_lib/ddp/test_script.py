"""What stands around DDP, by hand: the same numbers as one process that has all rows."""

import io

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from course_lib.ddp import script
from tests.helpers.ddp_scenarios import mlp

pytestmark = pytest.mark.parametrize("k", (1, 2, 3, 4))
ROWS = 13
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def rows(seed: int = 0, count: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return x, torch.randn(count, 3, generator=generator, dtype=torch.float64)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def stepped(model: nn.Module, loss: Tensor, lr: float) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def test_the_batches_are_those_of_pytorchs_sampler(ranks_of, k):
    for rank, batches in enumerate(ranks_of("simulated", k).run(script.own_batches, ROWS, 3, 2, 5)):
        sampler = DistributedSampler(range(ROWS), k, rank, seed=5)
        sampler.set_epoch(2)
        assert batches == list(BatchSampler(sampler, 3, drop_last=False))


def test_training_equals_one_process(ranks_of, k):
    x, y = rows()

    def run() -> tuple[list[Tensor], list[float]]:
        model = mlp(seed=dist.get_rank())
        losses = script.train(model, F.mse_loss, x, y, 0.1, 2, 2, iter([0, 3]), 1)
        return weights_of(model), losses

    alone, expected = mlp(seed=0), []
    for epoch in (0, 3):
        samplers = [DistributedSampler(range(ROWS), k, rank, seed=1) for rank in range(k)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        shards = [list(sampler) for sampler in samplers]
        for start in range(0, len(shards[0]), 4):
            window = [row for shard in shards for row in shard[start : start + 4]]
            expected.append(stepped(alone, F.mse_loss(alone(x[window]), y[window]), 0.1))
    for weights, losses in ranks_of("simulated", k).run(run):
        torch.testing.assert_close(weights, weights_of(alone), **CLOSE)
        assert losses == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("count", (ROWS, 2))
def test_an_evaluation_counts_each_row_once(ranks_of, k, count):
    x, scores = rows(count=count)
    y = scores.argmax(1)
    model = mlp()
    model.eval()
    expected = F.cross_entropy(model(x), y).item(), (model(x).argmax(1) == y).double().mean().item()

    def run() -> tuple[tuple[float, float], bool]:
        replica = mlp()
        return script.evaluate(replica, F.cross_entropy, x, y, 3), replica.training

    for result, training in ranks_of("simulated", k).run(run):
        assert result == pytest.approx(expected, rel=1e-10)
        assert training


def test_a_run_goes_on_with_the_state_that_it_saved(ranks_of, k):
    x, y = rows()

    def run() -> tuple[bool, int, list[Tensor], list[Tensor]]:
        model, first = mlp(), dist.get_rank() == 0
        optimizer = torch.optim.AdamW(model.parameters())
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        file = io.BytesIO()
        script.save_checkpoint(file, DistributedDataParallel(model), optimizer, 7)
        wrote = bool(file.getvalue())
        file.seek(0)
        other = mlp(seed=1 + dist.get_rank())
        again = torch.optim.AdamW(other.parameters(), lr=0.5)
        epoch = script.load_checkpoint(file if first else None, other, again)
        for net, chosen in ((model, optimizer), (other, again)):
            net.zero_grad()
            F.mse_loss(net(x), y).backward()
            chosen.step()
        return wrote, epoch, weights_of(model), weights_of(other)

    for rank, (wrote, epoch, saved, loaded) in enumerate(ranks_of("simulated", k).run(run)):
        assert (wrote, epoch) == (rank == 0, 7)
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)


@pytest.mark.parametrize("trained", (2, 6), ids=("small", "clipped"))
def test_a_mean_over_tokens_is_clipped_once(ranks_of, k, trained):
    def tokens_of(rank: int) -> list[tuple[Tensor, Tensor]]:
        pairs = []
        for n in range(rank + 1):  # rank r has r + 1 micro-batches; the last rank has no labels
            x = rows(10 * rank + n, count=4 + n)[0] * (30 if trained > 2 else 0.1)
            labels = torch.zeros(len(x), dtype=torch.int64)
            labels[:: 1 if rank == k - 1 and k > 1 else 3] = script.UNLABELLED
            pairs.append((x, labels))
        return pairs

    def partly_frozen() -> nn.Module:
        net = mlp()
        for param in list(net.parameters())[trained:]:
            param.requires_grad_(False)
        return net

    def run() -> tuple[float, list[Tensor]]:
        model = DistributedDataParallel(partly_frozen())
        loss = script.token_mean_step(model, tokens_of(dist.get_rank()))
        return loss, [param.grad for param in model.parameters()]

    pairs = [pair for rank in range(k) for pair in tokens_of(rank)]
    x, y = (torch.cat(column) for column in zip(*pairs, strict=True))
    alone = partly_frozen()
    expected = F.cross_entropy(alone(x), y)
    expected.backward()
    norm = nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    assert (float(norm) > 1) == (trained > 2)
    for loss, gradients in ranks_of("simulated", k).run(run):
        assert loss == pytest.approx(expected.item(), rel=1e-10)
        torch.testing.assert_close(gradients, [p.grad for p in alone.parameters()], **CLOSE)


def test_scripts_train_as_one_process(ranks_of, k):
    batches = [[rows(10 * rank + step, count=4) for step in range(3)] for rank in range(k)]

    def run() -> tuple[list[Tensor], list[Tensor], Tensor]:
        own_batches, plain = batches[dist.get_rank()], mlp()
        script.train_on_batches(plain, F.mse_loss, iter(own_batches), 0.1)
        model = nn.Sequential(nn.BatchNorm1d(6), mlp()).double()
        predicted = script.train_and_predict(model, F.mse_loss, iter(own_batches), rows(99)[0], 0.1)
        assert model.training
        torch.testing.assert_close(predicted, model.eval()(rows(99)[0]))
        return weights_of(plain), [*weights_of(model), *model.buffers()], predicted

    alone = mlp()
    for step in zip(*batches, strict=True):
        x, y = (torch.cat(column) for column in zip(*step, strict=True))
        stepped(alone, F.mse_loss(alone(x), y), 0.1)
    norm = nn.BatchNorm1d(6).double()  # of rank 0's rows alone
    for x, _ in batches[0]:
        norm(x)
    results = ranks_of("simulated", k).run(run)
    for weights, state, predicted in results:
        torch.testing.assert_close(weights, weights_of(alone), **CLOSE)
        torch.testing.assert_close(state[-3:], list(norm.buffers()), **CLOSE)
        torch.testing.assert_close([state, predicted], list(results[0][1:]), rtol=0, atol=0)
