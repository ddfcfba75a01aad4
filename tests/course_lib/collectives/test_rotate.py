"""A rotation: every rank gets its left neighbour's tensor, in any group, dtype and layout."""

import pytest
import torch
import torch.distributed as dist

from course_lib.collectives import rotate
from tests.helpers.collective_cases import DTYPES, WORLDS
from tests.helpers.rank_values import values

SHAPES = [(0,), (), (5,), (4, 3)]
CASES = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]


def tensor_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return values(rank, torch.Size(shape).numel(), dtype).view(shape)


def every_case() -> list[torch.Tensor]:
    results = []
    for shape, dtype in CASES:
        tensor = tensor_of(dist.get_rank(), shape, dtype)
        laid_out = tensor.T.contiguous().T if tensor.dim() == 2 else tensor
        result = rotate(laid_out)
        assert torch.equal(laid_out, tensor) and result.is_contiguous()
        assert not tensor.numel() or result.data_ptr() != laid_out.data_ptr()
        results.append(result)
    return results


@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_each_rank_gets_what_the_rank_before_it_had(ranks_of, on, k):
    for rank, results in enumerate(ranks_of(on, k).run(every_case)):
        for case, result in zip(CASES, results, strict=True):
            assert torch.equal(result, tensor_of((rank - 1) % k, *case))
            assert result.dtype == case[1] and result.shape == case[0]
