"""Pictures of chunks say what the ranks really hold, and are drawn from what was really sent."""

import itertools

import pytest
import torch
import torch.distributed as dist

from course_lib.collectives import (
    central_all_reduce,
    direct_all_reduce,
    exchange,
    halving_doubling_all_reduce,
    one_shot_all_reduce,
    reduce_scatter,
    ring_all_reduce,
    tree_all_reduce,
)
from course_lib.figures import chunk_moments, draw_steps, marked_chunks, steps_in_words
from course_lib.figures._chunks import Moment, chunk_names
from course_lib.ranks import Network, Ranks

pytestmark = pytest.mark.usefixtures("fresh_matplotlib")


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts if text.get_text()]


@pytest.mark.parametrize("k", [2, 3, 4])
def test_a_sum_names_its_parts(k):
    whole = sum(marked_chunks(rank, k) for rank in range(k))
    assert chunk_names(whole) == [f"Σ{letter}" for letter in "abcd"[:k]]
    assert chunk_names(torch.zeros(2, k * k)) == ["", ""]
    assert chunk_names(marked_chunks(k - 1, k))[1] == f"b{k - 1}"
    if k > 2:
        assert chunk_names(marked_chunks(0, k) + marked_chunks(2, k))[0] == "a02"


@pytest.mark.parametrize("wrong", ["twice", "mixed"])
def test_what_no_collective_adds_up_is_refused(wrong):
    held = marked_chunks(0, 3)
    held = 2 * held if wrong == "twice" else held + held.roll(1, 0)
    with pytest.raises(ValueError, match=r"from each rank at most once .*, but this row is .*a0"):
        chunk_names(held)


def halves() -> tuple[list[torch.Tensor], torch.Tensor]:
    """The two steps of recursive doubling on four ranks, and a ring for comparison."""
    rank = dist.get_rank()
    held = marked_chunks(rank, 4)
    history = [held.clone()]
    for distance in (1, 2):
        incoming = torch.empty_like(held)
        exchange(held, rank ^ distance, incoming, rank ^ distance)
        held += incoming
        history.append(held.clone())
    return history, reduce_scatter(marked_chunks(rank, 4)).view(1, -1)


@pytest.fixture(scope="module")
def run():
    with Ranks(4, on="simulated") as ranks:
        results = ranks.run(halves)
        until = sorted(e.end for e in ranks.trace.operations)[15]  # 2 steps, 4 sends, 4 receives
        yield results, ranks.trace.__class__([e for e in ranks.trace.events if e.end <= until], 4)


def test_steps_show_what_ranks_held_and_an_arrow_for_each_message(run):
    results, trace = run
    history = [history for history, _ in results]
    figure = draw_steps(history, trace)
    first, one, two, legend, *_ = figure.axes
    assert {"a0", "d3"} <= set(texts(first))
    assert {"a01", "d23"} <= set(texts(one)) and "Σa" not in texts(one)
    assert texts(two).count("Σa") == 4
    assert "new in this step" in texts(legend)[0]
    arrows = [text for text in one.texts if getattr(text, "arrow_patch", None)]
    assert len(arrows) == 4 * 4  # four ranks, each gets something for all four chunks
    words = steps_in_words(history)
    assert words.startswith("At first: rank 0 a0 b0 c0 d0; rank 1 a1")
    assert words.endswith("rank 3 Σa Σb Σc Σd.")


def test_a_history_that_is_not_of_this_trace_is_refused(run):
    results, trace = run
    with pytest.raises(ValueError, match=r"has 2 items, .* a rank sends \d+ messages"):
        draw_steps([history[:2] for history, _ in results], trace)


NET = Network(latency=1e-3, bandwidth=100e6)
WATCHED = {
    "ring": ring_all_reduce,
    "central": central_all_reduce,
    "tree": tree_all_reduce,
    "halving-doubling": halving_doubling_all_reduce,
    "direct": direct_all_reduce,
    "one-shot": one_shot_all_reduce,
}


def moments_of(name: str, k: int, within: float = 0.0) -> tuple[list[Moment], Ranks]:
    ranks = Ranks(k, on="simulated", network=NET)
    pieces = 2 ** (k.bit_length() - 1) if name == "halving-doubling" else None
    return chunk_moments(ranks, WATCHED[name], 240_000, pieces, within=within), ranks


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


@pytest.mark.parametrize("nbytes", [64, 4 * 4 * 16 + 4])
def test_chunks_that_cannot_be_marked_are_refused(nbytes):
    with pytest.raises(ValueError, match="use a multiple of 16 that is at least 256"):
        chunk_moments(Ranks(4, on="simulated"), ring_all_reduce, nbytes)
