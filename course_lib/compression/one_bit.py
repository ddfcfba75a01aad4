"""One bit: only the signs, and one absolute value for all elements.

    >>> from course_lib.compression import OneBit
    >>> nbytes = OneBit().encode(gradient).nbytes  # 1/32 of float32, and 4 bytes

    C(x) = ‖x‖₁/n · sign(x)          4 + ⌈n/8⌉ bytes, with sign(0) = 1

Among all vectors with these signs and one absolute value for all elements, C(x) is nearest to x. It
is biased, and has only roughly the direction of x:

    ‖C(x) - x‖² = ‖x‖² - ‖x‖₁²/n = (1 - δ) ‖x‖²,    δ = ‖x‖₁² / (n ‖x‖²) ≥ 1/n

A vector with one large element and many small ones is the worst case: the small ones become as
large as the large one. Without `ErrorFeedback`, training may not converge.

F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
Training of Speech DNNs", Interspeech 2014; S. P. Karimireddy et al., "Error Feedback Fixes SignSGD
and other Gradient Compression Schemes", ICML 2019.
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from course_lib.compression.bits import choose_by_bits, pack_bits, packed_bytes, table_by_byte
from course_lib.compression.payload import (
    Compressor,
    Payload,
    Shape,
    as_vector,
    elements,
    in_cache,
    kernels_for,
    section,
    write,
)

_SCALE = 4  # bytes
_PIECE = 1 << 18
"""Elements, 1 MiB. Pieces are this large because the cost of a call matters for little work."""


class OneBit(Compressor):
    """Signs, and the mean absolute value. A bit is 1 if the element is negative."""

    def nbytes(self, shape: Shape) -> int:
        """Return 4 + ⌈numel/8⌉; 0 for an empty tensor."""
        numel = elements(shape)
        return _SCALE + packed_bytes(numel, 1) if numel else 0

    def encode(self, tensor: Tensor, key: Hashable = None) -> Payload:
        """Return scale and signs; one not-a-number makes the whole tensor not-a-number."""
        return self._encode(as_vector(tensor), None, tensor)

    def encode_with_residual(self, x: Tensor, residual: Tensor, key: Hashable = None) -> Payload:
        """As `Compressor.encode_with_residual`; a first pass computes the scale."""
        payload = self._encode(x, residual, x)
        if x.numel() and not kernels_for(x):
            scale = section(payload.wire, 0, _SCALE, torch.float32)
            work_space = _work_space(x)
            for at in in_cache(residual, _PIECE):
                piece = residual[at]
                piece -= torch.copysign(scale, piece, out=work_space[: piece.numel()])
        return payload

    def decode_into(self, payload: Payload, out: Tensor, add: bool = False) -> None:
        """As `Compressor.decode_into`, piece by piece: plus or minus the scale per element."""
        if not out.numel():
            return
        scale = section(payload.wire, 0, _SCALE, torch.float32)
        if out.dtype == torch.float32 and (fused := kernels_for(out)):
            fused.decode_bits(scale, payload.wire[_SCALE:], out, add)
            return
        table = table_by_byte(torch.cat([scale, -scale]))
        directly = out.dtype == torch.float32 and not add
        work_space = torch.empty(0) if directly else _work_space(out)
        for at in in_cache(out, _PIECE):
            piece = out[at]
            values = piece if directly else work_space[: piece.numel()]
            choose_by_bits(self._signs(payload.wire, at), table, values)
            if not directly:
                write(piece, values, add)

    def _encode(self, x: Tensor, residual: Tensor | None, like: Tensor) -> Payload:
        wire = torch.empty(self.nbytes(x.numel()), dtype=torch.uint8, device=x.device)
        if x.numel() and (fused := kernels_for(x)):
            exact = x.contiguous() if residual is None else residual.add_(x)
            scale = exact.abs().sum().div_(x.numel()).view(1)
            wire[:_SCALE] = scale.view(torch.uint8)
            fused.encode_bits(exact, scale, wire[_SCALE:], residual is not None)
        elif x.numel():
            total = _write_signs(x, residual, wire[_SCALE:])
            wire[:_SCALE] = total.div_(x.numel()).view(torch.uint8)
        return Payload(wire, like.shape, like.dtype)

    @staticmethod
    def _signs(wire: Tensor, at: slice) -> Tensor:
        """Return the bytes with the signs of the elements `at`, which begin at a whole byte."""
        return wire[_SCALE + at.start // 8 : _SCALE + packed_bytes(at.stop, 1)]


def _write_signs(x: Tensor, residual: Tensor | None, signs: Tensor) -> Tensor:
    """Add x to the residual, write the signs, and return the sum of the absolute values."""
    total = torch.zeros(1, device=x.device)
    for at in in_cache(x, _PIECE):
        exact = x[at] if residual is None else residual[at].add_(x[at])
        signs[at.start // 8 : packed_bytes(at.stop, 1)] = pack_bits(exact.signbit(), 1)
        total += exact.abs().sum()
    return total


def _work_space(x: Tensor) -> Tensor:
    """Return float32 memory for a piece of `in_cache`; it is reused, so it stays in the cache."""
    longest = next(in_cache(x, _PIECE), slice(0, 0))
    return torch.empty_like(x[longest], dtype=torch.float32)
