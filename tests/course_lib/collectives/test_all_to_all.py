"""All-to-all: a matrix of chunks is transposed, for any length, dtype, K and strides."""

import pytest
import torch
import torch.distributed as dist

from course_lib.collectives import all_to_all, reduce_scatter
from course_lib.sharding import shard
from tests.helpers.collective_cases import DTYPES, LENGTHS, WORLDS
from tests.helpers.rank_values import values

CASES = [(length, dtype) for dtype in DTYPES for length in LENGTHS]


def every_case() -> list[torch.Tensor]:
    results = []
    for length, dtype in CASES:
        tensor = values(dist.get_rank(), length, dtype)
        results.append(all_to_all(tensor))
        assert torch.equal(tensor, values(dist.get_rank(), length, dtype))  # left alone
        assert torch.equal(results[-1].sum(0).to(dtype), reduce_scatter(tensor))
    return results


@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_row_s_is_what_rank_s_had_for_this_rank(ranks_of, on, k):
    for rank, results in enumerate(ranks_of(on, k).run(every_case)):
        for (length, dtype), result in zip(CASES, results, strict=True):
            expected = [shard(values(r, length, dtype), k, rank) for r in range(k)]
            assert torch.equal(result, torch.stack(expected))
