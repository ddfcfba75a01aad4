"""Pictures of chunks say what the ranks really hold, and are drawn from what was really sent."""

import itertools

import pytest

from course_lib import collectives
from course_lib.figures import chunk_moments, diagrams
from course_lib.figures._chunks import draw_circle
from course_lib.ranks import Network, Ranks

pytestmark = pytest.mark.usefixtures("fresh_matplotlib")


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts if text.get_text()]


NET = Network(latency=1e-3, bandwidth=100e6)
WATCHED = {
    "ring": collectives.ring_all_reduce,
    "central": collectives.central_all_reduce,
    "tree": collectives.tree_all_reduce,
    "halving-doubling": collectives.halving_doubling_all_reduce,
    "direct": collectives.direct_all_reduce,
    "one-shot": collectives.one_shot_all_reduce,
}


def moments_of(name: str, k: int):
    ranks = Ranks(k, on="simulated", network=NET)
    pieces = 2 ** (k.bit_length() - 1) if name == "halving-doubling" else None
    return chunk_moments(ranks, WATCHED[name], 240_000, pieces), ranks


def parts(name: str, k: int) -> set[str]:
    """The ranks whose chunks are in a sum: those of "b02" are 0 and 2."""
    return set(map(str, range(k))) if name.startswith("Σ") else set(name[1:])


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("name", WATCHED)
def test_a_rank_gets_only_what_a_sender_held(name, k):
    moments, ranks = moments_of(name, k)
    rows = range(len(moments[0].held[0]))
    letters = "abcd"
    assert moments[0].held == [[f"{letters[row]}{rank}" for row in rows] for rank in range(k)]
    if k > 1:
        assert moments[-1].held == [[f"Σ{letters[row]}" for row in rows]] * k
    assert moments[-1].time == pytest.approx(ranks.trace.makespan)
    for before, after in itertools.pairwise(moments):
        for rank in range(k):
            senders = [event.peer for event in after.arrived if event.rank == rank]
            for row in rows:
                had, has = before.held[rank][row], after.held[rank][row]
                sent = [parts(before.held[sender][row], k) for sender in senders]
                assert parts(has, k) <= parts(had, k).union(*sent)
                assert had == has or senders
    received = [event for event in ranks.trace.operations if event.kind == "recv"]
    assert sum(len(moment.arrived) for moment in moments) == len(received)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_on_a_circle_stands_what_ranks_hold_and_what_travelled(k):
    moments, _ = moments_of("ring", k)
    for number, (before, now) in enumerate(itertools.pairwise(moments), start=1):
        (axes,) = draw_circle(moments, number).axes
        held = [name for row in now.held for name in row]
        senders = [before.held[event.peer] for event in now.arrived]
        moved, drawn = texts(axes)[:k], texts(axes)[k:-k]
        assert drawn == held
        assert all(name in row for name, row in zip(moved, senders, strict=True))


def test_below_each_adapter_stands_what_passes_its_cable():
    leaving = {"flat ring": [0, 7, 0, 9], "two levels": [1.5, 2.5, 3.5, 4.5]}
    (axes,) = diagrams.two_levels(leaving, per_node=2).axes
    drawn = texts(axes)
    assert all(drawn.count(text) == 1 for text in ("1.5", "2.5", "3.5", "4.5", "4", "8"))
    assert drawn.count("7") == drawn.count("9") == 2  # of a GPU, and of its node
    assert drawn.count("NIC") == 4 + 2
