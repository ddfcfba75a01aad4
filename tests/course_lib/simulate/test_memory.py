"""A rank's memory beside counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from course_lib.simulate import CLUSTERS, Layout, LayoutError, Transformer
from course_lib.simulate.memory import LOGIT_BYTES, memory_of
from course_lib.simulate.published import load

MODEL = Transformer(layers=8, width=256, heads=8, vocabulary=1000, sequence=128)
P = MODEL.parameters


def state(**layout: object) -> float:
    return memory_of(MODEL, Layout(batch=8, **layout)).weights_and_state  # type: ignore[arg-type]


def activations(model: Transformer = MODEL, **layout: object) -> float:
    return memory_of(model, Layout(batch=8, **layout)).activations  # type: ignore[arg-type]


def test_each_stage_of_zero_divides_more() -> None:
    assert state(data=8) == pytest.approx(16 * P)
    assert state(data=8, zero=1) == pytest.approx((4 + 12 / 8) * P)
    assert state(data=8, zero=2) == pytest.approx((2 + 14 / 8) * P)
    two_layers = 6 * MODEL.layer_parameters  # two layers' weights and one's gradients are whole
    assert state(data=8, zero=3) == pytest.approx(16 / 8 * P + two_layers)
    assert state(data=8, gradient_bytes=4) == pytest.approx(18 * P)


def test_hybrid_shards_divide_by_their_group_only() -> None:
    two_layers = 6 * MODEL.layer_parameters
    assert state(data=8, zero=3, shard=4) == pytest.approx(16 / 4 * P + two_layers)
    with pytest.raises(LayoutError, match="shard=3 does not divide the 8 ranks"):
        Layout(data=8, zero=3, shard=3, batch=8)


def test_ranks_that_share_a_sequence_share_its_activations_and_the_state() -> None:
    assert activations(context=2) == pytest.approx(activations() / 2)
    assert state(context=2, data=4, zero=1) == pytest.approx(state(data=8, zero=1))


def test_the_last_stage_has_the_logits_and_the_first_most_activations() -> None:
    layer = MODEL.activation_bytes(1, 1, False)
    logits = LOGIT_BYTES * MODEL.sequence * MODEL.vocabulary
    assert activations() == pytest.approx(8 * layer + logits)
    assert activations(pipeline=4) == pytest.approx(4 * 2 * layer)  # four micro-batches
    wide = replace(MODEL, vocabulary=10**6)
    many = LOGIT_BYTES * MODEL.sequence * 10**6
    assert activations(wide, pipeline=4) == pytest.approx(2 * layer + many)


def test_half_recomputed_keeps_half() -> None:
    boundary = MODEL.boundary_bytes(1)
    layer = MODEL.activation_bytes(1, 1, False)
    logits = LOGIT_BYTES * MODEL.sequence * MODEL.vocabulary
    half = activations(recompute="full", recomputed=0.5)
    assert half == pytest.approx(8 * (boundary + layer) / 2 + layer + logits)


def test_experts_are_divided_among_the_ranks_that_hold_them() -> None:
    model = replace(MODEL, experts=8, top_k=2)
    layer = model.attention_parameters + 8 * model.expert_parameters / 4
    shared = 8 * model.attention_parameters + model.embedding_parameters
    experts = 8 * 8 * model.expert_parameters / 4
    found = memory_of(model, Layout(data=8, expert=4, zero=1, batch=8)).weights_and_state
    assert found == pytest.approx((4 + 12 / 8) * shared + (4 + 12 / 2) * experts)
    assert layer * 8 + model.embedding_parameters == pytest.approx(shared + experts)


@pytest.mark.parametrize("name", ["Llama 3 405B, 8192", "Llama 3 405B, 16384"])
def test_llama_3_fits_where_it_was_trained(name: str) -> None:
    run = next(run for run in load() if run.name == name)
    assert memory_of(run.model, run.layout).total <= CLUSTERS[run.cluster].memory
