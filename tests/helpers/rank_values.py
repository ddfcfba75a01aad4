"""Numbers that differ between the ranks, and their sums in memory that all ranks see."""

import torch
from torch import Tensor

from course_lib.peer_memory import PeerMemory

Reduced = list[tuple[int, torch.dtype, list[Tensor]]]


def values(rank: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole numbers that differ between ranks and positions, with sums that bfloat16 can hold."""
    generator = torch.Generator().manual_seed(1000 * length + rank)
    return torch.randint(-15, 16, (length,), generator=generator).to(dtype)


def reduce_all_kinds(memory: PeerMemory, cases: list[tuple[int, torch.dtype]]) -> Reduced:
    """Return length, dtype, and private, symmetric and partly symmetric tensors, all reduced."""
    results: Reduced = []
    for length, dtype in cases:
        shared = memory.empty(length, dtype)
        mine = values(memory.rank, length, dtype).to(shared.device)
        private = mine.clone()
        memory.all_reduce(private)
        shared.copy_(mine)
        memory.all_reduce(shared)
        part = memory.empty(length + 7, dtype)
        part.fill_(1)
        part[3 : 3 + length] = mine
        memory.all_reduce(part[3 : 3 + length])
        assert part[:3].tolist() == [1] * 3
        assert part[3 + length :].tolist() == [1] * 4
        strided = values(memory.rank, 2 * length, dtype).to(shared.device)
        memory.all_reduce(strided[::2])
        reduced = (private, shared.clone(), part[3 : 3 + length].clone())
        results.append((length, dtype, [tensor.cpu() for tensor in reduced]))
        torch.testing.assert_close(
            strided[::2].cpu(),
            sum(values(r, 2 * length, dtype)[::2] for r in range(memory.world_size)),
        )
    return results


def check_sums(replicas: list[Reduced]) -> None:
    for replica in replicas:
        for length, dtype, results in replica:
            expected = sum(values(r, length, dtype) for r in range(len(replicas)))
            for result in results:
                assert torch.equal(result, expected), (length, dtype)
