"""All-to-all: a matrix of chunks is transposed, for any length, dtype, K and strides."""

import pytest
import torch
import torch.distributed as dist

from course_lib.collectives import all_to_all, reduce_scatter
from course_lib.sharding import shard
from tests.helpers.collective_cases import DTYPES, LENGTHS, WORLDS
from tests.helpers.rank_values import values
from tests.helpers.tiers import in_tiers

CASES = [(length, dtype) for dtype in DTYPES for length in LENGTHS]


def every_case() -> list[torch.Tensor]:
    results = []
    for length, dtype in CASES:
        tensor = values(dist.get_rank(), length, dtype)
        results.append(all_to_all(tensor))
        assert torch.equal(tensor, values(dist.get_rank(), length, dtype))  # left alone
        assert torch.equal(results[-1].sum(0).to(dtype), reduce_scatter(tensor))
    return results


@pytest.mark.parametrize(("on", "k"), in_tiers(WORLDS))
def test_row_s_is_what_rank_s_had_for_this_rank(ranks_of, on, k):
    for rank, results in enumerate(ranks_of(on, k).run(every_case)):
        for (length, dtype), result in zip(CASES, results, strict=True):
            expected = [shard(values(r, length, dtype), k, rank) for r in range(k)]
            assert torch.equal(result, torch.stack(expected))


def like_the_library() -> bool:
    matrix = values(dist.get_rank(), 20).view(5, 4).T  # not contiguous, and 4 · 5 elements
    theirs = torch.empty(20)
    dist.all_to_all_single(theirs, matrix.contiguous())
    return torch.equal(all_to_all(matrix), theirs.view(4, 5))


@pytest.mark.parametrize("on", ["simulated", "cpu"])
def test_it_does_what_pytorch_s_does(ranks_of, on):
    assert ranks_of(on, 4).run(like_the_library) == [True] * 4


def test_it_sends_to_everybody_a_kth(ranks_of):
    ranks = ranks_of("simulated", 5)
    ranks.run(lambda: all_to_all(torch.ones(100)))
    for rank in range(5):
        assert ranks.trace.bytes_sent(rank) == 4 * 80
        assert ranks.trace.peers(rank) == set(range(5)) - {rank}


def in_a_group() -> torch.Tensor | None:
    group = dist.new_group([1, 3])
    return all_to_all(values(dist.get_rank(), 5), group) if dist.get_rank() in (1, 3) else None


@pytest.mark.parametrize("on", ["simulated", "cpu"])
def test_in_a_group(ranks_of, on):
    results = ranks_of(on, 4).run(in_a_group)
    assert torch.equal(results[3], torch.stack([values(r, 5)[3:] for r in (1, 3)]))
