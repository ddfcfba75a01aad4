"""Virtual time of programs by hand is that of a second simulation; what comes first in it is first.

The time of a collective is tested in `costs.test_collective_time`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks.costs.computation import clock, compute
from course_lib.ranks.costs.network import Network
from course_lib.ranks.ranks import Ranks
from tests.helpers import collectives_by_hand as by_hand
from tests.helpers.event_simulation import EventSimulation

ALPHA, BETA = 1.3e-3, 7e6
NETWORK = Network(ALPHA, BETA)
REL = 1e-9

Step = list[tuple[str, int, int]]
"""The messages that a rank starts together and then waits for: (send or recv, peer, bytes)."""


def time_of(programs: list[list[Step]]) -> float:
    """Return when the last rank ends, by the second simulation."""
    actions = [
        [action for step in program for action in [*step, ("wait",)]] for program in programs
    ]
    ends = EventSimulation(actions, ALPHA, BETA).ends
    return max((end for mine in ends for end in mine if end is not None), default=0.0)


def cut(n: int, parts: int) -> list[int]:
    """Return the bytes of each piece of n float32 elements."""
    return [4 * len(piece) for piece in torch.empty(n, device="meta").tensor_split(parts)]


def ring_program(k: int, n: int) -> list[list[Step]]:
    size = cut(n, k)
    return [
        [
            [
                ("send", (r + 1) % k, size[(r - s + p) % k]),
                ("recv", (r - 1) % k, size[(r - s - 1 + p) % k]),
            ]
            for p in (0, 1)
            for s in range(k - 1)
        ]
        for r in range(k)
    ]


def halving_doubling_program(k: int, n: int) -> list[list[Step]]:
    power = 2 ** int(math.log2(k))
    piece = cut(n, power)
    programs: list[list[Step]] = [[] for _ in range(k)]

    def fold(kind: str, other: str) -> None:
        for r in range(power, k):
            programs[r].append([(kind, r - power, 4 * n)])
            programs[r - power].append([(other, r, 4 * n)])

    fold("send", "recv")
    owned = {r: range(power) for r in range(power)}
    history = []
    width = power // 2
    while width:
        keep = {r: owned[r][:width] if r // width % 2 == 0 else owned[r][width:] for r in owned}
        for r in range(power):
            mine, others = sum(piece[i] for i in keep[r]), sum(piece[i] for i in keep[r ^ width])
            programs[r].append([("send", r ^ width, others), ("recv", r ^ width, mine)])
        history.append((width, keep))
        owned, width = keep, width // 2
    for width, keep in reversed(history):
        for r in range(power):
            mine, others = sum(piece[i] for i in keep[r]), sum(piece[i] for i in keep[r ^ width])
            programs[r].append([("send", r ^ width, mine), ("recv", r ^ width, others)])
    fold("recv", "send")
    return programs


def run(k: int, fn: Callable[..., Any], n: int) -> float:
    """Run fn on a tensor of n elements that differs between ranks; return the virtual time."""

    def on_rank() -> torch.Tensor:
        x = torch.arange(n, dtype=torch.float32) + dist.get_rank()
        fn(x)
        return x

    ranks = Ranks(k, on="simulated", network=NETWORK)
    expected = sum(range(k)) + k * torch.arange(n, dtype=torch.float32)
    for result in ranks.run(on_rank):
        torch.testing.assert_close(result, expected)
    return ranks.trace.makespan


@pytest.mark.parametrize(
    ("fn", "program"),
    [(by_hand.ring, ring_program), (by_hand.halving_doubling, halving_doubling_program)],
)
def test_programs_by_hand(fn: Callable[..., Any], program: Callable[..., Any]) -> None:
    """Lengths that divide by K, that do not, and that are shorter than K."""
    for k, n in ((2, 1024), (3, 1000), (4, 1000), (8, 455), (5, 3)):
        assert run(k, fn, n) == pytest.approx(time_of(program(k, n)), rel=REL), (k, n)


@pytest.mark.parametrize("k", [2, 3, 4, 5, 8])
def test_an_exchange_without_collisions_takes_as_long_as_its_bytes(k: int) -> None:
    """All messages are posted at once; each rank's i-th goes where no other rank's i-th goes."""

    def exchange() -> None:
        rank, operations = dist.get_rank(), []
        for step in range(1, k):
            to, source = (rank + step) % k, (rank - step) % k
            operations.append(dist.P2POp(dist.isend, torch.ones(1000), to))
            operations.append(dist.P2POp(dist.irecv, torch.empty(1000), source))
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    with Ranks(k, on="simulated", network=NETWORK) as ranks:
        ranks.run(exchange)
    assert ranks.trace.makespan == pytest.approx((k - 1) * 4000 / BETA + ALPHA, rel=REL)


def _late_and_early(named: bool) -> list[tuple[int, float]]:
    """Rank 1 computes for long and then sends to rank 0; rank 2 sends at once."""
    rank, x = dist.get_rank(), torch.zeros(1000)
    if rank:
        compute(1.0 if rank == 1 else 0.0)
        dist.send(x + rank, 0)
        return []
    came = []
    if named:
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


@pytest.mark.parametrize("named", [True, False])
def test_what_happens_first_in_virtual_time_comes_first(named: bool) -> None:
    """Rank 1 runs before rank 2 on this computer, but its message leaves a second later."""
    message = ALPHA + 4000 / BETA
    (first, early), (second, late) = Ranks(3, on="simulated", network=NETWORK).run(
        _late_and_early, named
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
        seen = [work.is_completed()]
        compute(0.9 * (ALPHA + 4000 / BETA))
        seen.append(work.is_completed())
        compute(0.2 * (ALPHA + 4000 / BETA))
        return [*seen, work.is_completed()]

    results = Ranks(2, on="simulated", network=NETWORK).run(ask)
    assert results[0] == [False, False, True]
