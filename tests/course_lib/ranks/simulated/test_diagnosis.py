"""Errors on simulated ranks are found exactly, at once, and explained by rank and line."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import DeadlockError, RankError, RanksError
from course_lib.ranks.ranks import Ranks
from course_lib.ranks.simulated.baton import Stopped
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


def test_a_stop_that_nothing_explains_is_an_error() -> None:
    """A rank that ends in the middle of a call must not look as if it had returned `None`."""

    def stop() -> None:
        if dist.get_rank() == 1:
            raise Stopped

    ranks = Ranks(3, on="simulated")
    with pytest.raises(RanksError, match="Rank 1 stopped in the middle of the call"):
        ranks.run(stop)
    assert ranks.run(dist.get_rank) == [0, 1, 2]
