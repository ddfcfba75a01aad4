"""C(Σ C(g)) on ranks: the bits that one process computes, the bytes that the formula says."""

import math
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from course_lib.collectives import ring_all_reduce
from course_lib.compression import ErrorFeedback, Uniform8Bit, compressed_all_reduce
from course_lib.compression.all_reduce import sum_by_codec
from course_lib.compression.uniform_8bit import dequantize
from course_lib.sharding import shard, shard_bounds
from tests.helpers.compressors import EVERY, PLAIN, halves

WORLDS = [("simulated", k) for k in (1, 2, 3, 4, 5)] + [("cpu", k) for k in (1, 2, 3, 4)]
LENGTHS = (0, 1, 3, 8, 1001)
LINEAR = {"random-k", "random-k, scaled", "PowerSGD"}
STEPS = 3


def gradient(rank: int, length: int, step: int):
    generator = torch.Generator().manual_seed(10_000 * step + 100 * length + rank)
    return torch.randn(length, generator=generator)


def steps(make, dtype: torch.dtype = torch.float32):
    """Return, by length and step, what this rank holds afterwards."""
    compressor = ErrorFeedback(make())
    results = []
    for length in LENGTHS:
        for step in range(STEPS):
            tensor = gradient(dist.get_rank(), length, step).to(dtype)
            compressed_all_reduce(tensor, compressor, key=length, all_reduce=ring_all_reduce)
            results.append(tensor)
    return results


def in_one_process(make, k: int):
    """The same from its definition, with every rank's residual."""
    results = []
    for length in LENGTHS:
        senders = [ErrorFeedback(make()) for _ in range(k)]
        summers = [ErrorFeedback(make()) for _ in range(k)]
        for step in range(STEPS):
            gradients = [gradient(rank, length, step) for rank in range(k)]
            parts = []
            for owner in range(k):
                total = torch.zeros(shard(gradients[0], k, owner).numel())
                for sender, own_gradient in zip(senders, gradients, strict=True):
                    payload = sender.encode(shard(own_gradient, k, owner), owner)
                    total += sender.decode(payload)
                parts.append(summers[owner].decode(summers[owner].encode(total)))
            results.append(torch.cat(parts))
    return results


@pytest.mark.parametrize(("on", "k"), WORLDS)
@pytest.mark.parametrize("name", sorted(set(PLAIN) - LINEAR))
def test_the_bits_of_one_process(ranks_of, on: str, k: int, name: str) -> None:
    expected = in_one_process(PLAIN[name], k)
    for results in ranks_of(on, k).run(steps, PLAIN[name]):
        torch.testing.assert_close(results, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("on", "k"), WORLDS)
@pytest.mark.parametrize("name", sorted(LINEAR))
def test_a_linear_compressor_compresses_the_sum(ranks_of, on: str, k: int, name: str) -> None:
    """As one process would that had the sum of the gradients, residuals included."""
    compressor = ErrorFeedback(EVERY[name]())
    expected = []
    for length in LENGTHS:
        for step in range(STEPS):
            total = sum((gradient(rank, length, step) for rank in range(k)), torch.zeros(length))
            expected.append(compressor.decode(compressor.encode(total, length)))
    replicas = ranks_of(on, k).run(steps, EVERY[name])
    for results in replicas:
        torch.testing.assert_close(results, expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(results, replicas[0], rtol=0, atol=0)


def one_step(name: str, length: int):
    tensor = gradient(dist.get_rank(), length, 0)
    compressed_all_reduce(tensor, EVERY[name]())
    return tensor


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("name", sorted(set(EVERY) - LINEAR))
def test_the_network_carries_what_the_formula_says(ranks_of, k: int, name: str) -> None:
    ranks = ranks_of("simulated", k)
    for length in (0, 1, 13, 1000):
        results = ranks.run(one_step, name, length)
        assert all(torch.equal(result, results[0]) for result in results)
        compressor = EVERY[name]()
        shards = [stop - start for start, stop in (shard_bounds(length, k, r) for r in range(k))]
        for rank in range(k):
            sent = ranks.trace.bytes_sent(rank)
            to_others = sum(compressor.nbytes(n) for r, n in enumerate(shards) if r != rank)
            assert sent == to_others + (k - 1) * compressor.nbytes(shards[rank]), length


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["top-k", "one bit", "uniform, nearest", "PowerSGD"])
def test_other_dtypes(ranks_of, dtype: torch.dtype, name: str) -> None:
    results = ranks_of("cpu", 3).run(steps, PLAIN[name], dtype)
    for tensors in zip(*results, strict=True):
        assert all(tensor.dtype == dtype and torch.equal(tensor, tensors[0]) for tensor in tensors)


def sums_of_two_functions() -> bool:
    x = gradient(dist.get_rank(), 1001, 0)
    total = x.clone()
    compressed_all_reduce(total, PLAIN["codec"]())
    sum_by_codec(x, halves, dequantize)
    return torch.equal(x, total)


def test_sum_by_codec_takes_the_two_functions_of_a_codec(ranks_of) -> None:
    assert all(ranks_of("simulated", 3).run(sums_of_two_functions))


def in_groups():
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    tensor = gradient(rank, 50, 0).view(5, 10).T  # not contiguous
    compressed_all_reduce(tensor, Uniform8Bit(), pairs[rank in (1, 2)])
    return tensor, gradient(rank, 50, 0)


@pytest.mark.parametrize("on", ["simulated", "cpu"])
def test_in_a_group_and_with_strides(ranks_of, on: str) -> None:
    results = ranks_of(on, 4).run(in_groups)
    for pair in ((0, 3), (1, 2)):
        exact = sum(results[rank][1] for rank in pair).view(5, 10).T
        for rank in pair:
            torch.testing.assert_close(results[rank][0], exact, rtol=0, atol=0.1)
            assert torch.equal(results[rank][0], results[pair[0]][0])


def one_overflow(name: str, bad: float):
    """Return the results of five steps, residuals after the second, in which rank 1 overflows."""
    compressor, results, residuals = ErrorFeedback(EVERY[name]()), [], []
    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always")
        for step in range(5):
            tensor = gradient(dist.get_rank(), 1000, step)
            if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
                tensor[123] = bad
            compressed_all_reduce(tensor, compressor, key="w")
            results.append(tensor)
            if step == 1:
                residuals = [residual.clone() for residual in compressor.residuals.values()]
    return results, residuals, [str(notice.message) for notice in notices]


@pytest.mark.parametrize(("on", "k"), [("simulated", 1), ("simulated", 4), ("cpu", 3)])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("name", sorted(EVERY))
def test_an_overflow_is_in_one_step_alone(ranks_of, on: str, k: int, bad: float, name: str) -> None:
    everyone = ranks_of(on, k).run(one_overflow, name, bad)
    for rank, (results, residuals, notices) in enumerate(everyone):
        finite = [bool(result.isfinite().all()) for result in results]
        assert finite == [True, False, True, True, True]
        assert residuals and not any(residual.any() for residual in residuals)  # on all ranks alike
        torch.testing.assert_close(results, everyone[0][0], rtol=0, atol=0, equal_nan=True)
        if on == "cpu":  # threads share their warnings
            (notice,) = notices
            assert notice.startswith(f"rank {rank}: a gradient was not finite")


@pytest.mark.parametrize("name", sorted(EVERY))
def test_error_feedback_alone_recovers_too(name: str) -> None:
    compressor, x = ErrorFeedback(EVERY[name]()), gradient(0, 1000, 0)
    x[[3, 500]] = torch.tensor([math.inf, math.nan])
    assert not compressor.decode(compressor.encode(x)).isfinite().all()
    exact = "top-k" in name  # both were sent, so the residual is finite
    with nullcontext() if exact else pytest.warns(RuntimeWarning, match="^a gradient was not"):
        sent = compressor.decode(compressor.encode(gradient(0, 1000, 1)))
    assert sent.isfinite().all() and compressor.residuals[None].isfinite().all()
