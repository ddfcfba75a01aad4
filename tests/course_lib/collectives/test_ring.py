"""The two halves of a ring all-reduce, reduce-scatter and all-gather, alone."""

import pytest
import torch
import torch.distributed as dist

from course_lib import collectives
from course_lib.sharding import shard_bounds
from tests.helpers.collective_cases import LENGTHS, WORLDS, total
from tests.helpers.rank_values import values


def halves_of_the_ring() -> list[tuple[torch.Tensor, torch.Tensor]]:
    rank, k = dist.get_rank(), dist.get_world_size()
    results = []
    for length in LENGTHS:
        whole = values(rank, length)
        chunk = collectives.reduce_scatter(whole)
        assert chunk.numel() == 0 or chunk.data_ptr() == whole[slice(*_mine(length))].data_ptr()
        start, stop = shard_bounds(length, k, rank)
        parts = torch.full((length,), float("nan"))
        parts[start:stop] = values(rank, length)[start:stop]
        collectives.all_gather(parts)
        results.append((chunk.clone(), parts))
    return results


def _mine(length: int) -> tuple[int, int]:
    return shard_bounds(length, dist.get_world_size(), dist.get_rank())


@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_reduce_scatter_and_all_gather(ranks_of, on, k):
    for rank, results in enumerate(ranks_of(on, k).run(halves_of_the_ring)):
        for length, (chunk, gathered) in zip(LENGTHS, results, strict=True):
            start, stop = shard_bounds(length, k, rank)
            assert torch.equal(chunk, total(list(range(k)), length)[start:stop])
            expected = [values(r, length)[slice(*shard_bounds(length, k, r))] for r in range(k)]
            assert torch.equal(gathered, torch.cat(expected))
