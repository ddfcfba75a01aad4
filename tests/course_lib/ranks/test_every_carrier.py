"""One list of programs with what they must return, send and raise; every carrier runs all of it.

What students do wrong is a list of its own, with a page: `test_student_bugs`.
"""

import time
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from course_lib.collectives import ring_all_reduce
from course_lib.ranks import DeadlockError, MismatchError, RankError, Ranks, RanksError
from tests.helpers.carriers import CARRIERS, ranks_on
from tests.helpers.ddp_scenarios import SMALL_CAP, own_shards, steps
from tests.helpers.every_operation import everything


def large(carrier: str):
    return pytest.param(carrier, marks=pytest.mark.large)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("carrier", [name for name in CARRIERS if name != "cpu"])
def test_every_operation_gives_what_gloo_gives(carrier: str, k: int) -> None:
    # Small whole numbers: every order of adding them gives the same bits, in every dtype.
    for n in (0, 1, 5):
        results, expected = (ranks_on(on, k).run(everything, n) for on in (carrier, "cpu"))
        torch.testing.assert_close(results, expected, rtol=0, atol=0)


def here() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def on_views(columns: bool) -> list[list[float]]:
    """Return what collectives do to tensors; with `columns`, these have strides that no row has."""
    rank, k = here()

    def layout(x: torch.Tensor) -> torch.Tensor:
        return x if columns else x.contiguous()

    def own(add: float = 0.0) -> torch.Tensor:
        return layout((torch.arange(2.0 * k * k).view(2 * k, k) + 100 * rank + add)[::2].t())

    def empty(*shape: int) -> torch.Tensor:
        return layout(torch.zeros(*shape, 2)[..., 0].t())

    views = [own(), own(), *(empty(k, k) for _ in range(5)), empty(k)]
    dist.broadcast(views[0], 1)
    dist.all_reduce(views[1])
    rows, shapes = [empty(k) for _ in range(k)], [torch.zeros(k * k) for _ in range(k)]
    dist.all_to_all(rows, list(own()))
    dist.all_gather(shapes, own())
    dist.all_to_all_single(views[2], own())
    dist.all_to_all_single(views[3], own(), [1] * k, [1] * k)
    dist.scatter(views[4], [own(r) for r in range(k)] if rank == 1 else None, src=1)
    gathered = [empty(k, k) for _ in range(k)]
    dist.gather(own(), gathered if rank == 1 else None, dst=1)
    dist.reduce_scatter(views[5], [own(r) for r in range(k)])
    dist.all_gather_into_tensor(views[6], own()[rank])
    return [tensor.flatten().tolist() for tensor in (*views, *rows, *shapes, *gathered)]


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("carrier", [name for name in CARRIERS if name != "nccl"])  # it refuses
def test_columns_are_as_good_as_rows(carrier: str, k: int) -> None:
    ranks = ranks_on(carrier, k)
    assert ranks.run(on_views, True) == ranks.run(on_views, False)


# What is returned and sent ---------------------------------------------------------------------


def sum_by_a_ring() -> list[float]:
    x = torch.arange(12.0) + dist.get_rank()
    ring_all_reduce(x)
    return x.tolist()


def tags_in_another_order() -> list[float] | None:
    if dist.get_rank() == 0:
        for work in [dist.isend(torch.full((2,), float(tag)), 1, tag=tag) for tag in (1, 2)]:
            work.wait()
    if dist.get_rank() != 1:
        return None
    first, second = torch.empty(2), torch.empty(2)
    work = dist.irecv(second, 0, tag=2)
    dist.recv(first, 0, tag=1)
    while not work.is_completed():  # plain gloo would never say so
        time.sleep(0.001)
    return [first[0].item(), second[0].item()]


def receives_from_anyone() -> list[tuple[int | None, float]]:
    rank, k = here()
    x = torch.zeros(1)
    if rank:
        dist.send(torch.tensor([10.0 * rank]), 0, tag=5)
        return []
    return sorted((dist.recv(x, tag=5), x.item()) for _ in range(k - 1))


def receives_from_anyone_of_a_group() -> int | None:
    rank, k = here()
    group = dist.new_group([k - 2, k - 1])
    if rank == k - 2:
        return dist.recv(torch.zeros(1), group=group)
    if rank == k - 1:
        dist.send(torch.ones(1), k - 2, group=group)
    return None


def reduce_scatter_in_other_ways() -> list[list[float]]:
    import torch.distributed._functional_collectives as functional
    import torch.distributed.nn.functional as with_gradients

    rank, k = here()
    x = torch.arange(2.0 * k) + rank
    later = torch.empty(2)
    work = dist.reduce_scatter_tensor(later, x, async_op=True)
    work.get_future().wait()
    work.wait()
    assert work.is_completed()
    functionally = functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD) + 0
    y = x.clone().requires_grad_()
    differentiable = with_gradients.reduce_scatter(torch.empty(2), list(y.chunk(k)))
    differentiable.sum().backward()
    assert torch.equal(y.grad, torch.ones_like(y))
    return [piece.tolist() for piece in (later, functionally, differentiable)]


def groups_are_destroyed_and_made_again() -> float:
    x = torch.ones(1)
    dist.init_process_group("gloo")  # harmless: there is one
    dist.all_reduce(x)
    dist.destroy_process_group()
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.item()


def sum_of_chunks(rank: int, k: int) -> list[float]:
    total = k * torch.arange(2.0 * k) + k * (k - 1) / 2
    return total[2 * rank : 2 * rank + 2].tolist()


# Carriers that receive from a rank that is named, and not from whoever comes first.
FROM_ONE = ("nccl",)
# What runs on every rank, (rank, K) → what it must return there, and carriers without it.
PROGRAMS = [
    (sum_by_a_ring, lambda rank, k: (k * torch.arange(12.0) + k * (k - 1) / 2).tolist(), ()),
    (tags_in_another_order, lambda rank, k: [1.0, 2.0] if rank == 1 else None, ()),
    (
        receives_from_anyone,
        lambda rank, k: [] if rank else [(other, 10.0 * other) for other in range(1, k)],
        FROM_ONE,
    ),
    (receives_from_anyone_of_a_group, lambda rank, k: k - 1 if rank == k - 2 else None, FROM_ONE),
    (reduce_scatter_in_other_ways, lambda rank, k: [sum_of_chunks(rank, k)] * 3, ()),
    (groups_are_destroyed_and_made_again, lambda rank, k: float(k * k), ("sockets",)),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("fn", "returns", "but"), PROGRAMS)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_what_it_returns(carrier, fn, returns, but):
    if carrier in but:
        pytest.skip("it has no such thing")
    for k in (2, 3, 4):
        ranks = ranks_on(carrier, k)
        for _ in range(2):  # what the first call leaves behind is not in the way of the next
            assert ranks.run(fn) == [returns(rank, k) for rank in range(k)]


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_the_trace_of_a_ring(carrier: str, k: int) -> None:
    ranks, steps = ranks_on(carrier, k), 2 * (k - 1)
    ranks.run(sum_by_a_ring)
    for rank in range(k):
        assert ranks.trace.calls(rank) == {"send": steps, "recv": steps}
        assert ranks.trace.bytes_sent(rank) == steps * 48 // k
        assert ranks.trace.peers(rank) == {(rank + 1) % k, (rank - 1) % k}


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3)).double()


def weights(net: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in net.parameters()]


def ddp(hook: bool, unused: bool) -> list[torch.Tensor]:
    net = normed()
    wrapped = TorchDDP(net, bucket_cap_mb=SMALL_CAP, find_unused_parameters=unused)
    if hook:
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    steps(wrapped, net)
    return weights(net)


def fsdp() -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = normed()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    steps(net, net)
    return weights(net)


def with_uneven_inputs() -> list[torch.Tensor]:
    net = normed()
    wrapped = TorchDDP(net)
    with wrapped.join():
        steps(wrapped, net, own_shards()[: 2 + dist.get_rank()])
    return weights(net)


TRAIN = [
    partial(ddp, False, False),
    partial(ddp, True, False),
    partial(ddp, False, True),
    fsdp,
    with_uneven_inputs,
]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_pytorch_s_own_trains_as_on_plain_gloo(carrier: str, k: int) -> None:
    with Ranks(k, on="cpu", metered=False) as plain:
        for program in TRAIN:
            # In PyTorch 2.8, gloo's reduce-scatter sums where FSDP wants a mean.
            expected = plain.run(TRAIN[0] if program is fsdp else program)
            ours = ranks_on(carrier, k).run(program)
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


# What is raised --------------------------------------------------------------------------------


def a_message_that_nobody_waits_for_at_once() -> None:
    """A received tensor is unchanged: neither cut nor taken for another type."""
    if dist.get_rank() == 0:
        dist.isend(torch.full((4,), 7.0), 1).wait()
    elif dist.get_rank() == 1:
        x = torch.zeros(8)
        try:
            dist.irecv(x, 0).wait()
        finally:
            assert x.tolist() == [0.0] * 8


def swallows() -> None:
    with suppress(RuntimeError):
        dist.all_reduce(torch.ones(1 + dist.get_rank()))


def a_mismatch_that_was_not_waited_for() -> None:
    dist.all_reduce(torch.ones(2 + dist.get_rank()), async_op=True)


def splits_that_do_not_match() -> None:
    rows = [2, 1, 1] if dist.get_rank() == 1 else [1, 1, 1]
    dist.all_to_all_single(torch.zeros(3), torch.ones(sum(rows)), [1, 1, 1], rows)


def swallows_splits_that_do_not_match() -> None:
    with suppress(RuntimeError):
        splits_that_do_not_match()
    dist.barrier()


def a_list_of_unequal_pieces() -> None:
    dist.reduce_scatter(torch.zeros(2), [torch.ones(size) for size in (3, 2, 1)])


def a_message_to_itself() -> None:
    work = dist.irecv(torch.zeros(1), dist.get_rank())
    dist.isend(torch.ones(1), dist.get_rank()).wait()
    work.wait()


def receives_columns_from_anyone() -> None:
    dist.recv(torch.zeros(2, 2).t()[0])


def broadcasts_from_nobody() -> None:
    dist.broadcast(torch.ones(1), src=3)


def nobody_sends_to_one_who_receives_from_anyone() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.ones(1))


def negative_tag() -> None:
    dist.isend(torch.ones(1), (dist.get_rank() + 1) % 3, tag=-1)


def two_kinds_of_barrier() -> None:
    dist.monitored_barrier() if dist.get_rank() == 1 else dist.barrier()


def a_ddp_step_against_a_receive() -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    if dist.get_rank() == 0:
        dist.recv(torch.ones(1), src=1)
    model(torch.ones(2, 4)).sum().backward()


RAISE = [
    (a_message_that_nobody_waits_for_at_once, MismatchError, "sends 4 elements of float32", ()),
    (swallows, MismatchError, "collective #1", ()),
    (a_mismatch_that_was_not_waited_for, MismatchError, "3 elements", ()),
    (splits_that_do_not_match, MismatchError, "rank 1 sends 2 elements to rank 0, but", ()),
    (swallows_splits_that_do_not_match, MismatchError, "rank 1 sends 2 elements to rank 0", ()),
    (a_list_of_unequal_pieces, RankError, "3 input tensors of the same size", ()),
    (a_message_to_itself, RankError, "needs another rank: within a rank, copy", ()),
    (receives_columns_from_anyone, RankError, "receive into a new tensor y", FROM_ONE),
    (broadcasts_from_nobody, RankError, "broadcast with root rank 3", ()),
    (nobody_sends_to_one_who_receives_from_anyone, DeadlockError, "recv from any rank", FROM_ONE),
    (negative_tag, RankError, "tag must be 0 or more, got -1", ()),
    (two_kinds_of_barrier, MismatchError, "barrier monitored", ("sockets",)),
    (a_ddp_step_against_a_receive, DeadlockError, "recv from rank 1", ()),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("fn", "error", "message", "but"), RAISE)
@pytest.mark.parametrize("carrier", [*CARRIERS[:2], *map(large, CARRIERS[2:])])
def test_what_it_raises(carrier, fn, error, message, but):
    if carrier in but:
        pytest.skip("it has no such thing")
    ranks = ranks_on(carrier, 3)
    with pytest.raises(RanksError) as caught:
        ranks.run(fn)
    assert type(caught.value) is error, caught.value
    assert message in f"{caught.value} {caught.value.__cause__}"  # a socket tells who, its rank why
    assert ranks.run(dist.get_rank) == [0, 1, 2]
