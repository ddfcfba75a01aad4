"""QSGD: a few levels, rounded at random so that the average is right.

    >>> from course_lib.compression import QSGD
    >>> nbytes = QSGD(levels=7).encode(gradient).nbytes  # 4 bits per element, 4 bytes per block

For a block v of d elements and s levels:

    C(v)_i = ‖v‖₂ · sign(v_i) · ξ_i / s,    ξ_i = ⌊ s |v_i| / ‖v‖₂ + u ⌋,    u uniform in [0, 1)

    E C(v) = v,      E‖C(v) - v‖² ≤ min(d/s², √d/s) ‖v‖²

Unlike `Uniform8Bit` it divides by the *norm* of a block, not by its largest element. So most
elements of a long block are below the first level, and are sent as 0 or, rarely, as ‖v‖/s. With one
level, about one element in √d is not 0; the paper's variable-length code uses this. Here every
element takes the same number of bits: the smallest of 1, 2, 4 and 8 that can hold 2s + 1 values.

D. Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
NeurIPS 2017 (Lemma 3.1).
"""

import math
from collections.abc import Hashable

import torch
from torch import Tensor
from torch.nn import functional as F

from course_lib.compression.bits import pack_bits, packed_bytes, unpack_bits
from course_lib.compression.payload import (
    Compressor,
    Payload,
    Shape,
    as_vector,
    elements,
    section,
    write,
)


class QSGD(Compressor):
    """Levels between 0 and the norm of a block, and signs.

    Args:
        levels: s, 1 to 127.
        block: d, how many elements share a norm.
        seed: the seed of the random numbers. It must differ between ranks, or the errors do not
            average out. None uses PyTorch's generator.

    """

    def __init__(self, levels: int = 7, block: int = 512, seed: int | None = None) -> None:
        if not 1 <= levels <= 127:
            raise ValueError(f"levels must be 1 to 127 to fit a byte with a sign, not {levels}")
        self.levels = levels
        self.block = block
        self.width = next(bits for bits in (1, 2, 4, 8) if 2 * levels + 1 <= 1 << bits)
        self.seed = seed
        self._generator: torch.Generator | None = None

    def nbytes(self, shape: Shape) -> int:
        """Return four bytes per block, and `width` bits per element."""
        numel = elements(shape)
        return 4 * -(-numel // self.block) + packed_bytes(numel, self.width)

    def variance_bound(self, numel: int) -> float:
        """Return min(d/s², √d/s), an upper bound for E‖C(v) - v‖² / ‖v‖²."""
        longest = min(self.block, numel)
        return min(longest / self.levels**2, math.sqrt(longest) / self.levels)

    def encode(self, tensor: Tensor, key: Hashable = None) -> Payload:
        """Return norms and levels."""
        rows = self._rows(as_vector(tensor))
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        scaled = rows.abs().mul_(torch.where(norms == 0, 0, self.levels / norms))
        levels = scaled.add_(self._noise(rows)).floor_().clamp_(max=self.levels)
        # Map -s … s to 0 … 2s. With a separate sign bit, zero would have two codes.
        signed = torch.copysign(levels, rows).nan_to_num_(0).add_(self.levels)
        codes = pack_bits(signed.to(torch.uint8).view(-1)[: tensor.numel()], self.width)
        wire = torch.cat([norms.view(-1).view(torch.uint8), codes])
        return Payload(wire, tensor.shape, tensor.dtype)

    def decode_into(self, payload: Payload, out: Tensor, add: bool = False) -> None:
        """As `Compressor.decode_into`: level / s times the norm of the block."""
        header = 4 * -(-out.numel() // self.block)
        norms = section(payload.wire, 0, header, torch.float32)
        codes = unpack_bits(payload.wire[header:], self.width, out.numel())
        levels = self._rows(codes).to(torch.float32).sub_(self.levels)
        write(out, levels.mul_(norms[:, None] / self.levels).view(-1)[: len(codes)], add)

    def _rows(self, x: Tensor) -> Tensor:
        """Return a row per block; the last one is padded with zeros."""
        padding = -x.numel() % self.block
        return (F.pad(x, (0, padding)) if padding else x.contiguous()).view(-1, self.block)

    def _noise(self, like: Tensor) -> Tensor:
        if self.seed is not None and self._generator is None:
            self._generator = torch.Generator(like.device).manual_seed(self.seed)
        return torch.rand(like.shape, device=like.device, generator=self._generator)
