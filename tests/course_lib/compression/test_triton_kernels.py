"""Triton's kernels give the bytes, the residual and the sums of plain PyTorch, bit for bit.

On a CPU through Triton's interpreter (tests/conftest.py asks for it); compiled on a GPU, where
`make gpu` runs the tests marked so.
Skipped where there is no Triton: `pip install .[gpu]` brings it, and so does PyTorch for CUDA.
"""

import contextlib
import importlib
import os
from unittest import mock

import pytest
import torch

from course_lib.compression import ErrorFeedback, OneBit, Payload, Uniform8Bit
from course_lib.compression import one_bit as one_bit_module
from course_lib.compression import uniform_8bit as uniform_8bit_module

pytest.importorskip("triton", reason="needs triton: pip install .[gpu]")

LENGTHS = (0, 1, 7, 8, 1000, 4097)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
CODECS = {
    "8 bits": Uniform8Bit,
    "8 bits, blocks of 100": lambda: Uniform8Bit(block=100),
    "8 bits, blocks of 2048": lambda: Uniform8Bit(block=2048),
    "8 bits, blocks of three programs": lambda: Uniform8Bit(block=5000),
    "1 bit": OneBit,
}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the kernels are compiled here, as there is a GPU: TRITON_INTERPRET is not 1")
    return str(request.param)


@pytest.fixture(scope="module", autouse=True)
def tensors_on(device: str):
    """What a test makes without a device lies on the one that its kernels run on."""
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)


@pytest.fixture(scope="module")
def kernels(device: str):
    return importlib.import_module("course_lib.compression.triton_kernels")


@contextlib.contextmanager
def fused(kernels):
    """Use the kernels inside, whatever the device is; with None, plain PyTorch."""
    kernels_for = mock.Mock(return_value=kernels)
    with (
        mock.patch.object(uniform_8bit_module, "kernels_for", kernels_for),
        mock.patch.object(one_bit_module, "kernels_for", kernels_for),
    ):
        yield kernels_for


def drawn(length: int, dtype: torch.dtype, seed: int = 0):
    x = torch.randn(length, generator=torch.Generator().manual_seed(seed), device="cpu") * 10
    if length > 5:
        x[2], x[3], x[5] = 0.0, -0.0, 1e-30
    return x.to(dtype).to(torch.get_default_device())


def same_bits(a, b) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_wire_and_result_are_those_of_plain_pytorch(kernels, codec, dtype, length):
    x = drawn(length, dtype)
    with fused(None):
        plain = CODECS[codec]().encode(x)
        right = CODECS[codec]().decode(plain)
    with fused(kernels) as kernels_for:
        payload = CODECS[codec]().encode(x)
        result = CODECS[codec]().decode(payload)
    assert kernels_for.called or not length
    assert same_bits(payload.wire, plain.wire)
    assert same_bits(result.view(-1), right.view(-1))
    assert result.dtype == dtype


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("length", LENGTHS)
def test_residuals_stay_the_same_over_steps(kernels, codec: str, length: int) -> None:
    def three_steps(module):
        compressor = ErrorFeedback(CODECS[codec]())
        results = []
        with fused(module):
            for step in range(3):
                results.append(compressor.encode(drawn(length, torch.float32, step)).wire)
                results.append(compressor.residuals[None].clone())
        return results

    for a, b in zip(three_steps(kernels), three_steps(None), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("length", LENGTHS)
def test_sums_of_decoded_wires_are_the_same(kernels, codec: str, length: int) -> None:
    """From a wire that begins anywhere in memory, too."""
    payloads = [CODECS[codec]().encode(drawn(length, torch.float32, seed)) for seed in range(3)]

    def total(module):
        compressor = CODECS[codec]()
        out = torch.full((length,), 0.1)
        with fused(module):
            for payload in payloads:
                shifted = torch.cat([payload.wire.new_zeros(3), payload.wire])[3:]
                moved = Payload(shifted, payload.shape, payload.dtype)
                compressor.decode_into(moved, out, add=True)
        return out

    assert same_bits(total(kernels), total(None))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_makes_its_block_that(kernels, bad: float) -> None:
    x = drawn(300, torch.float32)
    x[150] = bad
    with fused(kernels):
        result = Uniform8Bit(block=100).decode(Uniform8Bit(block=100).encode(x))
    assert result[100:200].isnan().all()
    assert result[:100].isfinite().all() and result[200:].isfinite().all()


def test_kernels_start_on_the_device_of_their_tensors(kernels) -> None:
    """Which need not be the current one: Triton itself takes that."""
    x, scale, codes = torch.ones(5000), torch.ones(1), torch.zeros(5000, dtype=torch.uint8)
    with mock.patch.object(torch.cuda, "device_of", wraps=torch.cuda.device_of) as device_of:
        kernels.encode_bytes(x, None, scale, codes, 5000, 0.0)  # two kernels
        kernels.decode_bytes(scale, codes, x, 5000, False)
        kernels.encode_bits(x, scale, codes, False)
        kernels.decode_bits(scale, codes, x, False)
    entered = [id(call.args[0]) for call in device_of.call_args_list]
    assert entered == [id(tensor) for tensor in (x, x, scale, x, scale)]
