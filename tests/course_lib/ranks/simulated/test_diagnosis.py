"""Errors on simulated ranks are found exactly, at once, and explained by rank and line."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import DeadlockError, MismatchError, RankError, RanksError
from course_lib.ranks.ranks import Ranks
from tests.helpers.student_bugs import all_send_first, here


def test_eager_sends_hide_the_deadlock_of_small_messages() -> None:
    eager = Network(1e-3, 1e9, eager_below=100)
    Ranks(4, on="simulated", network=eager).run(all_send_first)

    def large() -> None:
        _, _, right, left = here()
        dist.send(torch.ones(25), right)
        dist.recv(torch.ones(25), left)

    with pytest.raises(DeadlockError):
        Ranks(4, on="simulated", network=eager).run(large)


def test_original_exception_and_first_rank() -> None:
    def fail_late() -> None:
        from course_lib.ranks.costs.computation import compute

        compute(0.1 * (4 - dist.get_rank()))
        raise ValueError(f"rank {dist.get_rank()}")

    with pytest.raises(RankError) as caught:
        Ranks(4, on="simulated").run(fail_late)
    # Rank 3 computes least, so in virtual time it fails first.
    assert caught.value.rank == 3
    assert isinstance(caught.value.original, ValueError)


def starts_what_another_rank_never_calls() -> None:
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(3), async_op=True)


def expects_more_than_it_gets() -> None:
    splits = [1 + (dist.get_rank() == 1), 1, 1]
    dist.all_to_all_single(torch.empty(sum(splits)), torch.ones(3), splits, [1, 1, 1])


def sums_into_one_place() -> None:
    dist.all_reduce(torch.ones(1).expand(3))


def sends_no_values() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(2, device="meta"), 1)
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(2), 0)


def waits_for_less_than_the_messages_take() -> None:
    dist.all_reduce(torch.ones(1000), async_op=True).wait(timedelta(seconds=1e-3))


def waits_a_while_for_anyone() -> None:
    if dist.get_rank() == 0:
        dist.irecv(torch.ones(1)).wait(timedelta(seconds=1))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("fn", "error", "message"),
    [
        (
            *(starts_what_another_rank_never_calls, DeadlockError),
            "Rank 1 called 1 collective fewer than ranks 0, 2",
        ),
        (expects_more_than_it_gets, MismatchError, "1 element to rank 1, but rank 1 expects 2"),
        (sums_into_one_place, RanksError, "all_reduce of rank"),
        (sends_no_values, MismatchError, "rank 0 is on the device meta and has no values"),
        (waits_for_less_than_the_messages_take, RankError, "messages have not arrived yet"),
        (waits_a_while_for_anyone, RankError, "ranks 1, 2 did not take part"),
    ],
)
def test_what_only_a_network_that_sees_all_can_tell(fn, error, message):
    with Ranks(3, on="simulated", network=Network(1e-2, 1e6)) as ranks:
        with pytest.raises(error) as caught:
            ranks.run(fn)
        assert type(caught.value) is error and message in str(caught.value)
        assert ranks.run(dist.get_rank) == [0, 1, 2]
