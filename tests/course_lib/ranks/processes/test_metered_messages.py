"""Rules that gloo does not check, and features that it does not have."""

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks import DeadlockError, MismatchError, RankError, Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3, on="cpu", timeout=30) as ranks:
        yield ranks


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (torch.ones(4), torch.ones(4, dtype=torch.int32)),
        (torch.ones(4), torch.ones(8)),
        (torch.ones(8), torch.ones(4)),
    ],
)
def test_a_message_that_does_not_fit(sent: torch.Tensor, received: torch.Tensor, late: int) -> None:
    """On both kinds of ranks, whoever comes last, in the same words."""

    def program() -> None:
        rank = dist.get_rank()
        if rank == late:
            time.sleep(0.05)
        if rank == 0:
            dist.send(sent, 1)
        elif rank == 1:
            dist.recv(received, 0)

    said = []
    for on in ("cpu", "simulated"):
        with Ranks(2, on=on, timeout=30) as ranks:  # type: ignore[arg-type]
            with pytest.raises(MismatchError) as caught:
                ranks.run(program)
            said.append(caught.value.summary)
            assert ranks.run(lambda: dist.barrier()) == [None, None]
    assert said[0] == said[1]


@pytest.mark.parametrize("late", [0.0, 0.3])
@pytest.mark.parametrize("kept", [True, False])
def test_nor_does_one_that_nobody_waits_for_at_once(ranks: Ranks, kept: bool, late: float) -> None:
    """A received tensor is unchanged: neither cut nor taken for another type."""
    import builtins
    import time

    def program() -> None:
        if dist.get_rank() == 0:
            time.sleep(late)  # then the other one has ended, unless it waits
            works = [dist.isend(torch.full((4,), 7.0), 1)]
        elif dist.get_rank() == 1:
            builtins.received = torch.zeros(8)  # type: ignore[attr-defined]
            works = [dist.irecv(builtins.received, 0)]  # type: ignore[attr-defined]
        else:
            return
        for work in works if kept else ():
            assert work is not None
            work.wait()

    with pytest.raises(MismatchError, match="sends 4 elements of float32"):
        ranks.run(program)
    kept_on = ranks.run(lambda: getattr(builtins, "received", torch.zeros(8)).tolist())
    assert kept_on == [[0.0] * 8] * 3


def test_a_swallowed_mismatch_is_explained(ranks: Ranks) -> None:
    def swallows() -> None:
        with suppress(RuntimeError):
            dist.all_reduce(torch.ones(1 + dist.get_rank()))

    with pytest.raises(MismatchError, match="collective #1"):
        ranks.run(swallows)


@pytest.mark.parametrize("peer", [-1, 3])
def test_peers_are_checked_at_the_door(ranks: Ranks, peer: int) -> None:
    with pytest.raises(
        RankError, match=f"recv from rank {peer}: the ranks of this group have the numbers 0 to 2"
    ):
        ranks.run(lambda: dist.recv(torch.ones(1), peer))


def test_receives_from_anyone(ranks: Ranks) -> None:
    def gather() -> list[tuple[int | None, float]]:
        rank, x = dist.get_rank(), torch.zeros(1)
        if rank:
            dist.send(torch.tensor([10.0 * rank]), 0, tag=5)
            return []
        first = dist.recv(x, tag=5), x.item()
        return sorted([first, (dist.recv(x, tag=5), x.item())])

    assert ranks.run(gather)[0] == [(1, 10.0), (2, 20.0)]


def test_a_group_receives_from_anyone_of_its_own(ranks: Ranks) -> None:
    def gather() -> int | None:
        group = dist.new_group([1, 2])
        if dist.get_rank() == 1:
            return dist.recv(torch.zeros(1), group=group)
        if dist.get_rank() == 2:
            dist.send(torch.ones(1), 1, group=group)
        return None

    assert ranks.run(gather)[1] == 2


def test_nobody_sends_to_one_who_receives_from_anyone(ranks: Ranks) -> None:
    def program() -> None:
        if dist.get_rank() == 0:
            dist.recv(torch.ones(1))

    with pytest.raises(DeadlockError, match="recv from any rank"):
        ranks.run(program)


def test_lists_of_different_sizes(ranks: Ranks) -> None:
    def exchange() -> list[torch.Tensor]:
        rank = dist.get_rank()
        outputs = [torch.empty(i + rank + 1, 2) for i in range(3)]
        works = dist.all_to_all(
            outputs, [torch.full((rank + i + 1, 2), 10.0 * rank + i) for i in range(3)], None, True
        )
        works.wait()
        return outputs

    for rank, outputs in enumerate(ranks.run(exchange)):
        for i, output in enumerate(outputs):
            assert torch.equal(output, torch.full((i + rank + 1, 2), 10.0 * i + rank))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_reduce_scatter_in_every_way(ranks: Ranks, asynchronous: bool) -> None:
    def program() -> list[torch.Tensor]:
        import torch.distributed._functional_collectives as functional
        import torch.distributed.nn.functional as with_gradients

        rank, k = dist.get_rank(), dist.get_world_size()
        x = torch.arange(4.0 * k).view(2 * k, 2) + rank
        a, b = torch.empty(2, 2), torch.empty(2, 2)
        works = [
            dist.reduce_scatter_tensor(a, x, async_op=asynchronous),
            dist.reduce_scatter(b, list(x.chunk(k)), async_op=asynchronous),
        ]
        for work in filter(None, works):
            work.get_future().wait()
            work.wait()
            assert work.is_completed()
        c = functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD) + 0
        y = x.clone().requires_grad_()
        d = with_gradients.reduce_scatter(torch.empty(2, 2), list(y.chunk(k)))
        d.sum().backward()
        assert torch.equal(y.grad, torch.ones_like(y))
        return [a, b, c, d.detach()]

    for rank, results in enumerate(ranks.run(program)):
        expected = 3 * torch.arange(12.0).view(6, 2)[2 * rank : 2 * rank + 2] + 3
        assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("on", ["cpu", "simulated"])
def test_a_negative_tag_is_refused_on_all_kinds_of_ranks(on: Literal["cpu", "simulated"]) -> None:
    with Ranks(2, on=on) as ranks, pytest.raises(RankError, match="tag must be 0 or more, got -1"):
        ranks.run(lambda: dist.isend(torch.ones(1), 1 - dist.get_rank(), tag=-1))
