"""The choice by size: right sums whatever is chosen, the same choice everywhere."""

import pytest
import torch
import torch.distributed as dist

from course_lib.collectives import TunedAllReduce
from course_lib.collectives.tuned import ALGORITHMS
from course_lib.cost_model import Link, fastest_all_reduce
from course_lib.gradient_sync import sync_flat
from course_lib.ranks import RankError, Ranks

LENGTHS = [0, 1, 100, 3000, 70_000]
LINK = Link(1e-3, 1e7)


def chosen(link: Link | None) -> tuple[list[str], list[torch.Tensor], torch.Tensor]:
    tuned = TunedAllReduce(network=link, sizes=(1 << 8, 1 << 12, 1 << 18), repeats=3)
    tensors = [torch.full((length,), dist.get_rank() + 1.0) for length in LENGTHS]
    for tensor in tensors:
        tuned(tensor)
    param = torch.ones(5, requires_grad=True)
    param.grad = torch.full((5,), float(dist.get_rank()))
    sync_flat([param], all_reduce=tuned)
    for times in tuned.times.values():
        assert set(times) == set(ALGORITHMS) and all(0 < t < 10 for t in times.values())
        best = tuned.choice(next(n for n, t in tuned.times.items() if t is times))
        assert times[best] == min(times.values())
    return [tuned.choice(4 * length) for length in LENGTHS], tensors, param.grad


@pytest.mark.parametrize(
    ("on", "k", "link"),
    [("cpu", 3, None), ("simulated", 2, None), *[("simulated", k, LINK) for k in (1, 2, 3, 4)]],
)
def test_all_ranks_choose_alike_and_get_the_sum(on, k, link):
    with Ranks(k, on=on, timeout=60) as ranks:
        results = ranks.run(chosen, link)
    for names, tensors, gradient in results:
        assert names == results[0][0]
        if link:
            assert names == [fastest_all_reduce(4 * length, k, link) for length in LENGTHS]
        for tensor, length in zip(tensors, LENGTHS, strict=True):
            assert torch.equal(tensor, torch.full((length,), k * (k + 1) / 2))
        torch.testing.assert_close(gradient, torch.full((5,), (k - 1) / 2))


def for_another_group() -> None:
    tuned = TunedAllReduce(network=LINK)
    tuned(torch.ones(1), dist.group.WORLD)  # all ranks are all ranks
    tuned(torch.ones(1), dist.new_group([0, 1]))


def test_mistakes_are_named():
    with pytest.raises(RankError, match="tuned for another group"):
        Ranks(2, on="simulated").run(for_another_group)
    with pytest.raises(RankError, match="at least once"):
        Ranks(2, on="simulated").run(lambda: TunedAllReduce(repeats=0))
    with pytest.raises(RankError, match="at least one size"):
        Ranks(2, on="simulated").run(lambda: TunedAllReduce(sizes=()))
