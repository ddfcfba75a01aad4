"""What comes first in virtual time comes first, and an exchange takes as long as its bytes.

The time of a collective is tested in `costs.test_collective_time`, that of an algorithm by hand in
`course_lib.test_cost_model`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks.costs.computation import clock, compute
from course_lib.ranks.costs.network import Network
from course_lib.ranks.ranks import Ranks

ALPHA, BETA = 1.3e-3, 7e6
NETWORK = Network(ALPHA, BETA)
REL = 1e-9
UNIT = 2.0**-10
"""Seconds of a latency, and of 1 KiB at a port, where programs count in these units: exactly."""


def _start(kind: str, *numbers: int) -> Any:
    """Start an action on this rank; return its handle. The last number is its size in KiB."""
    peer, x = numbers[0], torch.zeros(256 * numbers[-1])
    several = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    if kind == "send":
        return dist.isend(x, peer)
    if kind == "recv":
        return dist.irecv(x, peer)
    if kind == "gather":
        return dist.gather(x, several if dist.get_rank() == peer else None, peer, async_op=True)
    if kind == "broadcast":
        return dist.broadcast(x, peer, async_op=True)
    return dist.all_reduce(x, async_op=True)


def _ends(program: list[list[Any]]) -> list[float]:
    """Start all of this rank's actions, wait, and return when each of them ended, in units."""
    works = []
    for kind, *numbers in program[dist.get_rank()]:
        if kind == "compute":
            compute(numbers[0] * UNIT)
        else:
            works.append(_start(kind, *numbers))
    for work in works:
        work.wait()
    return [work._operation.end / UNIT for work in works]


RUNS: dict[str, tuple[list[list[Any]], list[list[float]]]] = {
    # name: (what each rank starts, when that ends); a send ends when its last byte has left
    "both ways at once": (
        [[("send", 1, 4), ("recv", 1, 4)], [("send", 0, 4), ("recv", 0, 4)]],
        [[4, 5], [4, 5]],
    ),
    "two to one": (
        [[("recv", 1, 4), ("recv", 2, 4)], [("send", 0, 4)], [("send", 0, 4)]],
        [[5, 9], [4], [8]],
    ),
    "one to two": (
        [[("send", 1, 4), ("send", 2, 4)], [("recv", 0, 4)], [("recv", 0, 4)]],
        [[4, 8], [5], [9]],
    ),
    "a late receive": ([[("send", 1, 4)], [("compute", 3), ("recv", 0, 4)]], [[7], [8]]),
    "an eager message": ([[("send", 1, 2)], [("compute", 9), ("recv", 0, 2)]], [[2], [9]]),
    "all first actions before second ones": (
        [
            [("send", 1, 4), ("send", 2, 4)],
            [("send", 2, 4), ("recv", 0, 4)],
            [("recv", 0, 4), ("recv", 1, 4)],
        ],
        [[8, 4], [8, 9], [5, 9]],
    ),
    "first come, first served": (
        [
            [("recv", 1, 4), ("recv", 2, 4), ("recv", 3, 4)],
            [("compute", 3), ("send", 0, 4)],
            [("send", 0, 4)],
            [("compute", 1), ("send", 0, 4)],
        ],
        [[13, 5, 9], [12], [4], [8]],
    ),
    "a late rank of a collective": (
        [[("all_reduce", 0, 4)], [("compute", 3), ("all_reduce", 0, 4)]],
        [[9], [9]],
    ),
    "no port is held while another is awaited": (
        [
            [("gather", 0, 2)],
            [("send", 2, 8), ("gather", 0, 2)],
            [("recv", 1, 8), ("gather", 0, 2)],
        ],
        [[11], [8, 10], [9, 2]],
    ),
    "two collectives in a row": (
        [[("broadcast", 0, 4), ("broadcast", 2, 4)]] * 3,
        [[8, 18], [9, 14], [5, 17]],
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_messages_and_collectives_share_the_ports(name: str) -> None:
    program, expected = RUNS[name]
    network = Network(UNIT, 1024 / UNIT, eager_below=3 * 1024)
    assert Ranks(len(program), on="simulated", network=network).run(_ends, program) == expected


def test_an_eager_message_does_not_overtake_a_larger_one() -> None:
    def program() -> list[float]:
        first, second = torch.zeros(1000), torch.zeros(2)
        if dist.get_rank() == 0:
            works = [dist.isend(first + 1, 1), dist.isend(second + 2, 1)]
        else:
            compute(1.0)
            works = [dist.irecv(first), dist.irecv(second)]  # from anyone, and in this order too
        for work in works:
            work.wait()
        return [first[0].item(), second[0].item()]

    network = Network(ALPHA, BETA, eager_below=100)
    assert Ranks(2, on="simulated", network=network).run(program)[1] == [1, 2]


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


def _late_and_early(from_named: bool) -> list[tuple[int, float]]:
    """Rank 1 computes for long and then sends to rank 0; rank 2 sends at once."""
    rank, x = dist.get_rank(), torch.zeros(1000)
    if rank:
        compute(1.0 if rank == 1 else 0.0)
        dist.send(x + rank, 0)
        return []
    came = []
    if from_named:
        parts = [torch.empty(1000) for _ in range(2)]
        works = [dist.irecv(part, source) for source, part in zip((1, 2), parts, strict=True)]
        for source, work in ((2, works[1]), (1, works[0])):
            work.wait()
            came.append((source, clock()))
        return came
    for _ in range(2):
        source = dist.recv(x)
        came.append((source, clock()))
    return came


@pytest.mark.parametrize("from_named", [True, False])
def test_what_happens_first_in_virtual_time_comes_first(from_named: bool) -> None:
    """Rank 1 runs before rank 2 on this computer, but its message leaves a second later."""
    message = ALPHA + 4000 / BETA
    (first, early), (second, late) = Ranks(3, on="simulated", network=NETWORK).run(
        _late_and_early, from_named
    )[0]
    assert (first, second) == (2, 1)
    assert early == pytest.approx(message, rel=REL)
    assert late == pytest.approx(1.0 + message, rel=REL)


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


def test_no_time_runs_backwards() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        compute(-1.0)
