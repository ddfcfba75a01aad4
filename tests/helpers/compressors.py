"""Every compressor, for tests of their common properties. Each call makes new ones."""

import torch

from course_lib.compression import QSGD, OneBit, PowerSGD, RandomK, TopK, Uniform8Bit
from course_lib.compression.payload import Codec
from course_lib.compression.uniform_8bit import dequantize, quantize


def halves(x):
    """Return the bytes of a float32 vector, rounded to the nearest."""
    assert x.dtype == torch.float32 and x.dim() == 1
    return quantize(x, torch.full_like(x, 0.5))


# Biased: the same every time, or drawn alike on all ranks; contractions.
PLAIN = {
    "top-k": lambda: TopK(0.01),
    "top-k as bitmap": lambda: TopK(0.3),
    "random-k": lambda: RandomK(0.1),
    "uniform, nearest": lambda: Uniform8Bit(block=64),
    "one bit": OneBit,
    "PowerSGD": lambda: PowerSGD(2),
    "codec": lambda: Codec(halves, dequantize),
}

UNBIASED = {
    "random-k, scaled": lambda: RandomK(0.25, unbiased=True),
    "uniform, stochastic": lambda: Uniform8Bit(stochastic=True, block=64, seed=1),
    "QSGD, 1 level": lambda: QSGD(1, block=64, seed=1),
    "QSGD, 7 levels": lambda: QSGD(7, block=100, seed=1),
    "QSGD, 127 levels": lambda: QSGD(127, seed=1),
}

EVERY = PLAIN | UNBIASED
