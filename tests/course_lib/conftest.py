"""Ranks that the tests of a module share: starting them anew for each would take the time."""

from collections.abc import Callable, Iterator

import pytest

from course_lib.ranks import Network, Ranks

RanksOf = Callable[[str, int], Ranks]


@pytest.fixture(scope="module")
def network() -> Network | None:
    """The network of simulated ranks; a module may give its own."""
    return None


@pytest.fixture(scope="module")
def ranks_of(network: Network | None) -> Iterator[RanksOf]:
    """`ranks_of(on, world_size)`: the module's ranks of that kind, made when first asked for."""
    made: dict[tuple[str, int], Ranks] = {}

    def get(on: str, world_size: int) -> Ranks:
        if (on, world_size) not in made:
            there = network if on == "simulated" else None
            made[on, world_size] = Ranks(world_size, on=on, network=there, timeout=300)
        return made[on, world_size]

    yield get
    for ranks in made.values():
        ranks.close()
