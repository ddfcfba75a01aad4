"""Ranks that the tests of a module share: starting them anew for each would take the time."""

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


@pytest.fixture(scope="module")
def ranks_of(network: Network | None) -> Iterator[RanksOf]:
    """`ranks_of(on, world_size)`: the module's ranks of that kind, made when first asked for.

    Ranks on ``"nccl"`` are CPU ranks that talk as NCCL would: see `tests.helpers.emulated_nccl`.
    With EMULATED_NCCL=1 in the environment all CPU ranks do.
    """
    made: dict[tuple[str, int], Ranks] = {}
    always = "EMULATED_NCCL" in os.environ

    def get(on: str, world_size: int) -> Ranks:
        if (on, world_size) not in made:
            there = network if on == "simulated" else None
            place = "cpu" if on == "nccl" else on
            ranks = made[on, world_size] = Ranks(world_size, on=place, network=there, timeout=60)
            if on == "nccl" or (on == "cpu" and always):
                ranks.run(emulate, delay=0.002)
        return made[on, world_size]

    yield get
    for ranks in made.values():
        ranks.close()
