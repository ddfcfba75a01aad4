"""Ranks that tests share: starting them anew for each file would take the time."""

import pytest

from course_lib.ranks import Ranks
from tests.helpers.emulated_nccl import emulate


@pytest.fixture(scope="module")
def network():
    """The network of simulated ranks; a module may give its own."""
    return None


@pytest.fixture(scope="session")
def processes():
    """Ranks that are processes, by kind and number: four of them take a second to start."""
    made: dict[tuple[str, int], Ranks] = {}
    yield made
    for ranks in made.values():
        ranks.close()


@pytest.fixture(scope="module")
def ranks_of(network, processes: dict[tuple[str, int], Ranks]):
    """`ranks_of(on, world_size)`: ranks of that kind, made when first asked for.

    Simulated ranks are the module's, CPU ranks all modules': a test must leave them in order. Ranks
    on ``"nccl"`` are CPU ranks that talk as NCCL does: see `tests.helpers.emulated_nccl`.
    """
    simulated: dict[tuple[str, int], Ranks] = {}

    def get(on: str, world_size: int) -> Ranks:
        made = simulated if on == "simulated" else processes
        if (on, world_size) not in made:
            there = network if on == "simulated" else None
            place = "cpu" if on == "nccl" else on
            ranks = made[on, world_size] = Ranks(world_size, on=place, network=there, timeout=300)
            if on == "nccl":
                ranks.run(emulate, delay=0.002)
        return made[on, world_size]

    yield get
    for ranks in simulated.values():
        ranks.close()
