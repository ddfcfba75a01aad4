"""Sums whose rounding does not depend on K: against exact sums, and bit for bit."""

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

from course_lib.collectives import mean_rounded_once, sum_in_one_order
from course_lib.ranks import RankError, Ranks
from tests.helpers.collective_cases import LENGTHS, WORLDS, values

# Micro-batches: 3 times a power of two.
M = 24


def numbers(rank: int, length: int) -> torch.Tensor:
    """Whole numbers below 2^8, times 2^0 to 2^8: their sums are exact in float32, not in bf16."""
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randint(-255, 256, (length,), generator=generator)
    return (whole * 2 ** (whole.abs() % 9)).bfloat16()


def means() -> list[torch.Tensor]:
    results = []
    for length in LENGTHS:
        tensor = numbers(dist.get_rank(), length)
        transposed = torch.stack([tensor, tensor]).T  # its memory is not in the order of its rows
        mean_rounded_once(tensor)
        mean_rounded_once(transposed)
        assert torch.equal(transposed[:, 1], tensor)
        results.append(tensor)
    return results


@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_the_mean_is_rounded_once(ranks_of, on, k):
    for replica in ranks_of(on, k).run(means):
        for length, result in zip(LENGTHS, replica, strict=True):
            columns = zip(*(numbers(rank, length).tolist() for rank in range(k)), strict=True)
            exact = [float(sum(map(Fraction, column)) / k) for column in columns]
            assert result.tolist() == torch.tensor(exact).float().bfloat16().tolist()


def test_it_sends_as_many_bytes_as_a_ring(ranks_of):
    ranks = ranks_of("simulated", 3)
    ranks.run(lambda: mean_rounded_once(numbers(dist.get_rank(), 102)))
    assert [ranks.trace.bytes_sent(rank) for rank in range(3)] == [2 * (2 * 102 * 2 // 3)] * 3


def own_parts(dtype: torch.dtype) -> torch.Tensor:
    """This rank's micro-batches out of M, whatever K is."""
    drawn = torch.randn(M, 5, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    return drawn.chunk(dist.get_world_size())[dist.get_rank()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_bits_do_not_depend_on_k(ranks_of, dtype):
    right = Ranks(1, on="simulated").run(lambda: sum_in_one_order(own_parts(dtype)))[0]
    exact = torch.randn(M, 5, 3, generator=torch.Generator().manual_seed(0)).to(dtype).double()
    tolerance = M * torch.finfo(dtype).eps
    torch.testing.assert_close(right.double(), exact.sum(0), rtol=tolerance, atol=tolerance)
    for on, k in [("simulated", 2), ("simulated", 4), ("simulated", 8), ("cpu", 2), ("cpu", 4)]:
        for result in ranks_of(on, k).run(lambda: sum_in_one_order(own_parts(dtype))):
            assert torch.equal(result, right), (on, k)


def test_it_keeps_its_parts_and_works_in_a_group():
    def run() -> torch.Tensor | None:
        group = dist.new_group([1, 2])
        parts = torch.stack([values(dist.get_rank(), 7)] * 2)
        before = parts.clone()
        total = sum_in_one_order(parts, group) if dist.get_rank() in (1, 2) else None
        assert torch.equal(parts, before)
        return total

    outside, *members = Ranks(3, on="simulated").run(run)
    assert outside is None
    for member in members:
        assert torch.equal(member, 2 * (values(1, 7) + values(2, 7)))


def test_three_ranks_are_no_power_of_two():
    with pytest.raises(RankError, match="3 ranks: the number of ranks must be a power of two"):
        Ranks(3, on="simulated").run(lambda: sum_in_one_order(torch.ones(2, 2)))


def test_parts_may_have_no_numbers():
    assert Ranks(2, on="simulated").run(lambda: sum_in_one_order(torch.ones(6, 0)))[1].shape == (0,)
