"""The bytes of each axis, counted by the trace, are those of the formulas."""

import math

import pytest
import torch

from course_lib.mesh import (
    Shape,
    average_gradients,
    batch_of,
    divide_experts,
    divide_tensors,
    make_mesh,
    next_word_loss,
    traffic,
    transformer,
    weights_held,
)
from course_lib.pipeline_parallel import Pipeline, one_forward_one_backward, split_layers

LAYERS = 2
EVEN = Shape(words=8, length=4, width=8, heads=4, hidden=12, layers=LAYERS)
BATCH, M = 16, 2


def weights_then_two_steps(shape, sizes):
    """Return how many weights this rank holds, of the experts and others."""
    mesh = make_mesh(**sizes)
    torch.manual_seed(0)
    model = transformer(shape)
    divide_tensors(model, mesh["tensor"])
    divide_experts(model, mesh["expert"])
    stages = split_layers(model, mesh.sizes["pipeline"])
    plan = one_forward_one_backward(len(stages), M)
    pipeline = Pipeline(stages, next_word_loss, plan, group=mesh["pipeline"])
    rows = batch_of(torch.arange(BATCH * 5).view(BATCH, 5) % shape.words, mesh)
    for _ in range(2):
        pipeline.step(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        average_gradients(pipeline, mesh)
    held = {name: param.numel() for name, param in pipeline.named_parameters()}
    experts = sum(number for name, number in held.items() if ".experts." in name)
    return sum(held.values()) - experts, experts


def mean_bytes(trace, k, axis):
    """Per rank and step, without the headers of the first, in which shapes are learned."""
    sent = sum(trace.bytes_sent(rank, group=axis) for rank in range(k))
    if axis == "pipeline":
        sent -= sum(e.bytes for e in trace.operations if e.kind == "send" and e.bytes == 80)
    return sent / k / 2


LAYOUTS = [
    {"data": 2},
    {"tensor": 2},
    {"pipeline": 2},
    {"data": 2, "pipeline": 2},
    {"pipeline": 2, "tensor": 2},
    {"pipeline": 4},
    {"tensor": 4},
]


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_bytes_and_weights_are_those_of_the_formulas(ranks_of, sizes):
    k, shape = math.prod(sizes.values()), EVEN
    ranks = ranks_of("simulated", k)
    held = ranks.run(weights_then_two_steps, shape, sizes)
    assert sum(dense for dense, _ in held) / k == pytest.approx(weights_held(shape, **sizes)[0])
    expected = traffic(shape, BATCH, M, **sizes)
    measured = {axis: mean_bytes(ranks.trace, k, axis) for axis in ("tensor", "pipeline")}
    measured["data"] = sum(mean_bytes(ranks.trace, k, axis) for axis in ("data", "data×expert"))
    for axis, sent in measured.items():
        assert sent == pytest.approx(expected[axis], rel=1e-12), axis
