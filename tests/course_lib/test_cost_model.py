"""The formulas against algebra, and against the virtual clock on which the algorithms run."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from course_lib import collectives, cost_model
from course_lib.bucketing import best_bucket_bytes, overlapped_time
from course_lib.collectives import pipelined_ring
from course_lib.collectives.tuned import ALGORITHMS
from course_lib.cost_model import Link, fit_link
from course_lib.ranks import Ranks
from course_lib.ranks.costs.network import Network
from tests.helpers.folding import over

NETWORK = Network(latency=1.3e-3, bandwidth=7e6)
WITH_OVERHEAD = Network(latency=1.3e-3, bandwidth=7e6, overhead=0.4e-3)
LENGTH = 840  # divides by 1 … 8
NBYTES = 4 * LENGTH

WITH_FORMULA = {
    "naive_broadcast": cost_model.naive_broadcast_time,
    "tree_broadcast": cost_model.tree_broadcast_time,
    "pipelined_broadcast": cost_model.pipelined_broadcast_time,
    "reduce": cost_model.tree_broadcast_time,
    "reduce_scatter": cost_model.ring_reduce_scatter_time,
    "all_gather": cost_model.ring_reduce_scatter_time,
    "all_to_all": cost_model.all_to_all_time,
    "central_all_reduce": cost_model.central_all_reduce_time,
    "tree_all_reduce": cost_model.tree_all_reduce_time,
    "ring_all_reduce": cost_model.ring_all_reduce_time,
    "simple_ring_all_reduce": cost_model.ring_all_reduce_time,
    "halving_doubling_all_reduce": cost_model.halving_doubling_all_reduce_time,
    "direct_all_reduce": cost_model.direct_all_reduce_time,
    "one_shot_all_reduce": cost_model.one_shot_all_reduce_time,
}


def run_one(name: str) -> None:
    getattr(collectives, name)(torch.ones(LENGTH))


@over("name", WITH_FORMULA)
@over("k, network", [(3, NETWORK), (4, WITH_OVERHEAD), (5, WITH_OVERHEAD)])
def test_an_algorithm_takes_the_time_of_its_formula(k, name, network):
    ranks = Ranks(k, on="simulated", network=network)
    ranks.run(run_one, name)
    formula: Callable[..., float] = WITH_FORMULA[name]
    expected = formula(NBYTES, k, network)
    if name in ("tree_broadcast", "tree_all_reduce") and k not in (1, 2, 4, 8):
        # The farthest of the ranks that there are is fewer messages away from the root.
        assert expected - k.bit_length() * network.time(0) < ranks.trace.makespan < expected
    else:
        assert ranks.trace.makespan == pytest.approx(expected, rel=1e-9, abs=1e-15)


@over("k", [2, 3, 8, 32])
def test_an_overhead_is_paid_once_for_each_message_in_a_row(k):
    """Nothing but o: what is left of each formula is how many messages follow one another."""
    only = Link(latency=0.0, bandwidth=math.inf, overhead=1.0)
    log = math.ceil(math.log2(k))
    assert cost_model.ring_all_reduce_time(1, k, only) == 2 * (k - 1) * 2
    assert cost_model.tree_all_reduce_time(1, k, only) == 2 * log * 2
    assert cost_model.central_all_reduce_time(1, k, only) == 2 * (k - 1) + 2
    assert cost_model.direct_all_reduce_time(1, k, only) == 2 * (k - 1) + 2
    assert cost_model.one_shot_all_reduce_time(1, k, only) == k - 1 + 1


@over("k", [32, 64])
def test_with_an_overhead_few_messages_win_where_many_ranks_meet(k):
    network = Network(latency=2e-6, bandwidth=1e10, overhead=2e-6)
    free = Network(latency=2e-6, bandwidth=1e10)
    for nbytes in (4, 4 * k):
        assert cost_model.fastest_all_reduce(nbytes, k, free) == "one_shot"
        assert cost_model.fastest_all_reduce(nbytes, k, network) == "halving_doubling"


@over(
    "k, nbytes, milliseconds",
    [
        (12, 48, {"direct": 2.00, "one_shot": 1.01, "central": 2.01, "ring": 22.0}),
        (8, 800_000, {"direct": 16.0, "halving_doubling": 20.0, "ring": 28.0}),
        (12, 1_200_000, {"direct": 24.0, "ring": 44.0}),
    ],
)
def test_ranks_that_send_to_all_at_once_pay_the_latency_once(k, nbytes, milliseconds):
    """The claim is arithmetic, α = 1 ms and β = 100 MB/s; formula and simulated ranks both show it.

    Direct: 2α + 2(K-1) n/(Kβ) = 2 + 22 = 24 ms for 12 ranks and 1.2 MB. The ring: 22α + 22 = 44 ms.
    """
    network = Network(latency=1e-3, bandwidth=1e8)
    ranks = Ranks(k, on="simulated", network=network)
    for name, expected in milliseconds.items():
        ranks.run(lambda name=name: ALGORITHMS[name](torch.ones(nbytes // 4), None))
        assert 1e3 * ranks.trace.makespan == pytest.approx(expected, abs=0.006), name
        formula = cost_model.ALL_REDUCE_TIMES[name](nbytes, k, network)
        assert ranks.trace.makespan == pytest.approx(formula, rel=1e-9), name


def test_an_overhead_adds_its_messages_to_the_time():
    """On 64 ranks, o = 5 µs: 63 messages and one end, twice that, 2 · 6 messages with two ends."""
    for name, microseconds in (("one_shot", 64 * 5), ("central", 2 * 64 * 5), ("tree", 12 * 2 * 5)):
        formula = cost_model.ALL_REDUCE_TIMES[name]
        without, busy = (formula(4, 64, Link(10e-6, 12.5e9, o)) for o in (0.0, 5e-6))
        assert 1e6 * (busy - without) == pytest.approx(microseconds)


def test_where_only_neighbours_have_a_cable_the_ring_wins():
    times = {}
    for topology in ("switch", "ring"):
        network = Network(1e-3, 1e8, topology=topology)
        ranks = Ranks(12, on="simulated", network=network)
        for name in cost_model.ALL_REDUCE_TIMES:
            ranks.run(lambda name=name: ALGORITHMS[name](torch.ones(300_000), None))
            times[topology, name] = ranks.trace.makespan
    assert times["ring", "ring"] == pytest.approx(times["switch", "ring"])
    others = [name for name in cost_model.ALL_REDUCE_TIMES if name != "ring"]
    assert all(times["ring", name] > 2 * times["ring", "ring"] for name in others)
    assert times["switch", "direct"] < times["switch", "ring"]


@over("k, nbytes", [(3, 48), (6, 48_000), (12, 4_800_000)])
def test_without_an_overhead_direct_or_one_shot_wins_everywhere(k, nbytes):
    network = Network(latency=1e-3, bandwidth=1e8)
    ranks, times = Ranks(k, on="simulated", network=network), {}
    for name in cost_model.ALL_REDUCE_TIMES:
        ranks.run(lambda name=name: ALGORITHMS[name](torch.ones(nbytes // 4), None))
        times[name] = ranks.trace.makespan
    best = min(times, key=lambda name: times[name])
    assert best in ("direct", "one_shot"), times
    assert best == cost_model.fastest_all_reduce(nbytes, k, network)


@over("nodes, ranks_per_node", [(2, 2), (2, 4), (4, 2), (3, 1), (1, 3)])
def test_two_levels(nodes, ranks_per_node):
    inside = Network(latency=1e-5, bandwidth=1e9)
    between = Network(1e-3, 1e7, node_size=ranks_per_node, inside=inside)

    def run() -> None:
        groups = collectives.two_level_groups(ranks_per_node)
        collectives.hierarchical_all_reduce(torch.ones(LENGTH), *groups)

    ranks = Ranks(nodes * ranks_per_node, on="simulated", network=between)
    ranks.run(run)
    expected = cost_model.hierarchical_all_reduce_time(
        NBYTES, ranks_per_node, nodes, inside, Link(1e-3, 1e7)
    )
    assert ranks.trace.makespan == pytest.approx(expected, rel=1e-9)


@over("latency", [1e-6, 1.3e-3, 1.0])
@over("segments", [1, 3, 8])
@over("k, overhead", [(2, 0.0), (5, 4e-4)])
def test_a_ring_in_segments_takes_the_time_of_its_formula(k, segments, latency, overhead):
    network = Network(latency, NETWORK.bandwidth, overhead)
    ranks = Ranks(k, on="simulated", network=network)
    length = LENGTH * k  # chunks of it divide into any of these numbers of segments
    ranks.run(lambda: collectives.pipelined_ring_all_reduce(torch.ones(length), None, segments))
    expected = cost_model.pipelined_ring_all_reduce_time(
        4 * length, k, network, segments, pipelined_ring.WINDOW
    )
    assert ranks.trace.makespan == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_enough_segments_pay_the_latency_once():
    k, n, alone = 8, 1e6, Link(0.0, NETWORK.bandwidth)  # a segment takes 4.5 ms
    time = cost_model.pipelined_ring_all_reduce_time(n, k, NETWORK, segments=4)
    assert time == pytest.approx(cost_model.ring_all_reduce_time(n, k, alone) + NETWORK.latency)


@over("k", [4, 8, 64])
def test_small_tensors_want_few_messages_and_large_ones_few_bytes(k):
    assert cost_model.fastest_all_reduce(4, k, NETWORK) == "one_shot"
    assert cost_model.fastest_all_reduce(1e9, k, NETWORK) == "direct"
    # 2(K-1)/K n/β is the least that any algorithm can do.
    for formula in cost_model.ALL_REDUCE_TIMES.values():
        assert formula(1e9, k, NETWORK) >= 2 * (k - 1) / k * 1e9 / NETWORK.bandwidth * (1 - 1e-12)


@over("k", [2, 3, 8, 64])
def test_a_switch_that_adds_carries_less_than_any_ranks_that_do(k):
    n = 1e9
    in_network = cost_model.in_network_all_reduce_time(n, k, NETWORK)
    ring = cost_model.ring_all_reduce_time(n, k, Link(0.0, NETWORK.bandwidth))
    assert in_network == pytest.approx(2 * NETWORK.latency + ring * k / (2 * (k - 1)))
    assert cost_model.in_network_all_reduce_time(n, 1, NETWORK) == 0


def test_bus_bandwidth_of_a_ring_without_latency_is_the_link_s():
    for k in (2, 3, 8):
        seconds = cost_model.ring_all_reduce_time(1e6, k, Link(0.0, 5e9))
        assert cost_model.bus_bandwidth(1e6, seconds, k) == pytest.approx(5e9)
        assert cost_model.algorithm_bandwidth(1e6, seconds) == pytest.approx(5e9 * k / 2 / (k - 1))


# --- buckets --------------------------------------------------------------------------------------


def test_one_bucket_cannot_overlap_and_free_communication_costs_nothing():
    link = Link(1e-3, 1e8)
    alone = cost_model.ring_all_reduce_time(1e7, 4, link)
    assert overlapped_time([1e7], 0.2, 4, link) == pytest.approx(0.2 + alone)
    assert overlapped_time([1e6] * 10, 0.2, 1, link) == pytest.approx(0.2)
    assert overlapped_time([], 0.2, 4, link) == 0.2


@given(
    count=st.integers(1, 60),
    backward=st.floats(1e-3, 10),
    k=st.integers(2, 64),
    latency=st.floats(1e-6, 1e-2),
    bandwidth=st.floats(1e6, 1e11),
)
def test_equal_buckets_have_a_closed_form(count, backward, k, latency, bandwidth):
    link, n = Link(latency, bandwidth), 1e8
    one = cost_model.ring_all_reduce_time(n / count, k, link)
    closed = max(backward / count + count * one, backward + one)
    assert overlapped_time([n / count] * count, backward, k, link) == pytest.approx(closed)


@settings(max_examples=30)
@given(
    backward=st.floats(1e-2, 1),
    k=st.integers(2, 16),
    latency=st.floats(1e-4, 1e-2),
    bandwidth=st.floats(1e7, 1e10),
)
def test_no_other_number_of_buckets_is_better_than_the_best(backward, k, latency, bandwidth):
    link, n = Link(latency, bandwidth), 1e8
    best = n / best_bucket_bytes(n, backward, k, link, 200)

    def time(count: int) -> float:
        return overlapped_time([n / count] * count, backward, k, link)

    assert best == pytest.approx(round(best))
    assert time(round(best)) <= min(time(m) for m in range(1, 201)) * (1 + 1e-9)


def test_where_communication_is_long_the_number_of_buckets_is_a_square_root():
    link, n, k, backward = Link(1e-3, 1e8), 1e9, 4, 2.4
    best = n / best_bucket_bytes(n, backward, k, link)
    assert best == pytest.approx(math.sqrt(backward / (2 * (k - 1) * link.latency)), abs=0.51)


# --- fits -----------------------------------------------------------------------------------------


@given(
    latency=st.floats(1e-7, 1e-1),
    bandwidth=st.floats(1e5, 1e12),
    k=st.integers(2, 64),
)
def test_a_fit_finds_the_link_that_made_the_times(latency, bandwidth, k):
    link = Link(latency, bandwidth)
    # Sizes around the one at which latency and bytes cost the same: else one of them is noise.
    sizes = [latency * bandwidth * factor for factor in (0.01, 0.1, 1, 10, 100)]
    fitted = fit_link([(n, cost_model.message_time(n, link)) for n in sizes])
    assert fitted == pytest.approx(link, rel=1e-6)
    times = [(n, cost_model.ring_all_reduce_time(n, k, link)) for n in sizes]
    assert fit_link(times, 2 * (k - 1), 2 * (k - 1) / k) == pytest.approx(link, rel=1e-6)


ANY_MEASUREMENT = st.tuples(st.floats(1, 1e9), st.floats(1e-6, 10))


@st.composite
def noisy_measurements(draw: st.DrawFn) -> list[tuple[float, float]]:
    """Return times of messages of three to nine sizes over some link, each up to 3 times off."""
    sizes = draw(st.lists(st.floats(1, 1e9), min_size=3, max_size=9, unique=True))
    latency, bandwidth = draw(st.floats(1e-6, 1)), draw(st.floats(1e6, 1e12))
    return [(n, (latency + n / bandwidth) * draw(st.floats(1 / 3, 3))) for n in sizes]


# Two points outweigh the others by 10¹², and all sizes are much alike.
@example([(6.31167965e8, 9.9375), *2 * [(6.74552594e8, 1e-6)], (6.74552594e8, 2), (7.1193426e8, 2)])
@given(noisy_measurements() | st.lists(ANY_MEASUREMENT, min_size=3, max_size=9))
def test_no_neighbour_of_the_fit_explains_the_times_better(measurements):
    try:
        link = fit_link(measurements)
    except ValueError:
        return  # the noise outweighs the sizes: there is no fit
    if link.latency == 0:
        return  # at the edge of what is allowed, a neighbour outside may be better

    def error(latency: float, bandwidth: float) -> float:
        return math.fsum(((latency + n / bandwidth) / t - 1) ** 2 for n, t in measurements)

    least = error(link.latency, link.bandwidth)
    for up in (0.99, 1.01):
        assert error(link.latency * up, link.bandwidth) >= least * (1 - 1e-6)
        assert error(link.latency, link.bandwidth * up) >= least * (1 - 1e-6)


@over(
    "measurements, message",
    [
        ([(100, 1.0), (100, 2.0)], "two different sizes"),
        ([(100, 1.0), (200, 0.0)], "positive times"),
        ([(100, 2.0), (1000, 1.0)], "did not take more time"),
    ],
)
def test_measurements_that_tell_nothing_are_refused(measurements: Any, message: str):
    with pytest.raises(ValueError, match=message):
        fit_link(measurements)


def test_a_latency_below_zero_is_none():
    link = fit_link([(100, 0.5), (1000, 10.0), (2000, 20.0)])
    assert link.latency == 0
    assert link.bandwidth == pytest.approx(100, rel=0.5)


def test_the_best_all_reduce_is_no_slower_than_any_and_has_two_levels() -> None:
    inside, between = Link(5e-6, 450e9), Link(10e-6, 50e9)
    for nbytes in (1e3, 1e6, 1e9):
        flat = cost_model.best_all_reduce_time(nbytes, 64, between)
        assert flat == min(
            time(nbytes, 64, between) for time in cost_model.ALL_REDUCE_TIMES.values()
        )
        both = cost_model.best_all_reduce_time(nbytes, 64, between, inside)
        assert both == min(
            flat, cost_model.hierarchical_all_reduce_time(nbytes, 8, 8, inside, between)
        )
    assert both < flat
