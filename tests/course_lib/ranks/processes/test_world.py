"""Process groups from call to call: made, kept, destroyed, forgotten."""

import os

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks import RankError, Ranks

K = 4


def world_sum() -> float:
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


def test_a_cell_that_makes_groups_can_be_run_again_and_again(ranks: Ranks) -> None:
    def cell() -> float:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x, group=mesh["rows"].get_group())
        dist.all_reduce(x, group=dist.new_group())
        return x.item()

    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    first = ranks.run(cell)
    for _ in range(10):
        assert ranks.run(cell) == first
    before = max(ranks.run(files))
    for _ in range(20):
        assert ranks.run(cell) == first
    assert max(ranks.run(files)) < before + 60  # as many groups as are kept until the next look


def test_tags_do_not_run_out(ranks: Ranks) -> None:
    def count(call: int) -> float:
        rank, x = dist.get_rank(), torch.zeros(1)
        for tag in range(300):
            if rank == 0:
                dist.send(torch.tensor([float(tag)]), 1, tag=1000 * call + tag)
            elif rank == 1:
                dist.recv(x, 0, tag=1000 * call + tag)
        return x.item()

    for call in range(5):
        assert ranks.run(count, call)[1] == 299


def test_a_group_without_the_others_is_allowed_where_pytorch_allows_it(ranks: Ranks) -> None:
    def local() -> float:
        pair = dist.get_rank() // 2
        group = dist.new_group([2 * pair, 2 * pair + 1], use_local_synchronization=True)
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x, group=group)
        return x.item()

    assert ranks.run(local) == ranks.run(local) == [1, 1, 5, 5]


@pytest.mark.parametrize("numbers", [{"rank": 0, "world_size": 9}, {"world_size": 5}, {"rank": 7}])
@pytest.mark.parametrize("on", ["cpu", "simulated"])
def test_a_wrong_rank_or_size_is_refused(ranks_of, on: str, numbers: dict[str, int]) -> None:
    with pytest.raises(RankError, match="these ranks are already in a process group"):
        ranks_of(on, K).run(lambda: dist.init_process_group("gloo", **numbers))


@pytest.mark.parametrize("on", ["cpu", "simulated"])
def test_the_environment_is_that_of_torchrun(ranks_of, on: str) -> None:
    def environment() -> list[str]:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        assert int(os.environ["MASTER_PORT"]) > 0
        return [os.environ[name] for name in names]

    assert ranks_of(on, K).run(environment) == [
        [str(r), str(r), "4", "4", "127.0.0.1"] for r in range(K)
    ]


def test_a_batch_of_anything_but_messages_is_refused_in_pytorch_s_words(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="Invalid ``p2p_op_list``"):
        ranks.run(lambda: dist.batch_isend_irecv([1, 2]))


def test_a_checkpoint_is_saved_in_the_background(ranks: Ranks, tmp_path) -> None:
    def checkpoint(folder: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.async_save({"a": torch.ones(2)}, checkpoint_id=folder).result()

    ranks.run(checkpoint, str(tmp_path))
    assert os.listdir(tmp_path)


def test_rpc_runs(ranks: Ranks) -> None:
    def remote() -> float:
        from torch.distributed import rpc

        rank = dist.get_rank()
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=K)
        x = rpc.rpc_sync(f"worker{(rank + 1) % K}", torch.add, (torch.ones(1), rank))
        rpc.shutdown()
        return x.item()

    assert ranks.run(remote) == [1, 2, 3, 4]


def test_without_the_meter_the_next_call_works_as_well() -> None:
    with Ranks(2, on="cpu", metered=False, timeout=60) as plain:
        plain.run(dist.destroy_process_group)
        assert plain.run(world_sum) == [1.0, 1.0]
