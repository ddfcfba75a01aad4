"""Virtual time is what the formulas say; where there is none, what a max-plus program says."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.ranks.costs.computation import clock, compute
from course_lib.ranks.costs.network import Network
from course_lib.ranks.ranks import Ranks
from tests.helpers import collectives_by_hand as by_hand

ALPHA, BETA = 1.3e-3, 7e6
NETWORK = Network(ALPHA, BETA)
WORLDS = [2, 3, 4, 8, 64]
SIZES = [1024, 1000, 64 * 7 + 5, 3]  # elements: divide by every K, by some, by none, fewer than K
REL = 1e-9

Step = list[tuple[str, int, int]]
"""The messages that a rank starts together and then waits for: (send or recv, peer, bytes)."""


def critical_path(programs: list[list[Step]]) -> float:
    """Return when the last rank ends, if every message costs ALPHA + bytes / BETA.

    Rank r leaves step i when its sends have left and its receives have arrived; a message starts
    when both ends have entered their steps. Its n-th send to a rank meets that rank's n-th
    receive from it. Ports must not be crowded: at most one send and one receive per step.
    """
    where: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    numbered: dict[tuple[int, int, str], int] = {}
    for r, program in enumerate(programs):
        for i, step in enumerate(program):
            for kind, peer, _ in step:
                numbered[r, i, kind] = len(where[kind, r, peer])
                where[kind, r, peer].append(i)

    @cache
    def leave(r: int, i: int) -> float:
        if i < 0:
            return 0.0
        end = enter = leave(r, i - 1)
        for kind, peer, nbytes in programs[r][i]:
            other = "recv" if kind == "send" else "send"
            j = where[other, peer, r][numbered[r, i, kind]]
            start = max(enter, leave(peer, j - 1))
            end = max(end, start + nbytes / BETA + (ALPHA if kind == "recv" else 0.0))
        return end

    for i in range(max(map(len, programs))):  # in this order the recursion stays shallow
        for r, program in enumerate(programs):
            if i < len(program):
                leave(r, i)
    return max(leave(r, len(program) - 1) for r, program in enumerate(programs))


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


def tree_program(k: int, n: int, up: bool = True) -> list[list[Step]]:
    programs: list[list[Step]] = [[] for _ in range(k)]
    widths = [2**i for i in range(math.ceil(math.log2(k)))]
    for width in widths if up else []:
        for r in range(width, k, 2 * width):
            programs[r].append([("send", r - width, 4 * n)])
            programs[r - width].append([("recv", r, 4 * n)])
    for width in reversed(widths):
        for r in range(width, k, 2 * width):
            programs[r].append([("recv", r - width, 4 * n)])
            programs[r - width].append([("send", r, 4 * n)])
    return programs


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


def chain_program(k: int, n: int, segments: int) -> list[list[Step]]:
    return [
        [
            step
            for size in cut(n, segments)
            for step in (
                [[("recv", r - 1, size)]] * (r > 0) + [[("send", r + 1, size)]] * (r + 1 < k)
            )
        ]
        for r in range(k)
    ]


def run(k: int, fn: Callable[..., Any], n: int, *args: Any, network: Network = NETWORK) -> float:
    """Run fn on a tensor of n elements that differs between ranks; return the virtual time."""

    def on_rank() -> torch.Tensor:
        x = torch.arange(n, dtype=torch.float32) + dist.get_rank()
        fn(x, *args)
        return x

    ranks = Ranks(k, on="simulated", network=network)
    first = sum(range(k)) + k * torch.arange(n, dtype=torch.float32)
    expected = torch.arange(n, dtype=torch.float32) if "broadcast" in fn.__name__ else first
    for result in ranks.run(on_rank):
        torch.testing.assert_close(result, expected)
    return ranks.trace.makespan


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("k", WORLDS)
@pytest.mark.parametrize(
    ("fn", "program"),
    [
        (by_hand.ring, ring_program),
        (by_hand.tree, tree_program),
        (by_hand.halving_doubling, halving_doubling_program),
    ],
)
def test_critical_path(fn: Callable[..., Any], program: Callable[..., Any], k: int, n: int) -> None:
    if k == 64 and fn is by_hand.ring and n != 1000:
        pytest.skip("8,064 messages once are enough")
    assert run(k, fn, n) == pytest.approx(critical_path(program(k, n)), rel=REL)


@pytest.mark.parametrize("n", [1024, 4096])
@pytest.mark.parametrize("k", [2, 4, 8])
def test_closed_forms(k: int, n: int) -> None:
    message = 4 * n / BETA
    assert run(k, by_hand.ring, n) == pytest.approx(2 * (k - 1) * (ALPHA + message / k), rel=REL)
    steps = math.log2(k)
    assert run(k, by_hand.tree, n) == pytest.approx(2 * steps * (ALPHA + message), rel=REL)
    assert run(k, by_hand.halving_doubling, n) == pytest.approx(
        2 * steps * ALPHA + 2 * (k - 1) / k * message, rel=REL
    )


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("k", WORLDS)
def test_central_crowds_the_ports_of_its_root(k: int, n: int) -> None:
    expected = 2 * ALPHA + 2 * (k - 1) * 4 * n / BETA
    assert run(k, by_hand.central, n) == pytest.approx(expected, rel=REL)


@pytest.mark.parametrize("segments", [1, 4, 7])
@pytest.mark.parametrize("k", WORLDS)
def test_pipelined_broadcast(k: int, segments: int) -> None:
    n = 4 * 7 * 100
    piece = 4 * n / segments / BETA
    expected = (k - 1) * (ALPHA + piece) + (segments - 1) * piece
    assert run(k, by_hand.pipelined_broadcast, n, segments) == pytest.approx(expected, rel=REL)
    expected = critical_path(chain_program(k, n, segments))
    assert run(k, by_hand.blocking_broadcast, n, segments) == pytest.approx(expected, rel=REL)


def test_pipelined_broadcast_of_uneven_segments() -> None:
    expected = critical_path(chain_program(4, 1003, 6))
    assert run(4, by_hand.blocking_broadcast, 1003, 6) == pytest.approx(expected, rel=REL)


def _all_reduce(x: torch.Tensor) -> None:
    dist.all_reduce(x)


def _broadcast(x: torch.Tensor) -> None:
    dist.broadcast(x, src=0)


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


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("k", WORLDS)
def test_all_reduce_costs_what_its_algorithm_costs(k: int, n: int) -> None:
    for name, program in (
        ("ring", ring_program),
        ("tree", tree_program),
        ("halving-doubling", halving_doubling_program),
    ):
        network = Network(ALPHA, BETA, all_reduce=name)  # type: ignore[arg-type]
        expected = critical_path(program(k, n))
        assert run(k, _all_reduce, n, network=network) == pytest.approx(expected, rel=REL), name
    central = run(k, _all_reduce, n, network=Network(ALPHA, BETA, all_reduce="central"))
    assert central == pytest.approx(2 * ALPHA + 2 * (k - 1) * 4 * n / BETA, rel=REL)


@pytest.mark.parametrize("k", WORLDS)
def test_broadcast_costs_what_its_algorithm_costs(k: int) -> None:
    n, s = 640, 5
    message = 4 * n / BETA
    times = {
        name: run(k, _broadcast, n, network=Network(ALPHA, BETA, broadcast=name, segments=s))  # type: ignore[arg-type]
        for name in ("tree", "central", "pipelined")
    }
    assert times["tree"] == pytest.approx(critical_path(tree_program(k, n, up=False)), rel=REL)
    if k & (k - 1) == 0:
        assert times["tree"] == pytest.approx(math.log2(k) * (ALPHA + message), rel=REL)
    assert times["central"] == pytest.approx(ALPHA + (k - 1) * message, rel=REL)
    expected = (k - 1) * (ALPHA + message / s) + (s - 1) * message / s
    assert times["pipelined"] == pytest.approx(expected, rel=REL)


@settings(max_examples=30)
@given(data=st.data(), k=st.integers(2, 5))
def test_random_programs(data: st.DataObject, k: int) -> None:
    """Rounds in which everyone passes a message along a random permutation, starting late."""
    rounds = data.draw(
        st.lists(st.tuples(st.permutations(range(k)), st.integers(0, 500)), min_size=1, max_size=6)
    )
    programs: list[list[Step]] = [
        [
            [("send", to[r], 4 * n), ("recv", to.index(r), 4 * n)] if to[r] != r else []
            for to, n in rounds
        ]
        for r in range(k)
    ]

    def on_rank() -> None:
        rank = dist.get_rank()
        for to, n in rounds:
            if to[rank] != rank:
                work = dist.isend(torch.zeros(n), to[rank])
                dist.recv(torch.empty(n), to.index(rank))
                work.wait()

    ranks = Ranks(k, on="simulated", network=NETWORK)
    ranks.run(on_rank)
    assert ranks.trace.makespan == pytest.approx(critical_path(programs), rel=REL)


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
