"""Symmetric memory: on GPUs where there are some, and else over shared pages in place of NVLink."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from course_lib.peer_memory import SymmetricMemory
from course_lib.peer_memory.one_and_two_shot import blocks_of
from course_lib.peer_memory.shared_pages import SpinBarrier, map_for_all
from course_lib.ranks import Ranks
from tests.helpers.rank_values import Reduced, check_sums, reduce_all_kinds

LENGTHS = [0, 1, 3, 1000, 100_003, 600_001]


def all_kinds(device: str) -> Reduced:
    cases = [(length, torch.float32) for length in LENGTHS]
    return reduce_all_kinds(SymmetricMemory(device=device), cases)


class OverSharedPages:
    """The interface of PyTorch's symmetric memory, made of the CPU's pages."""

    def __init__(self) -> None:
        self.spin = SpinBarrier()
        self.allocated: dict[int, list[Tensor]] = {}

    def empty(self, nbytes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        slots = map_for_all(nbytes)
        mine = slots[dist.get_rank()][:nbytes]
        self.allocated[mine.data_ptr()] = slots
        return mine

    def rendezvous(self, tensor: Tensor, group: Any) -> Any:
        assert group is dist.group.WORLD
        slots, spin = self.allocated[tensor.data_ptr()], self.spin

        class Handle:
            def get_buffer(self, rank: int, sizes: tuple[int], dtype: torch.dtype) -> Tensor:
                return slots[rank][: sizes[0]].view(dtype)

            def barrier(self, channel: int) -> None:
                spin()

        return Handle()


def without_gpus() -> Reduced:
    pages = OverSharedPages()
    SymmetricMemory.device_type = "cpu"
    symm_mem.empty, symm_mem.rendezvous = pages.empty, pages.rendezvous
    return all_kinds("cpu")


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_everyone_gets_the_sum(k):
    with Ranks(k, on="cpu", timeout=60) as ranks:  # of their own: what they import is changed
        check_sums(ranks.run(without_gpus))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_everyone_gets_the_sum_on_gpus():
    k = torch.cuda.device_count()
    with Ranks(k, on="gpu", timeout=60) as ranks:
        check_sums(ranks.run(all_kinds, "cuda"))


def on_the_cpu() -> None:
    memory = SymmetricMemory.__new__(SymmetricMemory)
    memory.all_reduce(torch.ones(3))


def test_a_tensor_on_the_wrong_device_is_refused():
    with pytest.raises(ValueError, match=r"SymmetricMemory is for tensors on cuda, .* on cpu"):
        on_the_cpu()


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 5, 100])
def test_blocks_cover_each_rank_s_chunk_of_everyone(k, length):
    everyones = [torch.arange(length) + 1000 * r for r in range(k)]
    seen = []
    for rank in range(k):
        for mine, *others in blocks_of(everyones, rank, longest=7):
            assert 0 < len(mine) <= 7
            assert len(others) == k - 1
            places = [part % 1000 for part in (mine, *others)]
            assert all(torch.equal(place, places[0]) for place in places)
            assert [int(part[0]) // 1000 for part in (mine, *others)] == [
                (rank + i) % k for i in range(k)
            ]
            seen += places[0].tolist()
    assert seen == list(range(length))
