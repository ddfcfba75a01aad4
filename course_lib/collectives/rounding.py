"""Sums whose rounding does not depend on the number of ranks.

    >>> from course_lib.collectives import mean_rounded_once, sum_in_one_order
    >>> mean_rounded_once(gradient)  # bfloat16, in place: added up in float32
    >>> total = sum_in_one_order(gradients)  # of this rank's micro-batches

Floating-point addition rounds: (a + b) + c and a + (b + c) may differ in the last bits. So a sum
over ranks depends on K in two ways.

**How much is rounded.** A ring passes a partial sum on in the dtype of the tensor, and each of its
K - 1 additions rounds. With bfloat16, which keeps 8 significant bits, the error of independent
numbers grows like √K. `mean_rounded_once` sends the same bytes, 2(K-1)/K n from each rank, but adds
up the K numbers on one rank, in float32, and rounds the mean once.

**Which bits come out.** A ring on 2, 4 and 8 ranks adds the same M gradients in three orders.
`sum_in_one_order` adds them along one binary tree, whose lower part lies inside the ranks and whose
upper part is recursive doubling between them. Every power of two that divides M gives the same
bits. It needs only a + b = b + a. It takes log2(K) (α + n/β) seconds, with latency α (s), bandwidth
β (bytes/s) and n bytes.

Demmel and Nguyen, "Parallel Reproducible Summation", IEEE Transactions on Computers 2015, get the
same bits for any order, at the price of more bytes.
"""

import torch
from torch import Tensor

from course_lib.collectives.direct import in_two_phases
from course_lib.collectives.point_to_point import Group, exchange, place_in


def mean_rounded_once(tensor: Tensor, group: Group = None) -> None:
    """Replace everyone's `tensor` by the mean over the ranks, added up in float32.

    The tensors have one shape and one dtype, of 32 bits or fewer; what travels has this dtype. Each
    element is the float32 sum in the order of the ranks, divided by K, and then rounded to the
    dtype: 2α + 2(K-1) n/(Kβ). Raises as `direct_all_reduce`.
    """
    in_two_phases(tensor, _mean_in_float32, group)


def _mean_in_float32(parts: list[Tensor], mean: Tensor) -> None:
    total = torch.zeros_like(mean, dtype=torch.float32)
    for part in parts:
        total += part
    mean.copy_(total / len(parts))


def sum_in_one_order(parts: Tensor, group: Group = None) -> Tensor:
    """Return the sum over the M parts of all ranks; its bits are the same for every such K.

    `parts` has the shape (M/K, …): rank 0 has the first M/K parts, rank 1 the next ones, and so on.
    K is a power of two. The parts are added in pairs of neighbours as long as their number is even,
    and what is left, an odd number from each such block, first of all and one after the other.

    Raises ValueError if K is not a power of two, and if this rank is not in `group`.
    """
    rank, world_size = place_in(group)
    if world_size & (world_size - 1):
        raise ValueError(f"{world_size} ranks: the number of ranks must be a power of two")
    odd = len(parts) // (len(parts) & -len(parts))  # parts in a block of the lowest level
    shape = (len(parts) // odd, odd, *parts.shape[1:])
    blocks: tuple[Tensor, ...] = parts.detach().reshape(shape).unbind(1)
    sums = blocks[0].clone(memory_format=torch.contiguous_format)
    for block in blocks[1:]:
        sums += block
    while len(sums) > 1:
        sums = sums[0::2] + sums[1::2]
    total, incoming, distance = sums[0], torch.empty_like(sums[0]), 1
    while distance < world_size:
        exchange(total, rank ^ distance, incoming, rank ^ distance, group)
        total, distance = total + incoming, 2 * distance
    return total
