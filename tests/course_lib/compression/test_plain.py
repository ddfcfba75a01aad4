"""The formulas alone, without blocks, kernels and classes, equal their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.compression import ErrorFeedback, TopK, Uniform8Bit
from course_lib.compression.all_reduce import sum_by_codec
from course_lib.compression.error_feedback import with_feedback
from course_lib.compression.random_k import random_k_mean
from course_lib.compression.top_k import encode_top_k
from course_lib.compression.uniform_8bit import dequantize, quantize
from course_lib.ranks import Ranks

SHAPES = [(3, 5), (4, 1), (), (0,), (2, 0), (2, 3, 4)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a rank's numbers, transposed if they can be."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank)).to(dtype)
    return drawn.transpose(0, -1) if drawn.dim() else drawn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_and_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = numbers(1, shape, dtype)
    u = torch.rand(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    wire = quantize(x, u)
    exact = x.double().numpy()
    scale = np.abs(exact).max(initial=0) / 127
    codes = np.floor(exact / (scale or 1) + u.numpy()).ravel()
    assert wire.dtype == torch.uint8 and wire.shape == (x.numel() + 4,)
    assert wire[4:].view(torch.int8).tolist() == codes.tolist()
    read = dequantize(torch.cat([torch.zeros(3, dtype=torch.uint8), wire])[3:], x.shape, dtype)
    rounding = 1e-2 if dtype == torch.bfloat16 else 1e-6  # s is a float32
    right = torch.tensor(codes * scale).view(x.shape).to(dtype)
    torch.testing.assert_close(read, right, rtol=rounding, atol=0)


def test_quantize_keeps_127_and_zeros_and_is_that_of_one_block() -> None:
    almost = torch.tensor([1 - 2.0**-24, 0.0])
    assert quantize(torch.tensor([127.0, 1.0]), almost)[4:].tolist() == [127, 1]
    assert quantize(torch.zeros(2), almost).tolist() == [0] * 6
    x = torch.randn(50, generator=torch.Generator().manual_seed(3))
    halves = quantize(x, torch.full_like(x, 0.5))
    assert torch.equal(halves[4:], Uniform8Bit().encode(x).wire[:50])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(4, 2), (64, 2), (61, 2), (65, 3), (9, 9), (6, 0), (0, 0)])
def test_encode_top_k_is_read_back_from_its_bytes(n: int, k: int, dtype: torch.dtype) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    wire = encode_top_k(x, k).numpy()
    places = np.sort(np.argsort(-np.abs(x.float().numpy()), kind="stable")[:k])
    assert wire[: 4 * k].view(np.float32).tolist() == x[torch.from_numpy(places)].tolist()
    bits = np.zeros(n, np.uint8)
    bits[places] = 1
    bitmap = np.packbits(bits, bitorder="little")
    shorter = bitmap if len(bitmap) < 4 * k else places.astype(np.int32).view(np.uint8)
    assert wire[4 * k :].tolist() == shorter.tolist()


def test_encode_top_k_takes_none_of_a_long_tensor() -> None:
    assert encode_top_k(torch.randn(1 << 19), 0).numel() == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_feedback_is_error_feedback_in_every_step(dtype: torch.dtype) -> None:
    def compress(p: Tensor) -> Tensor:
        return TopK(0.3).decode(TopK(0.3).encode(p))

    senders, ours = [with_feedback(compress) for _ in range(2)], ErrorFeedback(TopK(0.3))
    for step in range(4):
        for key in (1, "1", ("a", 1)):
            x = torch.randn(2, 5, generator=torch.Generator().manual_seed(step)).to(dtype)
            expected = ours.decode(ours.encode(x, key))
            sent = senders[0](x, key)
            assert torch.equal(sent, expected) and sent.dtype == dtype
            again = senders[1](x, float(key) if key == 1 else key)
            assert torch.equal(again, expected)
            x.fill_(7), sent.fill_(9)


def halves(x: Tensor) -> Tensor:
    assert x.dtype == torch.float32 and x.dim() == 1
    return quantize(x, torch.full_like(x, 0.5))


def sums_on_a_rank() -> list[Tensor]:
    results = []
    for dtype in DTYPES:
        for shape in SHAPES:
            x = numbers(dist.get_rank(), shape, dtype)
            sum_by_codec(x, halves, dequantize)
            results.append(x)
    return results


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_sum_by_codec_is_that_of_one_process(k: int) -> None:
    with Ranks(k, on="simulated") as ranks:
        results = ranks.run(sums_on_a_rank)
    cases = [(shape, dtype) for dtype in DTYPES for shape in SHAPES]
    for i, (shape, dtype) in enumerate(cases):
        owned = [numbers(r, shape, dtype) for r in range(k)]
        totals = []
        for shards in zip(*(x.float().flatten().tensor_split(k) for x in owned), strict=True):
            size = shards[0].shape
            total = torch.zeros(size)
            for part in shards:
                total += dequantize(halves(part), size, torch.float32)
            totals.append(dequantize(halves(total), size, torch.float32))
        expected = torch.cat(totals).view(owned[0].shape).to(dtype)
        for rank in range(k):
            assert torch.equal(results[rank][i], expected), (shape, dtype, rank)


def means_on_a_rank() -> list[list[Tensor]]:
    rank, k = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([r for r in range(k) if r % 2 == half]) for half in range(min(k, 2))]
    drawn = []
    for group in (None, pairs[rank % 2]):
        state = torch.get_rng_state()
        x = numbers(rank, (3, 4), torch.float64)
        drawn.append([random_k_mean(x, 5, seed, group) for seed in (*range(300), 0)])
        assert torch.equal(state, torch.get_rng_state())
    return drawn


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_random_k_mean_is_n_over_k_times_the_mean_in_equal_places(k: int) -> None:
    with Ranks(k, on="simulated") as ranks:
        results = ranks.run(means_on_a_rank)
    for rank in range(k):
        for everyone, drawn in zip((range(k), range(rank % 2, k, 2)), results[rank], strict=True):
            mean = torch.stack([numbers(r, (3, 4), torch.float64) for r in everyone]).mean(0)
            for got, first in zip(drawn, results[0][0], strict=True):
                places = first != 0
                assert int(places.sum()) == 5
                torch.testing.assert_close(got, torch.where(places, mean * 12 / 5, 0))
            assert torch.equal(drawn[0], drawn[-1])
    often = torch.stack([result != 0 for result in results[0][0]]).double().mean(0)
    assert (often - 5 / 12).abs().max() < 5 * math.sqrt(5 / 12 * 7 / 12 / 300)
