"""The time of a step beside times derived by hand, and beside the pipeline's own clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.cost_model import Link, ring_all_reduce_time
from course_lib.pipeline_parallel import peak_activations, simulate
from course_lib.ranks import Device
from course_lib.simulate import Cluster, Layout, Reached, Transformer, estimate
from course_lib.simulate.group_time import all_reduce_time, all_to_all_time, half_time
from course_lib.simulate.memory import activations_at_once
from course_lib.simulate.step_time import Both, layer_computation, output_layer, pipeline_idle

INSIDE, BETWEEN = Link(1e-6, 100e9), Link(10e-6, 10e9)
PERFECT = Reached(1.0, attention=1.0, memory=1.0, eager=1.0, inside=1.0, between=1.0, hidden=1.0)
DEVICE = Device(flops=1e12, memory_bandwidth=1e30)
CLUSTER = Cluster(DEVICE, 80e9, 4, INSIDE, BETWEEN, reached=PERFECT)
MODEL = Transformer(layers=4, width=64, heads=4, vocabulary=128, sequence=32)
S, H = MODEL.sequence, MODEL.width


def seconds(cluster: Cluster = CLUSTER, **layout: object) -> float:
    return estimate(MODEL, cluster, Layout(**layout)).seconds  # type: ignore[arg-type]


def test_no_dimension_is_operations_over_rate() -> None:
    assert seconds(batch=6, micro_batch=2) == pytest.approx(MODEL.model_flops(6) / 1e12)


def test_full_recomputation_is_a_forward_more() -> None:
    more = 4 * MODEL.layer_flops(3)[0] / 1e12
    assert seconds(batch=3, recompute="full") == pytest.approx(seconds(batch=3) + more)


def test_selective_recomputation_is_attention_more() -> None:
    more = 4 * MODEL.layer_flops(3)[1] / 1e12
    assert seconds(batch=3, recompute="selective") == pytest.approx(seconds(batch=3) + more)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_one_dimension_of_replicas_in_a_node_is_a_ring(k: int) -> None:
    """The N-dimensional simulator's formula: 2 (K-1) (a + b D / K)."""
    own = seconds(batch=2)
    ring = 2 * (k - 1) * (1e-6 + 2 * MODEL.parameters / k / 100e9)
    assert seconds(batch=2 * k, data=k, overlap=False) == pytest.approx(own + ring)


@pytest.mark.parametrize("zero", [1, 2])
def test_sharded_state_sends_as_much_as_replicas(zero: int) -> None:
    both = [seconds(batch=4, data=4, zero=each, overlap=False) for each in (0, zero)]
    assert both[0] == pytest.approx(both[1])


def test_replicas_in_two_nodes_are_two_levels() -> None:
    n = 2 * MODEL.parameters
    two = 2 * 3 * (1e-6 + n / 4 / 100e9) + 2 * 1 * (10e-6 + n / 8 / 10e9)
    assert seconds(batch=8, data=8, overlap=False) == pytest.approx(seconds(batch=1) + two)


@pytest.mark.parametrize("t", [2, 4])
def test_tensor_parallelism_is_four_all_reduces_per_layer(t: int) -> None:
    one = ring_all_reduce_time(2 * S * H, t, INSIDE)
    expected = MODEL.model_flops(5) / 1e12 / t + 5 * 4 * 4 * one
    assert seconds(batch=5, tensor=t) == pytest.approx(expected)


def test_recomputation_repeats_two_of_the_all_reduces() -> None:
    result = estimate(MODEL, CLUSTER, Layout(tensor=2, batch=5, recompute="full"))
    assert result.tensor == pytest.approx(5 * 4 * 6 * ring_all_reduce_time(2 * S * H, 2, INSIDE))


def test_a_pipeline_is_its_work_and_its_bubble() -> None:
    layout = Layout(pipeline=2, batch=8, schedule="gpipe")
    each = layer_computation(MODEL, CLUSTER, layout).total * 2
    output = output_layer(MODEL, CLUSTER, layout).total
    message = 1e-6 + 2 * S * H / 100e9
    expected = (8 + 1) * each + 8 * output + 2 * message
    assert seconds(pipeline=2, batch=8, schedule="gpipe") == pytest.approx(expected)


def test_a_pipeline_of_replicas_of_parts_is_all_three() -> None:
    layout = Layout(data=2, tensor=2, pipeline=2, batch=8, overlap=False)
    result = estimate(MODEL, CLUSTER, layout)
    parts = (result.computation, result.tensor, result.context, result.experts, result.pipeline)
    assert result.seconds == pytest.approx(sum(parts) + result.data + result.optimizer)
    own = (2 * MODEL.layer_parameters + MODEL.embedding_parameters) / 2
    assert result.data == pytest.approx(ring_all_reduce_time(2 * own, 2, INSIDE))
    assert layout.ranks == 8


def test_sharded_weights_are_gathered_twice_and_gradients_scattered_once() -> None:
    layout = Layout(data=4, zero=3, batch=4, overlap=False)
    one = half_time(2 * MODEL.layer_parameters, 4, 1, CLUSTER)
    assert estimate(MODEL, CLUSTER, layout).data == pytest.approx(4 * 3 * one)


def test_replicas_of_shards_also_add_up_what_each_rank_has() -> None:
    """HSDP: gathers in a node, and an all-reduce of an eighth between nodes."""
    layout = Layout(data=8, zero=3, shard=4, batch=8, overlap=False)
    one = half_time(2 * MODEL.layer_parameters, 4, 1, CLUSTER)
    between = ring_all_reduce_time(2 * MODEL.layer_parameters / 4, 2, BETWEEN)
    assert estimate(MODEL, CLUSTER, layout).data == pytest.approx(4 * (3 * one + between))


@pytest.mark.parametrize("c", [2, 4])
def test_a_divided_sequence_gathers_its_keys_and_values(c: int) -> None:
    grouped = replace(MODEL, kv_heads=2)
    layout = Layout(context=c, batch=3, overlap=False)
    result = estimate(grouped, CLUSTER, layout)
    nbytes = 2 * 2 * S * H / 2  # keys and values, in 2 bytes, half as many as queries
    assert result.context == pytest.approx(3 * 4 * 3 * half_time(nbytes, c, 1, CLUSTER))
    whole = estimate(grouped, CLUSTER, Layout(batch=3))
    assert result.computation == pytest.approx(whole.computation / c)
    assert layout.ranks == c and result.data > 0  # ranks of a sequence hold the same weights


def test_half_of_the_layers_recomputed_is_half_a_forward_more() -> None:
    none, half, full = (
        seconds(batch=3, recompute=how, recomputed=share)
        for how, share in (("none", 1.0), ("full", 0.5), ("full", 1.0))
    )
    assert half == pytest.approx((none + full) / 2)


def test_a_parallel_block_halves_the_all_reduces() -> None:
    layout = Layout(tensor=4, batch=4)
    both = [estimate(replace(MODEL, parallel=p), CLUSTER, layout).tensor for p in (False, True)]
    assert both[1] == pytest.approx(both[0] / 2)


def test_tensor_overlap_shows_what_computation_cannot_hide() -> None:
    layout = Layout(tensor=4, batch=4, tensor_overlap=True)
    for hidden, shown in ((0.0, 1.0), (0.75, 0.25)):
        reached = replace(PERFECT, tensor_hidden=hidden)
        slow = replace(CLUSTER, device=Device(1e6, 1e30), reached=reached)  # much to hide behind
        whole = estimate(MODEL, slow, replace(layout, tensor_overlap=False)).tensor
        assert estimate(MODEL, slow, layout).tensor == pytest.approx(shown * whole)
    fast = replace(CLUSTER, device=Device(1e30, 1e30), reached=replace(PERFECT, tensor_hidden=1.0))
    whole = estimate(MODEL, fast, replace(layout, tensor_overlap=False)).tensor
    assert estimate(MODEL, fast, layout).tensor == pytest.approx(whole)


def test_bytes_take_their_time_and_eager_operations_move_more() -> None:
    """On a device without operations, the time is that of the bytes."""
    device = replace(CLUSTER, device=Device(flops=1e30, memory_bandwidth=1e9))
    model = replace(MODEL, fused_attention=True, dropout=False)
    layout = Layout(batch=2, micro_batch=2)
    n, weights = 2 * S, MODEL.layer_parameters
    products = 2 * (weights + n * (H + 3 * H) + n * 2 * H + n * (H + 4 * H) + n * (4 * H + H))
    between = n * (2 * 4 * H + 2 * 6 * H + 4 * 4 * H)
    found = layer_computation(model, device, layout)
    assert found.forward == pytest.approx((products + between) / 1e9)
    assert found.backward == pytest.approx(2 * found.forward)
    eager = replace(device, reached=replace(PERFECT, eager=3.0))
    more = layer_computation(model, eager, replace(layout, eager=True))
    assert more.forward == pytest.approx((products + 3 * between) / 1e9)


def test_gradients_of_micro_batches_are_added_up_in_memory() -> None:
    device = replace(CLUSTER, device=Device(flops=1e30, memory_bandwidth=1e9))
    one, two = (layer_computation(MODEL, device, Layout(batch=m)) for m in (1, 2))
    assert one.forward == two.forward
    assert two.backward - one.backward == pytest.approx(6 * MODEL.layer_parameters / 1e9)


def test_chunks_give_gradients_more_time_to_hide() -> None:
    """All but the last chunk's gradients are sent while the rank still works on the others."""
    common = {"data": 4, "pipeline": 2, "batch": 16, "bucket": 1e4}
    slow = replace(CLUSTER, inside=Link(0.0, 1e8), between=Link(0.0, 1e8))
    one = estimate(MODEL, slow, Layout(**common)).data  # type: ignore[arg-type]
    chunks = {"schedule": "interleaved", "chunks": 2, **common}
    two = estimate(MODEL, slow, Layout(**chunks)).data  # type: ignore[arg-type]
    assert 0 < two < one


def test_experts_cost_four_all_to_alls_per_layer() -> None:
    model = replace(MODEL, experts=8, top_k=2)
    result = estimate(model, CLUSTER, Layout(data=4, expert=4, batch=4))
    one = all_to_all_time(2 * 2 * S * H, 4, 1, CLUSTER)
    assert result.experts == pytest.approx(4 * 4 * one)


def test_switches_that_add_halve_what_is_sent() -> None:
    adding = replace(CLUSTER, in_network=True, node_size=1)
    n = 1e9
    assert all_reduce_time(n, 8, 1, adding) == pytest.approx(2 * 10e-6 + n / 10e9)
    assert all_reduce_time(n, 8, 1, replace(adding, in_network=False)) == pytest.approx(
        ring_all_reduce_time(n, 8, BETWEEN)
    )


def test_oversubscription_divides_the_bandwidth_between_nodes_only() -> None:
    slow = replace(CLUSTER, oversubscription=4.0)
    assert slow.link_between.bandwidth == BETWEEN.bandwidth / 4
    assert slow.link_inside == INSIDE


def test_overlap_hides_what_backward_has_room_for() -> None:
    shown = estimate(MODEL, CLUSTER, Layout(data=4, batch=4, overlap=False)).data
    hidden = estimate(MODEL, CLUSTER, Layout(data=4, batch=4, bucket=MODEL.parameters)).data
    assert 0 < hidden < shown


@given(
    p=st.integers(1, 6),
    turns=st.integers(1, 4),
    chunks=st.integers(2, 3),
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
    forward=st.floats(0.5, 2),
    message=st.sampled_from([0.0, 1e-3]),
)
def test_idle_time_is_what_the_schedules_clock_says(
    p: int, turns: int, chunks: int, schedule: str, forward: float, message: float
) -> None:
    layout = Layout(
        pipeline=p, batch=p * turns, schedule=schedule,  # type: ignore[arg-type]
        chunks=chunks if schedule == "interleaved" else 1,
    )  # fmt: skip
    rank = Both(forward, 2 * forward)
    run = simulate(layout.steps(), *rank, message=message)
    idle = run.makespan - layout.micro_batches * rank.total
    found = pipeline_idle(layout, rank, message)
    assert found == pytest.approx(idle, rel=1e-9, abs=(2 * p + 2) * message * 1.5 + 1e-9)
    if message == 0:
        assert found == pytest.approx(idle, rel=1e-9, abs=1e-9)
    held = max(peak_activations(layout.steps()))
    assert activations_at_once(layout) >= held
    assert activations_at_once(layout) <= held + 1
