"""Numbers that differ between the ranks."""

import torch
from torch import Tensor


def values(rank: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole numbers that differ between ranks and positions, with sums that bfloat16 can hold."""
    generator = torch.Generator().manual_seed(1000 * length + rank)
    return torch.randint(-15, 16, (length,), generator=generator).to(dtype)
