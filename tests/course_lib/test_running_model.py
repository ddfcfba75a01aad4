"""The running model: all exact ways train alike, and send what their formulas say."""

import functools
import sys

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from course_lib.decentralized import one_peer_mixing
from course_lib.mesh import transformer
from course_lib.ranks import Ranks
from course_lib.running_model import ROWS, SHAPE, WAYS, WORLD_SIZE, batches, measure, new_model
from course_lib.running_model.one_bit_adam import OneBitAdam
from course_lib.running_model.steps import RATES, SEEDS, TUNING_SEEDS, tries, tuned_rate
from course_lib.running_model.training import RATE, train_one_way
from tests.helpers import ROOT

PARAMETERS = sum(param.numel() for param in transformer(SHAPE).parameters())
EXACT = [name for name, way in WAYS.items() if way.like]


row_of = functools.cache(measure)


def losses_of_one_process(steps: int) -> list[float]:
    """Return the losses of the first global batches, trained with PyTorch alone."""
    model, losses = new_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for _, batch in zip(range(steps), batches(), strict=False):
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def mean_losses(way: str) -> Tensor:
    """Return the losses of three steps, the mean of the ranks that know one."""
    results = Ranks(WAYS[way].world_size, on="simulated").run(train_one_way, way, 3)
    return torch.stack([torch.stack(losses) for losses in results if losses]).mean(0)[:3]


@pytest.mark.parametrize("way", EXACT)
def test_exact_ways_have_the_losses_of_one_process(way):
    """After every step: of the ranks' rows on the mean, with a server's rank left out."""
    expected = torch.tensor(losses_of_one_process(3))
    torch.testing.assert_close(mean_losses(way), expected, rtol=1e-5, atol=0)


def test_eight_bits_are_near():
    exact, near = losses_of_one_process(3)[-1], float(mean_losses("8 bits")[-1])
    assert near != exact
    assert near == pytest.approx(exact, rel=0.05)


ONE_WAY = (WORLD_SIZE - 1) / WORLD_SIZE * 4 * PARAMETERS  # half of a ring all-reduce
ACTIVATION = 4 * ROWS * SHAPE.length * SHAPE.width
SENT = {
    "flat": 2 * ONE_WAY,
    "per parameter": 2 * ONE_WAY,
    "overlap": 2 * ONE_WAY,
    "8 bits": 2 * ONE_WAY / 4,
    "1-bit Adam": 2 * ONE_WAY / 32,
    "one average": 0,
    "gossip": 2 * 4 * PARAMETERS,
    "gossip, one peer": 4 * PARAMETERS,
    "server, waits": WORLD_SIZE * 4 * PARAMETERS,
    "ZeRO-1": 2 * ONE_WAY,
    "ZeRO-2": 2 * ONE_WAY,
    "ZeRO-3": 3 * ONE_WAY,
    # Four all-reduces in a layer: one after each half, forward and backward.
    "tensor 4": SHAPE.layers * 4 * 2 * (WORLD_SIZE - 1) / WORLD_SIZE * ACTIVATION,
    "pipeline 4": 2 * ACTIVATION,
}


@pytest.mark.parametrize("way", SENT)
def test_bytes_are_those_of_the_formulas(way):
    assert row_of(way).sent == pytest.approx(SENT[way], rel=0.02)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_one_peer_at_a_time_ends_in_the_exact_mean(k):
    mixing = one_peer_mixing(k)
    product = torch.linalg.multi_dot([torch.eye(k).double(), *(mixing(step) for step in range(3))])
    assert (mixing(5) > 0).sum(1).max() <= 2
    torch.testing.assert_close(product, torch.full((k, k), 1 / k, dtype=torch.float64))


def of_rank(rank: int, step: int) -> Tensor:
    return torch.randn(7, generator=torch.Generator().manual_seed(100 * rank + step))


def one_bit(x: Tensor, k: int) -> Tensor:
    return torch.cat([s.abs().mean() * torch.where(s < 0, -1.0, 1.0) for s in x.tensor_split(k)])


@pytest.mark.parametrize("k", [1, 3])
def test_one_bit_adam_takes_the_steps_of_its_formulas(k):
    def on_rank():
        w = torch.ones(7, requires_grad=True)
        optimizer = OneBitAdam(AdamW([w], 0.1, betas=(0.8, 0.9)), exact_steps=2)
        for step in range(5):
            w.grad = of_rank(dist.get_rank(), step)
            optimizer.step()
        return w.detach()

    w, m, v, unsent = torch.ones(7), torch.zeros(7), torch.zeros(7), torch.zeros(k + 1, 7)
    for step in range(5):
        gradients = torch.stack([of_rank(rank, step) for rank in range(k)])
        if step < 2:
            m, v = 0.8 * m + 0.2 * gradients.mean(0), 0.9 * v + 0.1 * gradients.mean(0) ** 2
        else:
            owed = 0.8 * m + 0.2 * gradients + unsent[:k]
            sent = torch.stack([one_bit(row, k) for row in owed])
            total = sent.sum(0) + unsent[k]
            unsent = torch.cat([owed - sent, (total - one_bit(total, k))[None]])
            m = one_bit(total, k) / k
        size = (v / (1 - 0.9 ** min(step + 1, 2))).sqrt() + 1e-8
        w = (1 - 0.1 * 0.01) * w - 0.1 * m / (1 - 0.8 ** (step + 1)) / size
    for trained in Ranks(k, on="simulated").run(on_rank):
        torch.testing.assert_close(trained, w)


def test_memory_is_that_of_the_parts():
    whole = row_of("flat")
    assert whole.state == 16 * PARAMETERS
    assert row_of("ZeRO-3").state == pytest.approx(whole.state / WORLD_SIZE)
    assert row_of("ZeRO-3").saved == whole.saved
    assert whole.state / WORLD_SIZE < row_of("tensor 4").state < whole.state
    assert row_of("pipeline 4").state < whole.state / 2


def test_a_function_is_measured_as_a_way_is():
    """The stages of the lectures: the same loss and bytes, and the time of the last step."""
    sys.path.append(str(ROOT / "lectures"))
    from scripts import stage_01, stage_02

    alone, together = measure(stage_01.train, "01", ranks=1), measure(stage_02.train, "02")
    assert together.loss == pytest.approx(alone.loss, abs=2e-5)
    assert (alone.sent, together.sent) == (0, pytest.approx(1.5 * 4 * PARAMETERS, rel=1e-3))
    last = max(end for _, _, _, end, _ in together.spans)
    assert last == pytest.approx(together.step_ms, rel=0.01)


def test_all_ways_were_tried_alike():
    """With each rate on the same seeds, and on all seeds with the best rate."""
    for name in (name for name, way in WAYS.items() if not way.like):
        tried = {(trial.rate, trial.seed) for trial in tries() if trial.way == name}
        assert {(rate, seed) for rate in RATES for seed in TUNING_SEEDS} <= tried
        assert {(tuned_rate(name), seed) for seed in SEEDS} <= tried
