"""Every operation of the table is complete: its effect, its cost, and a way to ask for it."""

from course_lib.ranks._torch.collective_table import COLLECTIVES, KINDS
from course_lib.ranks.costs.collective_time import COSTS

MESSAGES = {"send", "recv"}


def test_every_collective_has_an_effect_a_cost_and_a_way_to_ask_for_it() -> None:
    collectives = KINDS.keys() - MESSAGES
    assert {name for name, kind in KINDS.items() if kind.effect} == collectives
    assert COSTS.keys() == collectives
    assert {collective.kind for collective in COLLECTIVES} == collectives
