"""Top-k: only the k largest elements, with their positions.

    >>> from course_lib.compression import TopK
    >>> payload = TopK(0.01).encode(gradient)  # one element in a hundred

    C(x)_i = x_i if |x_i| is among the k largest, else 0        ‖C(x) - x‖² ≤ (1 - k/n) ‖x‖²

It is biased: small elements are never sent, unless `ErrorFeedback` adds them up until they are
large.

A value takes 4 bytes, and so does its index. So a rank sends twice k/n of the tensor. If it sends
more than one element in 32, a *bitmap* of one bit per element is smaller than a list of indices.
`TopK` uses the smaller of the two:

    4 k + min(4 k, ⌈n/8⌉) bytes

Most of the time is spent on finding the elements. `torch.topk` sorts. On a CPU a guess finds the
same elements ten times as fast: from a sample, choose a threshold that slightly more than k
elements should exceed, collect these elements, and choose among them. If they are fewer than k,
sort after all. So the result is exact, and only the time depends on luck. On a GPU `torch.topk` is
fast, and never waits for the host.

S. U. Stich et al., "Sparsified SGD with Memory", NeurIPS 2018; Y. Lin et al., "Deep Gradient
Compression", ICLR 2018 (which samples for its threshold, too).
"""

from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor

from course_lib.compression.bits import for_numpy, pack_bits, packed_bytes, unpack_bits
from course_lib.compression.payload import (
    Compressor,
    Payload,
    Shape,
    as_vector,
    elements,
    in_cache,
    section,
    verify_density,
)

SAMPLE = 1 << 16
"""How many elements the threshold is guessed from."""


def encode_top_k(x: Tensor, k: int) -> Tensor:
    """Return the k largest |x_i| as bytes: their values, then their places.

    Args:
        x: n numbers, of any shape and floating dtype; they are compared in float32.
        k: from 0 to n.

    Returns:
        4 k + min(4 k, ⌈n/8⌉) bytes, uint8: the values as float32, in the order of `x`; then a
        bitmap, or a list of int32 if it is not longer.

    """
    x = as_vector(x)
    places, values = largest(x, k)
    if packed_bytes(x.numel(), 1) < 4 * k:
        chosen = torch.zeros(x.numel(), dtype=torch.bool, device=x.device)
        index_bytes = pack_bits(chosen.index_fill_(0, places, True), 1)
    else:
        index_bytes = places.to(torch.int32).view(torch.uint8)
    return torch.cat([values.view(torch.uint8), index_bytes])


class TopK(Compressor):
    """The largest elements by absolute value, and their positions.

    Args:
        density: k/n, above 0 and up to 1. At least one element is sent: k = max(1, round(k/n · n)).

    """

    def __init__(self, density: float) -> None:
        verify_density(density)
        self.density = density

    def count(self, numel: int) -> int:
        """Return k."""
        return min(numel, max(1, round(self.density * numel)))

    def nbytes(self, shape: Shape) -> int:
        """Return 4 k for the values, plus 4 k or ⌈numel/8⌉ for their positions."""
        numel = elements(shape)
        k = self.count(numel)
        return 4 * k + min(4 * k, packed_bytes(numel, 1))

    def encode(self, tensor: Tensor, key: Hashable = None) -> Payload:
        """Return values and positions. Not-a-number counts as larger than any number."""
        wire = encode_top_k(tensor, self.count(tensor.numel()))
        return Payload(wire, tensor.shape, tensor.dtype)

    def encode_with_residual(self, x: Tensor, residual: Tensor, key: Hashable = None) -> Payload:
        """As `Compressor.encode_with_residual`: the residual of a sent element is 0."""
        residual += x
        payload = self.encode(residual)
        residual.index_fill_(0, self._indices(payload), 0)
        return payload

    def decode_into(self, payload: Payload, out: Tensor, add: bool = False) -> None:
        """As `Compressor.decode_into`: zeros, except for the values at their positions.

        With `add`, only these positions are changed.
        """
        values = section(payload.wire, 0, 4 * self.count(out.numel()), torch.float32).to(out.dtype)
        if not add:
            out.zero_()
        out.index_add_(0, self._indices(payload), values)

    def _indices(self, payload: Payload) -> Tensor:
        """Return the positions of the values, shape (k,), in order."""
        numel = payload.shape.numel()
        k = self.count(numel)
        if packed_bytes(numel, 1) >= 4 * k:  # a list, as in `encode_top_k`
            return section(payload.wire, 4 * k, payload.nbytes, torch.int32).long()
        chosen = unpack_bits(payload.wire[4 * k :], 1, numel)
        # The count is known, so a GPU does not have to wait for it.
        return torch.nonzero_static(chosen, size=k).view(-1)


def largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the positions (int64, in order) and values of the k largest |x_i|, shape (k,) each.

    Among equal elements, any may be chosen.
    """
    if not for_numpy(x) or x.numel() < 4 * SAMPLE or not 0 < k <= x.numel() // 8:
        return _by_sorting(x, k)
    sample = x[:: x.numel() // SAMPLE].abs()
    expected = k / x.numel() * sample.numel()
    # Four standard deviations of the count more, so that too few elements are a rare accident.
    above = min(sample.numel(), int(expected + 4 * expected**0.5) + 1)
    threshold = sample.topk(above).values[-1].item()
    not_below = [
        at.start + np.flatnonzero(~(x[at].abs().numpy() < threshold))  # NaN is above any number
        for at in in_cache(x)
    ]
    places = torch.from_numpy(np.concatenate(not_below))
    if len(places) < k:  # the sample misled
        return _by_sorting(x, k)
    chosen, values = _by_sorting(x[places], k)
    return places[chosen], values


def _by_sorting(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    places = x.abs().topk(k, sorted=False).indices.sort().values
    return places, x[places]
