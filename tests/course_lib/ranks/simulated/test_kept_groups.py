"""Process groups outlive a call, and what is not made alike on all ranks is found."""

import sys
import types

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks.explain.errors import RankError
from course_lib.ranks.ranks import Ranks

sys.modules["kept_by_ranks"] = types.ModuleType("kept_by_ranks")


def kept():
    """Return what ranks keep between calls: of a module, since the globals of cells are sent."""
    return vars(sys.modules["kept_by_ranks"])


def test_a_model_wrapped_in_an_earlier_call() -> None:
    def wrap() -> None:
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 1)
        kept()[dist.get_rank()] = torch.nn.parallel.DistributedDataParallel(net)

    def step() -> torch.Tensor:
        model = kept()[dist.get_rank()]
        model.zero_grad()
        model(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()
        return model.module.weight.grad.clone()

    ranks = Ranks(3, on="simulated")
    ranks.run(wrap)
    for _ in range(2):
        torch.testing.assert_close(ranks.run(step), [torch.full((1, 3), 2.0)] * 3)


def test_rpc_which_has_one_agent_per_process_is_refused_at_once() -> None:
    def remote() -> None:
        from torch.distributed import rpc

        rpc.init_rpc(f"worker{dist.get_rank()}", rank=dist.get_rank(), world_size=2)

    ranks = Ranks(2, on="simulated")
    with pytest.raises(RankError, match=r"rpc needs a process for each rank.*on=\"cpu\""):
        ranks.run(remote)
    assert ranks.run(lambda: dist.get_rank()) == [0, 1]


def test_the_default_store_is_the_rank_s_own_and_nobody_waits_for_another_s_key() -> None:
    def fn() -> bytes:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"from {dist.get_rank()}", "here")
        if dist.get_rank() == 1:
            store.get("from 0")
        return bytes(store.get(f"from {dist.get_rank()}"))

    with pytest.raises(RankError, match="Rank 1 raised DistStoreError"):
        Ranks(3, on="simulated").run(fn)


def test_a_group_that_is_gone_says_how_to_get_another() -> None:
    def fn() -> None:
        group = dist.new_group()
        dist.destroy_process_group(group)
        dist.all_reduce(torch.ones(1), group=group)

    with pytest.raises(RankError, match="Make a new one with"):
        Ranks(3, on="simulated").run(fn)
