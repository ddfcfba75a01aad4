"""Names, worlds, lengths and dtypes for tests of collectives by hand, and the sums to expect."""

import torch
import torch.distributed as dist

ALL_REDUCES = [
    "central_all_reduce",
    "tree_all_reduce",
    "ring_all_reduce",
    "halving_doubling_all_reduce",
    "direct_all_reduce",
    "one_shot_all_reduce",
]
BROADCASTS = ["naive_broadcast", "tree_broadcast", "pipelined_broadcast", "broadcast"]
WORLDS = [("simulated", k) for k in (1, 2, 3, 5, 7, 8)] + [("cpu", k) for k in (2, 3, 4)]
LENGTHS = [0, 1, 3, 5, 64, 101]
DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.complex64]


def values(rank: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers that differ between ranks and positions, with sums that bfloat16 can hold."""
    generator = torch.Generator().manual_seed(1000 * length + rank)
    return torch.randint(-15, 16, (length,), generator=generator).to(dtype)


def total(members: list[int], length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return sum((values(r, length, dtype) for r in members), torch.zeros(length, dtype=dtype))


def launch(kind: str, n: int, root: int) -> None:
    """Call PyTorch's collective on a rank, with `n` elements in all."""
    k, is_root = dist.get_world_size(), dist.get_rank() == root
    x = torch.ones(n)
    pieces = list(x.chunk(k))
    calls = {
        "barrier": dist.barrier,
        "broadcast": lambda: dist.broadcast(x, root),
        "reduce": lambda: dist.reduce(x, root),
        "all_reduce": lambda: dist.all_reduce(x),
        "gather": lambda: dist.gather(x, [x.clone() for _ in range(k)] if is_root else None, root),
        "scatter": lambda: dist.scatter(x, [x.clone()] * k if is_root else None, root),
        "all_gather": lambda: dist.all_gather([torch.empty_like(x) for _ in range(k)], x),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty_like(pieces[0]), pieces),
        "all_to_all": lambda: dist.all_to_all([torch.empty_like(p) for p in pieces], pieces),
    }
    calls[kind]()
