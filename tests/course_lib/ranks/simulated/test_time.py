"""What comes first in virtual time comes first, and an exchange takes as long as its bytes.

The time of a collective is tested in `costs.test_collective_time`, that of a program with messages
in `test_against_events`, that of an algorithm by hand in `course_lib.test_cost_model`.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks.costs.computation import clock, compute
from course_lib.ranks.costs.network import Network
from course_lib.ranks.ranks import Ranks

ALPHA, BETA = 1.3e-3, 7e6
NETWORK = Network(ALPHA, BETA)
REL = 1e-9


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
