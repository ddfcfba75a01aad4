"""Ranks that tests share: starting them anew for each file would take the time."""

from collections.abc import Callable, Iterator

import pytest

from course_lib.ranks import Network, Ranks

RanksOf = Callable[[str, int], Ranks]


@pytest.fixture(scope="module")
def network() -> Network | None:
    """The network of simulated ranks; a module may give its own."""
    return None


@pytest.fixture(scope="session")
def processes() -> Iterator[dict[int, Ranks]]:
    """World size → ranks that are processes. Four of them take a second of processor time."""
    made: dict[int, Ranks] = {}
    yield made
    for ranks in made.values():
        ranks.close()


@pytest.fixture(scope="module")
def ranks_of(network: Network | None, processes: dict[int, Ranks]) -> Iterator[RanksOf]:
    """`ranks_of(on, world_size)`: ranks of that kind, made when first asked for.

    Simulated ranks are the module's, CPU ranks all modules': a test must leave them in order.
    """
    simulated: dict[int, Ranks] = {}

    def get(on: str, world_size: int) -> Ranks:
        made = simulated if on == "simulated" else processes
        if world_size not in made:
            there = network if on == "simulated" else None
            made[world_size] = Ranks(world_size, on=on, network=there, timeout=300)
        return made[world_size]

    yield get
    for ranks in simulated.values():
        ranks.close()
