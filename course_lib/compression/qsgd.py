"""QSGD: a few levels, rounded at random so that the average is right.

    >>> from course_lib.compression import QSGD
    >>> nbytes = QSGD(levels=7).encode(gradient).nbytes  # 4 bits per element, 4 bytes per block

For a block v of d elements and s levels:

    C(v)_i = ‖v‖₂ · sign(v_i) · ξ_i / s,    ξ_i = ⌊ s |v_i| / ‖v‖₂ + u ⌋,    u uniform in [0, 1)

    E C(v) = v,      E‖C(v) - v‖² ≤ min(d/s², √d/s) ‖v‖²

Unlike `Uniform8Bit` it divides by the *norm* of a block, not by its largest element: of a long
block most elements then lie below the first level, and are sent as 0 or, rarely, as ‖v‖/s. With one
level that is one element in √d or so: sparse by itself, which the paper's variable-length code
makes use of. Here every element takes the same number of bits, 1, 2, 4 or 8, whichever hold 2s + 1
values.

D. Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
NeurIPS 2017 (Lemma 3.1).
"""

import math
from collections.abc import Hashable

import torch
from torch import Tensor
from torch.nn import functional as F

from course_lib.compression.bits import pack_bits, packed_bytes, unpack_bits, width_for
from course_lib.compression.payload import Compressor, Payload, Shape, as_vector, elements, section


class QSGD(Compressor):
    """Levels between 0 and the norm of a block, and signs.

    Args:
        levels: s, 1 to 127.
        block: d, elements that share a norm.
        seed: of the random numbers; another one on every rank, or the errors do not average out.
            None takes PyTorch's generator.

    """

    def __init__(self, levels: int = 7, block: int = 512, seed: int | None = None) -> None:
        if not 1 <= levels <= 127:
            raise ValueError(f"levels is 1 to 127: signed, they must fit a byte; not {levels}")
        if block < 1:
            raise ValueError(f"a block has at least one element, not {block}")
        self.levels = levels
        self.block = block
        self.width = width_for(2 * levels + 1)
        self.seed = seed
        self._generator: torch.Generator | None = None

    def nbytes(self, shape: Shape) -> int:
        """Four bytes per block, and `width` bits per element."""
        numel = elements(shape)
        return 4 * -(-numel // self.block) + packed_bytes(numel, self.width)

    def variance_bound(self, numel: int) -> float:
        """Return min(d/s², √d/s), the most that E‖C(v) - v‖² can be of ‖v‖²."""
        longest = min(self.block, numel)
        return min(longest / self.levels**2, math.sqrt(longest) / self.levels)

    def encode(self, tensor: Tensor, key: Hashable = None) -> Payload:
        """Return norms and levels."""
        x = as_vector(tensor)
        rows = F.pad(x, (0, -x.numel() % self.block)).view(-1, self.block)
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        scaled = rows.abs() * torch.where(norms == 0, 0, self.levels / norms)
        levels = (scaled + self._noise(rows)).floor_().clamp_(max=self.levels)
        # From -s … s to 0 … 2s. A sign bit of its own would give zero two codes.
        signed = torch.copysign(levels, rows).nan_to_num_(0).add_(self.levels)
        codes = signed.to(torch.uint8).view(-1)[: x.numel()]
        wire = torch.cat([norms.view(-1).view(torch.uint8), pack_bits(codes, self.width)])
        return Payload(wire, tensor.shape, tensor.dtype)

    def decode(self, payload: Payload) -> Tensor:
        """Return level / s times the norm of the block."""
        numel = payload.shape.numel()
        header = 4 * -(-numel // self.block)
        norms = section(payload.wire, 0, header, torch.float32)
        codes = unpack_bits(payload.wire[header:], self.width, numel)
        rows = F.pad(codes, (0, -numel % self.block)).view(-1, self.block).float()
        values = rows.sub_(self.levels).mul_(norms[:, None] / self.levels)
        return values.view(-1)[:numel].view(payload.shape).to(payload.dtype)

    def _noise(self, like: Tensor) -> Tensor:
        if self.seed is not None and self._generator is None:
            self._generator = torch.Generator(like.device).manual_seed(self.seed)
        return torch.rand(like.shape, device=like.device, generator=self._generator)
