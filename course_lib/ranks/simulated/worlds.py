"""What simulated ranks keep from one call to the next."""

from __future__ import annotations

from course_lib.ranks.fabric.store import SimulatedStore
from course_lib.ranks.fabric.torch_hooks import World
from course_lib.ranks.simulated.personal import Classes


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


def variables(rank: int, world_size: int) -> dict[str, str]:
    """Return the environment variables that scripts expect, as under ``torchrun``."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
