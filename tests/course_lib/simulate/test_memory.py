"""A rank's memory beside counts by hand."""

from dataclasses import replace

import pytest

from course_lib.simulate import Layout, Transformer
from course_lib.simulate.memory import LOGIT_BYTES, memory_of

MODEL = Transformer(layers=8, width=256, heads=8, vocabulary=1000, sequence=128)
P = MODEL.parameters


def state(**layout: object) -> float:
    return memory_of(MODEL, Layout(batch=8, **layout)).weights_and_state


def activations(model: Transformer = MODEL, **layout: object) -> float:
    return memory_of(model, Layout(batch=8, **layout)).activations


def test_each_stage_of_zero_divides_more() -> None:
    assert state(data=8) == pytest.approx(16 * P)
    assert state(data=8, zero=1) == pytest.approx((4 + 12 / 8) * P)
    assert state(data=8, zero=2) == pytest.approx((2 + 14 / 8) * P)
    two_layers = 6 * MODEL.layer_parameters  # two layers' weights and one's gradients are whole
    assert state(data=8, zero=3) == pytest.approx(16 / 8 * P + two_layers)
    assert state(data=8, gradient_bytes=4) == pytest.approx(18 * P)


def test_the_last_stage_has_the_logits_and_the_first_most_activations() -> None:
    layer = MODEL.activation_bytes(1, 1, False)
    logits = LOGIT_BYTES * MODEL.sequence * MODEL.vocabulary
    assert activations() == pytest.approx(8 * layer + logits)
    assert activations(pipeline=4) == pytest.approx(4 * 2 * layer)  # four micro-batches
    wide = replace(MODEL, vocabulary=10**6)
    wide_logits = LOGIT_BYTES * MODEL.sequence * 10**6
    assert activations(wide, pipeline=4) == pytest.approx(2 * layer + wide_logits)
