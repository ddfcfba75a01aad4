"""Every operation of the table is complete: its effect, its cost, and a call in the tests."""

from __future__ import annotations

import pytest

from course_lib.ranks import Network, Ranks
from course_lib.ranks._torch.collective_table import COLLECTIVES, KINDS
from course_lib.ranks.costs.collective_time import COSTS, collective_bytes, collective_time
from tests.helpers.every_operation import everything

MESSAGES = {"send", "recv"}
NETWORK = Network(latency=1e-3, bandwidth=1e6)


def test_every_collective_has_an_effect_a_cost_and_a_way_to_ask_for_it() -> None:
    collectives = KINDS.keys() - MESSAGES
    assert {name for name, kind in KINDS.items() if kind.effect} == collectives
    assert COSTS.keys() == collectives
    assert {each.kind for each in COLLECTIVES} == collectives


@pytest.mark.parametrize("kind", sorted(COSTS))
@pytest.mark.parametrize("k", [2, 3, 4, 8])
def test_a_collective_takes_a_latency_and_its_bytes(kind: str, k: int) -> None:
    """Nobody knows of the others in less than a latency, nor gets bytes faster than a link."""
    nbytes = 24 * 1000
    sent = collective_bytes(kind, NETWORK, k, nbytes)
    seconds = collective_time(kind, NETWORK, k, nbytes)
    least = NETWORK.latency + max(sent) / NETWORK.bandwidth
    assert seconds >= least * (1 - 1e-9)
    assert (sum(sent) > 0) == (kind != "barrier")


def test_the_tests_call_every_operation() -> None:
    ranks = Ranks(2, on="simulated")
    ranks.run(everything, 3)
    assert {event.kind for event in ranks.trace.events} - {"compute"} == KINDS.keys()
