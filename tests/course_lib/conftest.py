"""Ranks that tests share: starting them anew for each file would take the time."""

import os
from collections.abc import Callable, Iterator

import pytest

from course_lib.ranks import Network, Ranks
from tests.helpers.emulated_nccl import emulate

RanksOf = Callable[[str, int], Ranks]


@pytest.fixture(scope="module")
def network() -> Network | None:
    """The network of simulated ranks; a module may give its own."""
    return None


@pytest.fixture(scope="session")
def processes() -> Iterator[dict[tuple[str, int], Ranks]]:
    """Ranks that are processes, by kind and number: four of them take a second to start."""
    made: dict[tuple[str, int], Ranks] = {}
    yield made
    for ranks in made.values():
        ranks.close()


@pytest.fixture(scope="module")
def ranks_of(network: Network | None, processes: dict[tuple[str, int], Ranks]) -> Iterator[RanksOf]:
    """`ranks_of(on, world_size)`: ranks of that kind, made when first asked for.

    Simulated ranks are the module's, CPU ranks all modules': a test must leave them in order. Ranks
    on ``"nccl"`` are CPU ranks that talk as NCCL does: see `tests.helpers.emulated_nccl`. With
    EMULATED_NCCL=1 in the environment all CPU ranks do.
    """
    simulated: dict[tuple[str, int], Ranks] = {}

    def get(on: str, world_size: int) -> Ranks:
        if on == "cpu" and "EMULATED_NCCL" in os.environ:
            on = "nccl"
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
