"""One to all and all to one: every collective with a root, from every root."""

import pytest
import torch
import torch.distributed as dist

from course_lib import collectives
from tests.helpers.collective_cases import BROADCASTS, LENGTHS, WORLDS, total
from tests.helpers.rank_values import values


def every_root(*names: str) -> list[torch.Tensor]:
    results = []
    for name in names:
        for length in LENGTHS:
            for root in range(dist.get_world_size()):
                tensor = values(dist.get_rank(), length)
                getattr(collectives, name)(tensor, root)
                results.append(tensor)
    return results


@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_broadcast_copies_the_root_s(ranks_of, on, k):
    expected = [values(root, length) for length in LENGTHS for root in range(k)]
    for replica in ranks_of(on, k).run(every_root, *BROADCASTS):
        for result, right in zip(replica, expected * len(BROADCASTS), strict=True):
            assert torch.equal(result, right)


@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_reduce_leaves_the_sum_at_the_root(ranks_of, on, k):
    replicas = ranks_of(on, k).run(every_root, "reduce")
    cases = [(length, root) for length in LENGTHS for root in range(k)]
    for case, (length, root) in enumerate(cases):
        assert torch.equal(replicas[root][case], total(list(range(k)), length))
