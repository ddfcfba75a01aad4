"""Sends find their receives, operations the ranks they wait for, and the figure shows both."""

import pytest
import torch
import torch.distributed as dist

from course_lib.collectives import ring_all_reduce
from course_lib.ranks import Event, Network, Ranks, compute
from course_lib.ranks.trace.bars import WAITS
from course_lib.ranks.trace.meetings import messages, waits

NETWORK = Network(latency=1e-3, bandwidth=1e8)


def ring_with_a_late_rank(late: int) -> None:
    if dist.get_rank() == late:
        compute(seconds=0.5)
    ring_all_reduce(torch.full((1000,), float(dist.get_rank())))


def messages_in_another_order() -> None:
    """Rank 0 sends 1 to 4 numbers, with two tags in two groups; rank 1 receives the last first."""
    pair, rank = dist.new_group([0, 1]), dist.get_rank()
    envelopes = [*enumerate([(1, None), (2, None), (1, pair), (2, pair)], 1)]
    start, peers = (dist.irecv, {"group_src": 0}) if rank else (dist.isend, {"group_dst": 1})
    if rank < 2:
        handles = [
            start(torch.ones(size), group=group, tag=tag, **peers)
            for size, (tag, group) in (reversed(envelopes) if rank else envelopes)
        ]
        for handle in handles:
            handle.wait()


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("on", ["simulated", "cpu"])
def test_tags_and_groups_tell_messages_apart(ranks_of, on: str, k: int) -> None:
    ranks = ranks_of(on, k)
    ranks.run(messages_in_another_order)
    events = ranks.trace.events
    pairs = messages(events)
    assert len(pairs) == 4
    assert all(events[send].bytes == events[receive].bytes for send, receive in pairs.items())


@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "reduce"])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_a_collective_waits_for_whom_it_needs(kind: str, k: int) -> None:
    """Rank r comes r seconds late; the root of a rooted one is rank 1."""
    root = None if kind == "all_reduce" else 1
    members = tuple(range(k))
    events = [Event(r, kind, members, root, 8, "float32", 1, r, k + 1.0, "") for r in members]
    last = k - 1
    expected = {
        "all_reduce": dict.fromkeys(range(last), (last, last)),
        "broadcast": {0: (1, 1)},
        "reduce": {1: (last, last)} if last > 1 else {},
    }[kind]
    assert {i: (wait.rank, wait.until) for i, wait in waits(events).items()} == expected


def test_who_is_done_before_the_other_comes_has_not_waited() -> None:
    """A send that is buffered ends long before its receive begins."""
    send = Event(0, "send", (0, 1), 1, 8, "float32", 1, 0.0, 0.1, "")
    receive = Event(1, "recv", (0, 1), 0, 8, "float32", 1, 2.0, 2.1, "")
    assert messages([receive, send]) == {1: 0}
    assert waits([receive, send]) == {}


@pytest.mark.parametrize("k", [2, 3, 4])
def test_the_figure_has_an_arrow_for_each_message_and_blanks_for_waiting(k: int) -> None:
    ranks = Ranks(k, on="simulated", network=NETWORK)
    ranks.run(ring_with_a_late_rank, 0)
    figure = ranks.trace.plot()
    (axes,) = figure.axes
    arrows = [text.arrow_patch for text in axes.texts if getattr(text, "arrow_patch", None)]
    assert len(arrows) == 2 * (k - 1) * k
    assert WAITS in {text.get_text() for text in figure.legends[0].get_texts()}
    assert "The longest wait: rank 1 in " in figure.alt
    assert "for rank 0, 500 ms" in figure.alt
    written = {text.get_text() for text in axes.texts}
    assert "waits for 0" in written
