"""The three functions of assignment 05: gradients equal those of one process with all rows."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.ddp.functions import data_parallel, hook_buckets, send_bucket
from tests.helpers.ddp_scenarios import WORLDS

pytestmark = pytest.mark.parametrize(("on", "k"), WORLDS)


def drawn(k: int, batches: int):
    g = torch.Generator().manual_seed(k)
    rows = [[torch.randn(3 + b, 4, generator=g) for b in range(batches)] for _ in range(k)]
    return [[x.double() for x in xs] for xs in rows]


class Odd(nn.Module):
    """Its first layer is used twice, one is frozen, one has another dtype, and one is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.frozen, self.unused = (nn.Linear(4, 4).double() for _ in range(3))
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(4, 2)

    def forward(self, x, skips: bool = False):
        hidden = self.first(self.frozen(self.first(x)).tanh())
        return hidden.sum() if skips else self.last(hidden.float()).sum()


def in_one_process(rows, skips: int = -1):
    model = Odd()
    for rank, xs in enumerate(rows):
        for x in xs:
            model(x, skips=rank == skips).backward()
    params = [param for param in model.parameters() if param.requires_grad]
    sums = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    return [total / len(rows) for total in sums]


def expect_equal(replicas, expected) -> None:
    for gradients in replicas:
        torch.testing.assert_close(gradients, expected)


def one_bucket(rows):
    model = Odd()
    model(rows[dist.get_rank()][0]).backward()
    params = [*model.first.parameters(), *model.unused.parameters()]
    send_bucket(iter(params))()
    return [param.grad for param in params if param.grad is not None]


def test_a_bucket_gets_the_mean(ranks_of, on, k):
    rows = drawn(k, 1)
    means = in_one_process(rows)
    expect_equal(ranks_of(on, k).run(one_bucket, rows), means[:4])


def two_steps(rows):
    model, rank = Odd(), dist.get_rank()
    finish = hook_buckets(
        [[*model.last.parameters()], [*model.unused.parameters()], [*model.first.parameters()]]
    )
    steps = []
    for skips in (-1, dist.get_world_size() - 1):
        model(rows[rank][0], skips=rank == skips).backward()
        finish()
        steps.append([param.grad for param in model.parameters() if param.grad is not None])
        model.zero_grad()
    return steps


def test_hooked_buckets_in_two_steps_of_which_one_rank_skips_a_layer(ranks_of, on, k):
    rows = drawn(k, 1)
    first, second = zip(*ranks_of(on, k).run(two_steps, rows), strict=True)
    expect_equal(first, in_one_process(rows))
    expect_equal(second, in_one_process(rows, skips=k - 1))


def accumulated(rows):
    model = Odd()
    *local, last = rows[dist.get_rank()]
    finish, no_sync = data_parallel((p for p in model.parameters()), cap=100, first_cap=40)
    for x in local:
        with pytest.raises(ZeroDivisionError), no_sync():
            with no_sync():
                pass
            model(x).backward()
            raise ZeroDivisionError
    model(last).backward()
    finish()
    return [param.grad for param in model.parameters() if param.grad is not None]


def test_data_parallel_sends_the_sums_of_three_micro_batches_once(ranks_of, on, k):
    rows, ranks = drawn(k, 3), ranks_of(on, k)
    expect_equal(ranks.run(accumulated, rows), in_one_process(rows))
    # In bytes, from the last layer: 8 + 32 of float32; then 32, 128, 32 and 128 of float64.
    sizes = [event.bytes for event in ranks.trace.operations if event.rank == 0]
    assert sizes == [40, 32, 128, 32, 128]
