"""Run a race at home in the same way as the leaderboard, on simulated ranks of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from course_lib.capstone.race import Job, Race, draw, write_tape
from course_lib.capstone.referee import Score, referee
from course_lib.ranks import Ranks, Trace, per_rank


def rehearse(
    train: Callable[[Job], Any], race: Race, *, seed: str = "rehearsal", plays: int = 1
) -> tuple[Score, Trace]:
    """Write the tapes of ``train(job)``, play them on new draws, return the score and last trace.

    Args:
        train: the function that races.
        race: the problem and the network.
        seed: the seed of the draws.
        plays: the number of draws.

    Raises:
        RanksError: a rank failed.
        TapeError: a rank did something that is not allowed, or that cannot be repeated.

    """
    mine = draw(race, f"{seed} written").inputs()

    def on_rank(mine: dict[str, Any]) -> Tensor:
        return write_tape(train, race, mine)

    with Ranks(race.world_size, on="simulated", network=race.network) as ranks:
        tapes = ranks.run(on_rank, per_rank(mine))
    return referee(race, tapes, [f"{seed} {number}" for number in range(plays)])
