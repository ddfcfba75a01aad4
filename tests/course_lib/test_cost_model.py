"""The formulas against algebra, and against the virtual clock on which the algorithms run."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import collectives, cost_model
from course_lib.bucketing import best_bucket_bytes, overlapped_time
from course_lib.cost_model import Link
from course_lib.ranks import Ranks
from course_lib.ranks.costs.links import Links
from course_lib.ranks.costs.network import Network

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
    "halving_doubling_all_reduce": cost_model.halving_doubling_all_reduce_time,
    "direct_all_reduce": cost_model.direct_all_reduce_time,
    "one_shot_all_reduce": cost_model.one_shot_all_reduce_time,
}


@pytest.mark.parametrize("name", WITH_FORMULA)
@pytest.mark.parametrize(("k", "network"), [(3, NETWORK), (4, WITH_OVERHEAD), (5, WITH_OVERHEAD)])
def test_an_algorithm_takes_the_time_of_its_formula(k, name, network):
    ranks = Ranks(k, on="simulated", network=network)
    ranks.run(getattr(collectives, name), torch.ones(LENGTH))
    formula = WITH_FORMULA[name]
    expected = formula(NBYTES, k, network)
    if name in ("tree_broadcast", "tree_all_reduce") and k not in (1, 2, 4, 8):
        # The farthest of the ranks that there are is fewer messages away from the root.
        assert expected - k.bit_length() * network.time(0) < ranks.trace.makespan < expected
    else:
        assert ranks.trace.makespan == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("network", [NETWORK, WITH_OVERHEAD])
def test_a_message_takes_the_same_time_by_the_model_the_network_and_its_links(network):
    _, arrival = Links(network, 2).send(0, 1, NBYTES, ready=0.0)
    assert arrival == network.time(NBYTES) == cost_model.message_time(NBYTES, network)


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (2, 4), (4, 2), (3, 1), (1, 3)])
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


@pytest.mark.parametrize("k", [2, 3, 8, 64])
def test_a_switch_that_adds_carries_less_than_any_ranks_that_do(k):
    n = 1e9
    in_network = cost_model.in_network_all_reduce_time(n, k, NETWORK)
    ring = cost_model.ring_all_reduce_time(n, k, Link(0.0, NETWORK.bandwidth))
    assert in_network == pytest.approx(2 * NETWORK.latency + ring * k / (2 * (k - 1)))
    assert cost_model.in_network_all_reduce_time(n, 1, NETWORK) == 0


# --- buckets --------------------------------------------------------------------------------------


@given(
    count=st.integers(1, 60),
    backward=st.floats(1e-3, 10),
    k=st.integers(2, 64),
    latency=st.floats(1e-6, 1e-2),
    bandwidth=st.floats(1e6, 1e11),
)
def test_equal_buckets_have_a_closed_form(count, backward, k, latency, bandwidth):
    link, n = Link(latency, bandwidth), 1e8
    bucket = cost_model.ring_all_reduce_time(n / count, k, link)
    closed = max(backward / count + count * bucket, backward + bucket)
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
