"""What simulated ranks keep from one call to the next."""

from __future__ import annotations

from course_lib.ranks._torch.thread_worlds import World
from course_lib.ranks.fabric.store import SimulatedStore
from course_lib.ranks.simulated.personal import (
    Classes,
    PersonalState,
    Surroundings,
    environment_with,
)


class Worlds:
    """The process groups and the store of K ranks, which stay between calls.

    Attributes:
        store: of all ranks.
        of_rank: per rank, its process groups.
        made: name of a group → the line on which it was made.
        classes: per rank, its copies of the notebook's.

    """

    def __init__(self, world_size: int) -> None:
        self.store = SimulatedStore(world_size)
        self.made: dict[str, str] = {}
        self.classes = [Classes() for _ in range(world_size)]
        self.of_rank = [World() for _ in range(world_size)]

    def states(self) -> list[PersonalState]:
        """Return with what each rank begins a call."""
        common = environment_with(_variables_of_all(len(self.of_rank)))
        return [
            PersonalState(classes, Surroundings(_variables_of_rank(rank), common))
            for rank, classes in enumerate(self.classes)
        ]


def _variables_of_rank(rank: int) -> dict[str, str]:
    """Return the environment variables that scripts expect, as under ``torchrun``, of one rank."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def _variables_of_all(world_size: int) -> dict[str, str]:
    """Return those that are the same on all ranks."""
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
