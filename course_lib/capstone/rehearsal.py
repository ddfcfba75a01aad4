"""A race at home: as the leaderboard runs it, on simulated ranks of this process."""

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
    """Write the tapes of ``train(job)``, play them on other draws, return score and last trace.

    Args:
        train: what is raced.
        race: the problem and the network.
        seed: of the draws.
        plays: on how many draws.

    Raises:
        RanksError: a rank failed.
        TapeError: what it did is not allowed, or cannot be done again.

    """
    mine = draw(race, f"{seed} written").inputs()

    def on_rank(mine: dict[str, Any]) -> Tensor:
        return write_tape(train, race, mine)

    with Ranks(race.world_size, on="simulated", network=race.network) as ranks:
        tapes = ranks.run(on_rank, per_rank(mine))
    return referee(race, tapes, [f"{seed} {number}" for number in range(plays)])
