"""PowerSGD: a gradient matrix as the product of a tall and a wide matrix.

    >>> from course_lib.compression import PowerSGD
    >>> payload = PowerSGD(rank=2).encode(model[0].weight)  # (m + n) · 2 numbers for m · n

A matrix M, m × n, is replaced by P Qᵀ of rank r. A singular value decomposition gives the best
P Qᵀ, but is slow. One step of *power iteration*, starting from the Q of the last training step,
comes close to it, because gradients change slowly:

    P = M Q        sum over the ranks,   make its columns orthonormal
    Q = Mᵀ P       sum over the ranks                                      C(M) = P Qᵀ

Both products are *linear* in M. So two ordinary all-reduces can sum P and Q over the ranks, and the
result is exactly the same as for the sum of the matrices. Nothing is decompressed on the way, and
the bytes do not grow with K. C(M) = P Pᵀ M is the projection of M onto the span of P. It is biased,
its norm is at most that of M, and it needs `ErrorFeedback`.

    4 r (m + n) bytes for a matrix; vectors (biases, norms) are sent uncompressed

T. Vogels, S. P. Karimireddy and M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", NeurIPS 2019.
"""

from collections.abc import Callable, Hashable
from math import isqrt

import torch
from torch import Tensor

from course_lib.compression.payload import (
    Compressor,
    Payload,
    Shape,
    as_vector,
    elements,
    section,
    write,
)


class PowerSGD(Compressor):
    """Low-rank factors.

    A tensor of two or more dimensions becomes a matrix: its first dimension by all others. A vector
    becomes a matrix that is as square as possible, padded with zeros.

    Args:
        rank: r, columns of P and Q; fewer if the matrix is smaller.
        seed: the seed of the first Q, the same on all ranks, or their P cannot be summed.

    Attributes:
        start: key → the Q of the last step.

    """

    linear = True
    memory = ("start",)

    def __init__(self, rank: int = 1, seed: int = 0) -> None:
        if rank < 1:
            raise ValueError(f"rank must be at least 1, not {rank}")
        self.rank = rank
        self.seed = seed
        self.start: dict[Hashable, Tensor] = {}

    def nbytes(self, shape: Shape) -> int:
        """Return 4 r (m + n) for a matrix m × n."""
        rows, columns = matrix_shape(shape)
        return 4 * min(self.rank, rows, columns) * (rows + columns)

    def encode(self, tensor: Tensor, key: Hashable = None) -> Payload:
        """Return P and Q of this rank's tensor alone."""
        left, right, _ = self._factors(tensor, key, lambda _: None)
        wire = torch.cat([left.reshape(-1), right.reshape(-1)]).view(torch.uint8)
        return Payload(wire, tensor.shape, tensor.dtype)

    def decode_into(self, payload: Payload, out: Tensor, add: bool = False) -> None:
        """As `Compressor.decode_into`: P Qᵀ."""
        rows, columns = matrix_shape(payload.shape)
        rank = min(self.rank, rows, columns)
        factors = section(payload.wire, 0, payload.nbytes, torch.float32)
        left, right = torch.split(factors, [rows * rank, columns * rank])
        product = left.view(rows, rank) @ right.view(columns, rank).T
        write(out, product.view(-1)[: out.numel()], add)

    def sum_over(
        self, tensor: Tensor, key: Hashable, all_reduce: Callable[[Tensor], object]
    ) -> tuple[Tensor, Tensor]:
        """Sum P, then Q."""
        left, right, own_right = self._factors(tensor, key, all_reduce)
        products = left @ right.T, left @ own_right.T
        total, own_part = (_as_tensor(product, tensor.shape) for product in products)
        return total, own_part

    def _factors(
        self, tensor: Tensor, key: Hashable, all_reduce: Callable[[Tensor], object]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return P and Q of the sum over the ranks, and this rank's part of Q."""
        x = as_vector(tensor)
        rows, columns = matrix_shape(tensor.shape)
        matrix = torch.nn.functional.pad(x, (0, rows * columns - x.numel())).view(rows, columns)
        random = self._random(columns, min(self.rank, rows, columns), x.device)
        start = self.start.get(key, random)
        left = matrix @ (start if start.shape == random.shape else random)
        all_reduce(left)
        left = torch.linalg.qr(left).Q
        own_right = matrix.T @ left
        right = own_right.clone()
        all_reduce(right)
        # A column of zeros, or one that is not finite, would stay so: replace it by a random one.
        size = torch.linalg.vector_norm(right, dim=0)
        lost = (size == 0) | ~size.isfinite()
        self.start[key] = torch.where(lost, random, right)
        return left, right, own_right

    def _random(self, columns: int, rank: int, device: torch.device) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(columns, rank, generator=generator).to(device)


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """Return the rows and columns of the matrix for a tensor of this shape."""
    numel = elements(shape)
    if not isinstance(shape, int) and len(shape) > 1 and numel:
        return shape[0], numel // shape[0]
    rows = isqrt(numel)
    return rows, -(-numel // rows) if rows else 0


def _as_tensor(matrix: Tensor, shape: torch.Size) -> Tensor:
    return matrix.reshape(-1)[: shape.numel()].view(shape)
