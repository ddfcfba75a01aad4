"""The time of a step beside times derived by hand, and beside the pipeline's own clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.cost_model import Link, ring_all_reduce_time
from course_lib.pipeline_parallel import (
    interleaved,
    one_forward_one_backward,
    peak_activations,
    simulate,
)
from course_lib.ranks import Device
from course_lib.simulate import Cluster, Layout, Reached, Transformer, estimate
from course_lib.simulate.memory import activations_at_once
from course_lib.simulate.step_time import Both, pipeline_idle

INSIDE, BETWEEN = Link(1e-6, 100e9), Link(10e-6, 10e9)
PERFECT = Reached(1.0, attention=1.0, memory=1.0, eager=1.0, inside=1.0, between=1.0, hidden=1.0)
DEVICE = Device(flops=1e12, memory_bandwidth=1e30)
CLUSTER = Cluster(DEVICE, 80e9, 4, INSIDE, BETWEEN, reached=PERFECT)
MODEL = Transformer(layers=4, width=64, heads=4, vocabulary=128, sequence=32)
S, H = MODEL.sequence, MODEL.width


def seconds(cluster: Cluster = CLUSTER, **layout: object) -> float:
    return estimate(MODEL, cluster, Layout(**layout)).seconds


def test_no_dimension_is_operations_over_rate() -> None:
    assert seconds(batch=6, micro_batch=2) == pytest.approx(MODEL.model_flops(6) / 1e12)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_one_dimension_of_replicas_in_a_node_is_a_ring(k: int) -> None:
    """The N-dimensional simulator's formula: 2 (K-1) (a + b D / K)."""
    one_replica = seconds(batch=2)
    ring = 2 * (k - 1) * (1e-6 + 2 * MODEL.parameters / k / 100e9)
    assert seconds(batch=2 * k, data=k, overlap=False) == pytest.approx(one_replica + ring)


def test_replicas_in_two_nodes_are_two_levels() -> None:
    n = 2 * MODEL.parameters
    two = 2 * 3 * (1e-6 + n / 4 / 100e9) + 2 * 1 * (10e-6 + n / 8 / 10e9)
    assert seconds(batch=8, data=8, overlap=False) == pytest.approx(seconds(batch=1) + two)


@pytest.mark.parametrize("t", [2, 4])
def test_tensor_parallelism_is_four_all_reduces_per_layer(t: int) -> None:
    all_reduce = ring_all_reduce_time(2 * S * H, t, INSIDE)
    expected = MODEL.model_flops(5) / 1e12 / t + 5 * 4 * 4 * all_reduce
    assert seconds(batch=5, tensor=t) == pytest.approx(expected)


def test_a_pipeline_of_replicas_of_parts_is_all_three() -> None:
    layout = Layout(data=2, tensor=2, pipeline=2, batch=8, overlap=False)
    result = estimate(MODEL, CLUSTER, layout)
    parameters = (2 * MODEL.layer_parameters + MODEL.embedding_parameters) / 2
    assert result.causes.data == pytest.approx(ring_all_reduce_time(2 * parameters, 2, INSIDE))
    assert layout.ranks == 8


@given(
    p=st.integers(1, 6),
    turns=st.integers(1, 4),
    chunks=st.integers(1, 3),
    forward=st.floats(0.5, 2),
    message=st.sampled_from([0.0, 1e-3]),
)
def test_idle_time_is_what_the_schedules_clock_says(p, turns, chunks, forward, message):
    layout = Layout(pipeline=p, batch=p * turns, chunks=chunks)
    schedule = one_forward_one_backward(p, p * turns)
    if chunks > 1:
        schedule = interleaved(p, p * turns, chunks)
    rank = Both(forward, 2 * forward)
    run = simulate(schedule, *rank, message=message)
    idle = run.makespan - layout.micro_batches * rank.total
    formula = pipeline_idle(layout, rank, message)
    assert formula == pytest.approx(idle, rel=1e-9, abs=(2 * p + 2) * message * 1.5 + 1e-9)
    if message == 0:
        assert formula == pytest.approx(idle, rel=1e-9, abs=1e-9)
    held = max(peak_activations(schedule))
    assert held <= activations_at_once(layout) <= held + 1
