"""What comes first in virtual time comes first, and an exchange takes as long as its bytes.

The time of a collective is tested in `costs.test_collective_time`, that of an algorithm by hand in
`course_lib.test_cost_model`; here are the times of operations that share ports, counted by hand.
"""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks.costs.computation import clock, compute
from course_lib.ranks.costs.network import Network
from course_lib.ranks.ranks import Ranks

ALPHA, BETA = 1.3e-3, 7e6
NETWORK = Network(ALPHA, BETA)


def test_what_happens_first_in_virtual_time_comes_first() -> None:
    """Rank 1 runs before rank 2 on this computer, but its message leaves a second later."""

    def late_and_early() -> list[tuple[int, float]]:
        rank, x = dist.get_rank(), torch.zeros(1000)
        if rank:
            compute(1.0 if rank == 1 else 0.0)
            dist.send(x, 0)
            return []
        return [(dist.recv(x), clock()) for _ in range(2)]

    message = ALPHA + 4000 / BETA
    came = Ranks(3, on="simulated", network=NETWORK).run(late_and_early)[0]
    assert came == [(2, pytest.approx(message)), (1, pytest.approx(1.0 + message))]


def test_a_question_sees_what_happened_before_it() -> None:
    """Asking at time t must see a message that arrived before t, and none that comes later."""

    def ask() -> list[bool]:
        if dist.get_rank():
            dist.send(torch.ones(1000), 0)
            return []
        work = dist.irecv(torch.empty(1000), 1)
        answers = [work.is_completed()]
        compute(0.9 * (ALPHA + 4000 / BETA))
        answers.append(work.is_completed())
        compute(0.2 * (ALPHA + 4000 / BETA))
        return [*answers, work.is_completed()]

    results = Ranks(2, on="simulated", network=NETWORK).run(ask)
    assert results[0] == [False, False, True]


def test_a_receive_from_anyone_is_not_overtaken_by_a_later_one() -> None:
    def program() -> list[float]:
        if dist.get_rank() == 0:
            for value in (1.0, 2.0):
                dist.send(torch.tensor(value), 1)
            return []
        came = [torch.zeros(()) for _ in range(2)]
        works = [dist.irecv(came[0]), dist.irecv(came[1], 0)]
        for work in works:
            work.wait()
        return [x.item() for x in came]

    assert Ranks(2, on="simulated").run(program)[1] == [1, 2]


def test_no_time_runs_backwards() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        compute(-1.0)


def floats(count: int = 1) -> torch.Tensor:
    """Return a tensor that takes as many seconds on the network below."""
    return torch.zeros(count)


def message(count: int, sender: int, receiver: int) -> list[Any]:
    """Start this rank's part of a message; return its handle, if it has a part."""
    if dist.get_rank() == sender:
        return [dist.isend(floats(count), receiver)]
    return [dist.irecv(floats(count), sender)] if dist.get_rank() == receiver else []


def message_and_broadcast() -> list[Any]:
    """The broadcast goes to rank 2 first, and then to rank 1."""
    return [*message(4, 0, 1), dist.broadcast(floats(2), 0, async_op=True)]


def broadcast_and_messages() -> list[Any]:
    """Rank 2 comes a second late. Until then, the broadcast holds no port."""
    if dist.get_rank() == 2:
        compute(1.0)
    return [dist.broadcast(floats(2), 0, async_op=True), *message(4, 0, 1)]


def late_root_sends_more() -> list[Any]:
    """What the broadcast can send at once goes before what its root starts after it."""
    if dist.get_rank() == 0:
        compute(1.0)
    return [dist.broadcast(floats(2), 0, async_op=True), *message(1, 0, 2)]


def gather_at_a_busy_rank() -> list[Any]:
    """While rank 0's part of the gather waits for rank 1's port, its later message leaves."""
    rank, works = dist.get_rank(), message(6, 2, 1)
    parts = [floats(), floats(), floats()] if rank == 1 else None
    works.append(dist.gather(floats(), parts, 1, async_op=True))
    if rank == 0:
        compute(3.0)
    return works + message(1, 0, 2)


def two_of_one_group(pause: float) -> list[Any]:
    """The second begins on a rank when the first is over there, however early it is called."""
    works: list[Any] = [dist.broadcast(floats(2), 0, async_op=True)]
    compute(pause)
    parts = [floats(), floats(), floats()]
    return [*works, dist.all_gather(parts, floats(), async_op=True)]


def everyone_sends_to_everyone() -> list[Any]:
    """All first messages come before all second ones."""
    rank, works = dist.get_rank(), []
    for step in (1, 2):
        works.append(dist.isend(floats(), (rank + step) % 3))
        works.append(dist.irecv(floats(), (rank - step) % 3))
    return works


def eager_and_larger() -> list[Any]:
    """Two floats are too large to leave before their receive comes, four seconds late."""
    if dist.get_rank() == 0:
        return [dist.isend(floats(), 1), dist.isend(floats(2), 1)]
    compute(4.0)
    return [dist.irecv(floats(), 0), dist.irecv(floats(2), 0)] if dist.get_rank() == 1 else []


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("program", "ends"),
    [
        (message_and_broadcast, [[4, 8], [5, 9], [7]]),
        (broadcast_and_messages, [[8, 4], [9, 5], [7]]),
        (late_root_sends_more, [[6, 4], [7], [4, 5]]),
        (gather_at_a_busy_rank, [[7, 4], [7, 9], [6, 8, 5]]),
        (partial(two_of_one_group, 0.0), [[4, 9], [5, 9], [3, 9]]),
        (partial(two_of_one_group, 3.0), [[4, 9], [5, 9], [3, 9]]),
        (everyone_sends_to_everyone, [[1, 2, 2, 3]] * 3),
        (eager_and_larger, [[1, 6], [4, 7], []]),
    ],
)
def test_operations_that_share_ports(program, ends):
    """On a network with a latency of a second, where a float takes another second."""

    def on_rank() -> list[float]:
        works = program()
        for work in works:
            work.wait()
        return [work._operation.end for work in works]

    network = Network(latency=1.0, bandwidth=4.0, eager_below=8)
    assert Ranks(3, on="simulated", network=network).run(on_rank) == ends
