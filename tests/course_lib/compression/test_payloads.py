"""Payloads: as many bytes as the formula says, the tensor's shape and dtype, the papers' errors."""

import math

import numpy as np
import pytest
import torch

from course_lib.compression import QSGD, ErrorFeedback, OneBit, PowerSGD, RandomK, TopK, Uniform8Bit
from course_lib.compression.error_feedback import with_feedback
from course_lib.compression.top_k import SAMPLE, encode_top_k, largest
from course_lib.compression.uniform_8bit import dequantize, quantize
from tests.helpers.compressors import EVERY, PLAIN, UNBIASED

SHAPES = [(0,), (1,), (7,), (64,), (65,), (1001,), (3, 5), (2, 3, 4), (0, 3), (), (70_001,)]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_payload_is_as_long_as_it_says(name: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        compressor = EVERY[name]()
        x = torch.randn(shape).to(dtype)
        before = x.clone()
        payload = compressor.encode(x)
        assert payload.wire.dtype == torch.uint8
        assert payload.nbytes == payload.wire.nbytes == compressor.nbytes(x.shape), shape
        decoded = compressor.decode(payload)
        assert (decoded.shape, decoded.dtype) == (x.shape, x.dtype)
        assert torch.equal(x, before), shape


@pytest.mark.parametrize("codec", [Uniform8Bit, lambda: Uniform8Bit(stochastic=True)])
@pytest.mark.parametrize("size", [1e-45, 1e-40, 5e-38, 1e-35])
def test_what_is_too_small_to_scale_stays_behind(codec, size):
    """1 / s of a scale below 3e-39 is infinite: it would never leave the residual again."""
    compressor = ErrorFeedback(codec())
    x = torch.tensor([size, -size / 3, 0.0])
    sent = compressor.decode(compressor.encode(x))
    torch.testing.assert_close(sent + compressor.residuals[None], x, rtol=1e-6, atol=1e-45)
    compressor.encode(torch.ones(3))
    assert compressor.residuals[None].isfinite().all()


@pytest.mark.parametrize("name", EVERY)
def test_what_is_no_gradient_is_refused(name: str) -> None:
    compressor = EVERY[name]()
    for refused in (torch.arange(4), torch.ones(2, dtype=torch.cfloat), torch.eye(3).to_sparse()):
        with pytest.raises(TypeError, match="floating-point"):
            compressor.encode(refused)


def test_wrong_arguments_are_refused() -> None:
    for density in (0, -0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match="density"):
            TopK(density)
        with pytest.raises(ValueError, match="density"):
            RandomK(density)
    with pytest.raises(ValueError, match="levels"):
        QSGD(128)
    with pytest.raises(ValueError, match="rank"):
        PowerSGD(0)


@pytest.mark.parametrize("draw", ["normal", "equal", "sparse", "one sign", "nan", "sorted"])
@pytest.mark.parametrize("k", [1, 100, 2000])
def test_the_fast_selection_is_exact(draw: str, k: int) -> None:
    """Beside torch.topk; among equal elements either may take any."""
    n = 4 * SAMPLE + 3  # not a multiple of 8
    x = torch.randn(n)
    if draw == "equal":
        x = torch.ones(n)
    elif draw == "sparse":
        x = torch.zeros(n).index_fill_(0, torch.randperm(n)[:50], 3.0)
    elif draw == "one sign":
        x = -x.abs()
    elif draw == "sorted":
        x = x.sort().values
    elif draw == "nan":
        x[[5, 77]] = math.nan
    places, values = largest(x, k)
    want = x.abs().topk(k).values.sort().values
    assert (places.diff() > 0).all()
    torch.testing.assert_close(values, x[places], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values.abs().sort().values, want, rtol=0, atol=0, equal_nan=True)


def test_random_places_are_all_equally_likely() -> None:
    """Also the last, shorter run of a long tensor."""
    n, times = 65_536 + 100, 400
    compressor = RandomK(0.25)
    counts = torch.zeros(n)
    for _ in range(times):
        counts += compressor.decode(compressor.encode(torch.ones(n)))
    runs = -(-n // 256)
    p = round(0.25 * runs) / runs
    deviation = (counts - p * times).abs().max() / (times * p * (1 - p)) ** 0.5
    assert deviation < 5  # of 257 runs, at 5 standard deviations: once in 7,000 seeds; this is one
    assert np.isclose(counts.mean() / times, p, atol=0.02)


# --- bias, variance and contraction, as the papers state them -------------------------------------


TIMES = 4000


@pytest.mark.parametrize("name", UNBIASED)
@pytest.mark.large
def test_right_on_average(name: str) -> None:
    """Every element's mean lies within five of its own standard errors."""
    x = torch.randn(150, generator=torch.Generator().manual_seed(3))
    compressor = UNBIASED[name]()
    drawn = torch.stack([compressor.decode(compressor.encode(x)) for _ in range(TIMES)]).double()
    error = (drawn.mean(0) - x.double()).abs()
    standard_error = drawn.std(0) / TIMES**0.5
    assert (error <= 5 * standard_error + 1e-6).all(), (error / standard_error).max()


def test_the_contraction_of_one_bit() -> None:
    x, signs = torch.randn(500).double(), OneBit()
    left_out = (signs.decode(signs.encode(x)) - x).square().sum()
    expected = x.square().sum() - x.abs().sum() ** 2 / x.numel()
    torch.testing.assert_close(left_out, expected, rtol=1e-5, atol=0)


def test_power_iteration_comes_near_the_best() -> None:
    """Step by step, on the same matrix, to what the singular value decomposition leaves out."""
    matrix = torch.randn(40, 30, generator=torch.Generator().manual_seed(2))
    singular = torch.linalg.svdvals(matrix)
    best = singular[2:].square().sum().sqrt()
    compressor = PowerSGD(2)
    left_out = [
        float((compressor.decode(compressor.encode(matrix, "weight")) - matrix).norm())
        for _ in range(60)
    ]
    assert left_out[0] > left_out[5] > best * 0.999
    assert left_out[-1] <= best * 1.01


def test_power_sgd_finds_its_way_from_a_zero_gradient() -> None:
    compressor = PowerSGD(2)
    compressor.encode(torch.zeros(20, 10), "weight")
    product = torch.outer(torch.randn(20), torch.randn(10))
    decoded = compressor.decode(compressor.encode(product, "weight"))
    torch.testing.assert_close(decoded, product, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", PLAIN)
def test_with_feedback_the_sum_errs_by_one_step(name: str) -> None:
    """Σ C(p_t) = Σ x_t - e: the residual is all that is missing, however many steps there were."""
    compressor = ErrorFeedback(PLAIN[name]())
    sent, exact = torch.zeros(300), torch.zeros(300)
    for step in range(50):
        x = torch.randn(300, generator=torch.Generator().manual_seed(step))
        sent += compressor.decode(compressor.encode(x, "weights"))
        exact += x
    residual = compressor.residuals["weights"]
    torch.testing.assert_close(sent + residual, exact, rtol=1e-4, atol=1e-4)
    assert residual.norm() < 40 * 300**0.5


# --- the formulas alone, without blocks, kernels and classes --------------------------------------


STRIDED = [(3, 5), (4, 1), (), (0,), (2, 0), (2, 3, 4)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype):
    """Return a rank's numbers, transposed if they can be."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank)).to(dtype)
    return drawn.transpose(0, -1) if drawn.dim() else drawn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", STRIDED)
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
    def compress(p):
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
