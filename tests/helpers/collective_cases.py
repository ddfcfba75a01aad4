"""Names, worlds, lengths and dtypes for tests of collectives by hand, and the sums to expect."""

import torch

from tests.helpers.rank_values import values

ALL_REDUCES = [
    "central_all_reduce",
    "tree_all_reduce",
    "simple_ring_all_reduce",
    "pipelined_ring_all_reduce",
    "halving_doubling_all_reduce",
]
BROADCASTS = ["naive_broadcast", "tree_broadcast", "pipelined_broadcast", "broadcast"]
WORLDS = [("simulated", k) for k in (1, 2, 3, 5, 8)] + [("cpu", k) for k in (2, 3, 4)]
LENGTHS = [0, 1, 3, 5, 64, 101]
DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.complex64]


def total(members: list[int], length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return sum((values(r, length, dtype) for r in members), torch.zeros(length, dtype=dtype))
