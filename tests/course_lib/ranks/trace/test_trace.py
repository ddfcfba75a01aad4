"""The records of a call, to be counted and drawn."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from course_lib.ranks import Event, Ranks, Trace


def exchanges() -> None:
    """Send from a helper, and receive from a function without a name, after several others."""
    peer, x = 1 - dist.get_rank(), torch.ones(3)

    def deeper(times: int) -> None:
        if times:
            return deeper(times - 1)

        handles = [send_to(x, peer), (lambda: dist.irecv(x.clone(), peer))()]
        for handle in handles:
            handle.wait()

    deeper(2)
    x.requires_grad_().register_hook(in_a_hook)
    x.sum().backward()


def send_to(x: torch.Tensor, peer: int) -> dist.Work | None:
    return dist.isend(x, peer)


@torch.no_grad()
def in_a_hook(grad: torch.Tensor) -> None:
    dist.all_reduce(grad.clone())


def test_simulated_ranks_know_the_lines_of_each_launch(ranks_of) -> None:
    ranks = ranks_of("simulated", 2)
    ranks.run(exchanges)
    outer = ("exchanges", 13), ("exchanges.deeper", 5)
    outside = ("exchanges", 15)
    expected = [
        ("send", (*outer, ("send_to", 2))),
        ("recv", outer),
        ("all_reduce", (outside, ("in_a_hook", 3))),  # its decorator is its first line
    ]
    for rank in range(2):
        own_events = [event for event in ranks.trace.operations if event.rank == rank]
        own_events.sort(key=lambda event: (event.start, event.turn))
        assert [(event.kind, event.lines) for event in own_events] == expected


def swaps_of_other_lengths() -> None:
    """Rank r sends r + to elements to rank `to`: what it keeps does not travel."""
    me, k = dist.get_rank(), dist.get_world_size()
    lengths = [me + other for other in range(k)]
    arrived = torch.empty(sum(lengths))
    dist.all_to_all_single(arrived, torch.ones(sum(lengths)), lengths, lengths)
    pieces = [torch.ones(length) for length in lengths]
    dist.all_to_all([torch.empty(length) for length in lengths], pieces)


@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize("on", ["simulated", "cpu"])
def test_what_an_all_to_all_sends(ranks_of, on: str, k: int) -> None:
    ranks = ranks_of(on, k)
    ranks.run(swaps_of_other_lengths)
    for rank in range(k):
        to_others = sum(rank + other for other in range(k) if other != rank)
        assert ranks.trace.bytes_sent(rank) == 2 * 4 * to_others


def test_computation_is_what_lies_between_the_waits(ranks: Ranks, tmp_path) -> None:
    def program() -> None:
        time.sleep(0.1)
        if dist.get_rank() == 0:
            while len(list(tmp_path.iterdir())) < 2:  # until the others are about to wait for it
                time.sleep(0.01)
            time.sleep(0.5)
        else:
            (tmp_path / str(dist.get_rank())).touch()
        dist.barrier()

    ranks.run(program)
    spent = [
        sum(e.end - e.start for e in ranks.trace.events if e.rank == r and e.kind == "compute")
        for r in range(3)
    ]
    assert spent[0] >= 0.6
    assert all(0.1 <= seconds < spent[0] for seconds in spent[1:])


def example(world_size: int) -> Trace:
    """Return events that overlap: every rank computes while two buckets travel."""
    events = []
    for rank in range(world_size):
        events += [
            Event(rank, "compute", (), None, 0, "", 0, 0.0, 3.0, ""),
            Event(rank, "all_reduce", (0,), None, 8, "float32", 1, 1.0, 4.0, ""),
            Event(rank, "all_reduce", (0,), None, 8, "float32", 2, 2.0, 5.0, ""),
            Event(rank, "broadcast", (0,), 0, 8, "float32", 3, 5.0, 6.0, ""),
        ]
    return Trace(events, world_size)


@pytest.mark.parametrize("k", [1, 4, 16])
def test_the_figure_tells_without_colour(k: int) -> None:
    figure = example(k).plot(title="two buckets")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"rank {r}" for r in range(k)]
    spans = [path.get_extents() for bars in axes.collections for path in bars.get_paths()]
    assert len(spans) == 4 * k
    # Nothing hides anything: bars of one rank never lie on one another.
    for i, span in enumerate(spans):
        for other in spans[i + 1 :]:
            apart_in_time = span.x1 <= other.x0 + 1e-9 or other.x1 <= span.x0 + 1e-9
            apart_in_lane = span.y1 <= other.y0 + 1e-9 or other.y1 <= span.y0 + 1e-9
            assert apart_in_time or apart_in_lane
    hatches = {handle.get_label(): handle.get_hatch() for handle in figure.legends[0].get_patches()}
    assert set(hatches) == {"compute", "all_reduce", "broadcast"}
    assert len({hatch or "" for hatch in hatches.values()}) == 3


@pytest.mark.parametrize("on", ["cpu", "simulated"])
def test_groups_are_told_apart(on: str, tmp_path) -> None:
    def program() -> None:
        dist.broadcast(torch.ones(4, dtype=torch.float64), src=2)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dist.all_reduce(torch.ones(5), group=mesh.get_group("tp"))
        dist.all_reduce(torch.ones(5), group=mesh.get_group("dp"))
        pair = dist.new_group([1, 3])
        if dist.get_rank() in (1, 3):
            dist.all_reduce(torch.ones(5), group=pair)
        dist.all_reduce(torch.ones(5))

    with Ranks(4, on=on, timeout=60) as ranks:
        ranks.run(program)
        trace = ranks.trace
    first = trace.operations[0]
    assert (first.kind, first.peer, first.bytes, first.dtype) == ("broadcast", 2, 32, "float64")
    groups = [(e.group_name, e.group) for e in trace.operations if e.rank == 3][-4:]
    assert groups[:2] == [("mesh_tp", (2, 3)), ("mesh_dp", (1, 3))]
    assert groups[2][0].startswith("group ") and groups[2][1] == (1, 3)
    assert groups[3] == ("", (0, 1, 2, 3))
    assert [trace.bytes_sent(rank, group="mesh_tp") for rank in range(4)] == [20] * 4
    assert trace.bytes_sent(0) == 2 * 20 + trace.bytes_sent(0, group="")
    assert "mesh_tp: 2, 3" in trace.table()
    figure = trace.plot()
    legend = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"all_reduce", "all_reduce, mesh_tp", "all_reduce, mesh_dp"} <= legend
    assert "mesh_dp: 1, 3" in figure.alt
    trace.to_chrome(tmp_path / "trace.json")
    assert '"group_name": "mesh_tp"' in (tmp_path / "trace.json").read_text()


def test_a_part_of_a_trace_begins_at_zero() -> None:
    part = example(2).between(1.5, 5.0)
    assert [(event.rank, event.seq, event.start) for event in part.events] == [(0, 2, 0), (1, 2, 0)]
    assert example(2).between(0).events == example(2).events
    assert part.makespan == 3.0


def test_an_empty_trace_says_so() -> None:
    with pytest.raises(ValueError, match="the trace is empty"):
        Trace([], 4).plot()
