"""All-reduces by hand: the sum, the same bits everywhere, and no more bytes than it takes.

Inputs are small whole numbers, so that all orders of addition give the same bits in every dtype
and results can be compared exactly; another test checks with random numbers that the ranks agree
bit for bit. The same function runs on simulated ranks and on gloo's.
"""

import pytest
import torch
import torch.distributed as dist

from course_lib import collectives
from tests.helpers.collective_cases import ALL_REDUCES, DTYPES, LENGTHS, WORLDS, total, values

CASES = [(n, torch.float32) for n in LENGTHS] + [(37, dtype) for dtype in DTYPES]


def all_lengths_and_dtypes() -> list[torch.Tensor]:
    results = []
    for name in ALL_REDUCES:
        for length, dtype in CASES:
            tensor = values(dist.get_rank(), length, dtype)
            address = tensor.data_ptr()
            assert getattr(collectives, name)(tensor) is None
            assert tensor.data_ptr() == address
            results.append(tensor)
    return results


@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_all_reduce_gives_everyone_the_sum(ranks_of, on, k):
    expected = [total(list(range(k)), length, dtype) for length, dtype in CASES]
    cases = [(name, *case) for name in ALL_REDUCES for case in zip(CASES, expected, strict=True)]
    for replica in ranks_of(on, k).run(all_lengths_and_dtypes):
        for result, (name, case, right) in zip(replica, cases, strict=True):
            assert torch.equal(result, right), (name, case)


def random_numbers() -> list[torch.Tensor]:
    results = []
    for name in ALL_REDUCES:
        tensor = torch.randn(1001, generator=torch.Generator().manual_seed(dist.get_rank()))
        getattr(collectives, name)(tensor)
        results.append(tensor)
    return results


@pytest.mark.parametrize(("on", "k"), [("simulated", 5), ("simulated", 8), ("cpu", 3), ("cpu", 4)])
def test_ranks_agree_bit_for_bit(ranks_of, on, k):
    replicas = ranks_of(on, k).run(random_numbers)
    summands = [torch.randn(1001, generator=torch.Generator().manual_seed(r)) for r in range(k)]
    in_order, exact = sum(summands), sum(summand.double() for summand in summands)
    for name, first, *copies in zip(ALL_REDUCES, *replicas, strict=True):
        torch.testing.assert_close(first.double(), exact, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(first, other) for other in copies), name
        if name in ("direct_all_reduce", "one_shot_all_reduce"):
            assert torch.equal(first, in_order), name
