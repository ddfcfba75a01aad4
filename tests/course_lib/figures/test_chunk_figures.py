"""Pictures of chunks say what the ranks really hold, and are drawn from what was really sent."""

import pytest
import torch
import torch.distributed as dist

from course_lib.collectives import exchange, reduce_scatter, ring_all_reduce
from course_lib.figures import (
    chunk_names,
    draw_outcomes,
    draw_steps,
    marked_chunks,
    steps_in_words,
)
from course_lib.ranks import Ranks

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


def test_one_rank_has_no_sums():
    assert chunk_names(marked_chunks(0, 1)) == ["a0"]


@pytest.mark.parametrize("wrong", ["twice", "mixed"])
def test_what_no_collective_adds_up_is_refused(wrong):
    held = marked_chunks(0, 3)
    held = 2 * held if wrong == "twice" else held + held.roll(1, 0)
    with pytest.raises(ValueError, match=r"to one another: .*a0"):
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


def test_bold_is_what_is_new(run):
    results, trace = run
    figure = draw_steps([history for history, _ in results], trace)
    weights = {t.get_text(): t.get_weight() for t in figure.axes[1].texts if t.get_text()}
    assert weights["a01"] == "bold" and weights["rank 0"] == "normal"


def test_a_history_that_is_not_of_this_trace_is_refused(run):
    results, trace = run
    with pytest.raises(ValueError, match="has 2 moments, so each rank must send 1 messages"):
        draw_steps([history[:2] for history, _ in results], trace)


def test_outcomes_beside_one_another(run):
    results, _ = run
    before = [history[0] for history, _ in results]
    figure = draw_outcomes({"before": before, "after": [chunk for _, chunk in results]})
    assert "Σc" in texts(figure.axes[1]) and "Σc" not in texts(figure.axes[0])
    assert [axes.get_title() for axes in figure.axes][:2] == ["before", "after"]


def test_the_ring_of_the_course_moves_these_chunks():
    with Ranks(3, on="simulated") as ranks:

        def run() -> list[str]:
            held = marked_chunks(dist.get_rank(), 3)
            ring_all_reduce(held)
            return chunk_names(held)

        assert ranks.run(run) == [["Σa", "Σb", "Σc"]] * 3
