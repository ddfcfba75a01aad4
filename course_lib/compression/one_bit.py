"""One bit: only the signs, and one length for all of them.

    >>> from course_lib.compression import OneBit
    >>> nbytes = OneBit().encode(gradient).nbytes  # 1/32 of float32, and 4 bytes

    C(x) = ‖x‖₁/n · sign(x)          4 + ⌈n/8⌉ bytes, with sign(0) = 1

Of all vectors with these signs and one length, this is the nearest to x. It is biased, and points
only roughly where x does:

    ‖C(x) - x‖² = ‖x‖² - ‖x‖₁²/n = (1 - δ) ‖x‖²,    δ = ‖x‖₁² / (n ‖x‖²) ≥ 1/n

A vector with one large element and many small ones is compressed worst: the small ones are made as
long as the large one. Without `ErrorFeedback` it need not converge.

F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
Training of Speech DNNs", Interspeech 2014; S. P. Karimireddy et al., "Error Feedback Fixes SignSGD
and other Gradient Compression Schemes", ICML 2019.
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from course_lib.compression.bits import pack_signs, packed_bytes, unpack_bits
from course_lib.compression.payload import (
    Compressor,
    Payload,
    Shape,
    as_vector,
    elements,
    in_cache,
    section,
)

_SCALE = 4  # bytes


class OneBit(Compressor):
    """Signs, and the mean absolute value. A bit is 1 where the element is negative."""

    def nbytes(self, shape: Shape) -> int:
        """4 + ⌈numel/8⌉; nothing for an empty tensor."""
        numel = elements(shape)
        return _SCALE + packed_bytes(numel, 1) if numel else 0

    def encode(self, tensor: Tensor, key: Hashable = None) -> Payload:
        """Return scale and signs; not-a-number makes the whole tensor that."""
        x = as_vector(tensor)
        wire = torch.empty(self.nbytes(x.numel()), dtype=torch.uint8, device=x.device)
        if x.numel():
            total = torch.zeros(1, device=x.device)
            for at in in_cache(x):
                total += x[at].abs().sum()
                self._signs(wire, at).copy_(pack_signs(x[at]))
            wire[:_SCALE] = total.div_(x.numel()).view(torch.uint8)
        return Payload(wire, tensor.shape, tensor.dtype)

    def encode_with_residual(self, x: Tensor, residual: Tensor, key: Hashable = None) -> Payload:
        """As `Compressor.encode_with_residual`; the scale is known after a first pass."""
        residual += x
        payload = self.encode(residual)
        if x.numel():
            scale = section(payload.wire, 0, _SCALE, torch.float32)
            for at in in_cache(residual):
                residual[at] -= torch.copysign(scale, residual[at])
        return payload

    def decode(self, payload: Payload) -> Tensor:
        """Return plus or minus the scale for every element."""
        result = torch.empty(payload.shape.numel(), device=payload.wire.device)
        if result.numel():
            scale = section(payload.wire, 0, _SCALE, torch.float32)
            for at in in_cache(result):
                piece = result[at]
                piece.copy_(unpack_bits(self._signs(payload.wire, at), 1, piece.numel()))
                piece.mul_(-2 * scale).add_(scale)
        return result.view(payload.shape).to(payload.dtype)

    @staticmethod
    def _signs(wire: Tensor, at: slice) -> Tensor:
        """Return the bytes with the signs of the elements `at`, which begin at a whole byte."""
        return wire[_SCALE + at.start // 8 : _SCALE + packed_bytes(at.stop, 1)]
