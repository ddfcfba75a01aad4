"""All-reduce in shared memory against the sum, and as the backend of both DDPs."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from course_lib.ddp import DistributedDataParallel
from course_lib.peer_memory import SharedMemory, shared_memory_group, shared_pages
from course_lib.peer_memory.shared_pages import map_for_all
from course_lib.ranks import RankError
from tests.helpers.rank_values import Reduced, check_sums, reduce_all_kinds, values

LENGTHS = [0, 1, 3, 1000, 600_001]
DTYPES = [torch.float64, torch.bfloat16, torch.int64]


def all_kinds() -> Reduced:
    cases = [(length, torch.float32) for length in LENGTHS] + [(1001, dtype) for dtype in DTYPES]
    return reduce_all_kinds(SharedMemory(), cases)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_everyone_gets_the_sum(ranks_of, k):
    check_sums(ranks_of("cpu", k).run(all_kinds))


def many_in_a_row() -> list[Tensor]:
    """Random numbers and no pause: a rank that runs ahead must not be read too early or late."""
    memory = SharedMemory()
    shared, results = memory.empty(5000), []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for number in range(60):
        private = torch.randn(5000 if number % 2 else 1_300_000 if number == 30 else 10,
                              generator=generator)  # fmt: skip
        if number % 2:
            shared.copy_(private)
            memory.all_reduce(shared)
            private = shared.clone()
        else:
            memory.all_reduce(private)
        results.append(private)
    return results


@pytest.mark.parametrize("k", [2, 4])
def test_ranks_agree_bit_for_bit_however_fast_they_are(ranks_of, k):
    first, *others = ranks_of("cpu", k).run(many_in_a_row)
    generators = [torch.Generator().manual_seed(r) for r in range(k)]
    for number, result in enumerate(first):
        exact = sum(torch.randn(len(result), generator=g).double() for g in generators)
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(other[number], result) for other in others)


def train(ddp: str) -> list[Tensor]:
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.BatchNorm1d(300), nn.Linear(300, 9))
    options = {"bucket_cap_mb": 0.02}
    group = shared_memory_group() if "shared" in ddp else None
    if ddp == "torch":
        model: nn.Module = TorchDDP(net, **options)
    elif ddp == "torch, shared":
        model = TorchDDP(net, process_group=group, **options)
    elif ddp == "ours, shared":
        model = DistributedDataParallel(net, group=group, **options)
    else:
        model = DistributedDataParallel(net, group=group, allocate=group.memory.empty, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    return [tensor.detach() for tensor in net.parameters()]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_both_ddps_train_over_it(ranks_of, k):
    expected = ranks_of("cpu", k).run(train, "torch")
    for ddp in ("torch, shared", "ours, shared", "ours, shared in place"):
        replicas = ranks_of("cpu", k).run(train, ddp)
        assert ranks_of("cpu", k).trace.calls(0)["all_reduce"] == 0  # gloo had nothing to add up
        for replica in replicas:
            for tensor, first, wanted in zip(replica, replicas[0], expected[0], strict=True):
                assert torch.equal(tensor, first)
                if k <= 2:  # two numbers have one sum
                    assert torch.equal(tensor, wanted)
                torch.testing.assert_close(tensor, wanted, rtol=1e-4, atol=1e-6)


def others_go_to_the_inner_group() -> tuple[Tensor, Tensor]:
    group, rank = shared_memory_group(), dist.get_rank()
    largest = torch.tensor([rank])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    first = torch.tensor([rank + 5])
    dist.broadcast(first, group=group, group_src=0)
    dist.barrier(group)
    return largest, first


def test_what_is_no_sum_is_left_to_the_inner_group(ranks_of):
    for largest, first in ranks_of("cpu", 3).run(others_go_to_the_inner_group):
        assert largest.item() == 2
        assert first.item() == 5


def test_simulated_ranks_are_refused(ranks_of):
    with pytest.raises(RankError, match="one process per rank"):
        ranks_of("simulated", 2).run(lambda: SharedMemory())


def one_stays_away() -> None:
    memory = SharedMemory(timeout=0.3)
    if dist.get_rank() != 1:
        memory.all_reduce(torch.ones(10))


def test_a_rank_that_does_not_come_is_named(ranks_of):
    with pytest.raises(RankError, match=r"rank \d waited 0\.3 s .* for rank 1 "):
        ranks_of("cpu", 3).run(one_stays_away)


def more_than_there_is() -> Tensor:
    memory = SharedMemory()
    with pytest.raises(OSError, match=r"rank 0 .* cannot have 12884901888 MiB .*one machine"):
        memory.empty(1 << 50)  # of 4 bytes, for each of 3 ranks
    tensor = values(dist.get_rank(), 100)
    memory.all_reduce(tensor)  # and all go on
    return tensor


def one_is_elsewhere() -> Tensor:
    if dist.get_rank() == 2:
        shared_pages._machine = lambda: "another one"
    with pytest.raises(OSError, match=r"rank 2 .* on a different machine"):
        map_for_all(100)
    importlib.reload(shared_pages)
    tensor = values(dist.get_rank(), 100)
    SharedMemory().all_reduce(tensor)
    return tensor


def one_cannot_map_it() -> Tensor:
    if dist.get_rank() == 1:
        shared_pages.torch = SimpleNamespace(from_file=refuse, uint8=torch.uint8, empty=torch.empty)
    try:
        with pytest.raises(OSError, match=r"rank 1 .* cannot have .*No such file"):
            map_for_all(100)
    finally:
        shared_pages.torch = torch
    tensor = values(dist.get_rank(), 100)
    SharedMemory().all_reduce(tensor)
    return tensor


def refuse(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("No such file or directory")


@pytest.mark.parametrize("program", [more_than_there_is, one_cannot_map_it, one_is_elsewhere])
def test_too_little_memory_is_an_error_on_all_ranks(ranks_of, program):
    expected = sum(values(r, 100) for r in range(3))
    for result in ranks_of("cpu", 3).run(program):
        assert torch.equal(result, expected)
