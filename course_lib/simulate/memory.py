"""The memory of a rank: weights, gradients, the optimizer's state, and activations.

Each parameter takes 2 + 2 + 12 bytes; each stage of ZeRO divides more of them (see
`sharded_optimizer`). Activations of a micro-batch are held from its forward to its backward, and
the schedule decides how many micro-batches are held at once. With full recomputation, only the
input of each layer and the activations of one layer are held. The last stage also holds the logits.
With ZeRO-3, two layers' weights are whole at a time: one computes, the next one arrives.
"""

from typing import NamedTuple

from course_lib.sharded_optimizer import model_state_bytes
from course_lib.simulate.layout import Layout
from course_lib.simulate.parameters import experts_of_a_rank, parameters_of_a_rank
from course_lib.simulate.transformer import Transformer

LOGIT_BYTES = 12
"""Bytes per logit of a micro-batch: the number and its gradient, each in 2 and in 4 bytes."""


class Memory(NamedTuple):
    """Bytes on the rank that holds the most."""

    weights_and_state: float
    activations: float

    @property
    def total(self) -> float:
        """All bytes together."""
        return self.weights_and_state + self.activations


def memory_of(model: Transformer, layout: Layout) -> Memory:
    """Return the memory of the rank that holds the most.

    In a pipeline, this is the first rank, which holds the most activations, or the last rank, which
    holds the logits.

    Raises:
        LayoutError: the model cannot be laid out like this.

    """
    experts = experts_of_a_rank(model, layout)
    shared = parameters_of_a_rank(model, layout) - experts
    state = _state(shared, layout.shards, layout)
    if experts:
        state += _state(experts, layout.holders // layout.expert, layout)
    if layout.zero == 3 and layout.shards > 1:  # two layers' weights, and one's gradients
        state += (4 + layout.gradient_bytes) * model.layer_parameters / layout.tensor
    b, t = layout.sequences, layout.tensor
    all_activations = model.activation_bytes(b, t, layout.sequence_parallel)
    held, once = all_activations, 0.0
    if layout.recompute == "full":
        divided = t if layout.sequence_parallel else 1
        held, once = model.boundary_bytes(b) / divided, all_activations
    elif layout.recompute == "selective":
        held = all_activations - b * model.sequence * model.scores_bytes / t
        once = all_activations - held
    held = layout.recomputed * held + (1 - layout.recomputed) * all_activations
    layers = layout.layers_of_a_rank(model) / layout.chunks
    logits = LOGIT_BYTES * b * model.sequence * model.vocabulary / t
    first = activations_at_once(layout) * layers * held
    last = activations_at_once(layout, last=True) * layers * held + logits
    return Memory(state, max(first, last) + once)


def _state(parameters: float, ranks: int, layout: Layout) -> float:
    return model_state_bytes(parameters, ranks, layout.zero, gradient=layout.gradient_bytes)


def activations_at_once(layout: Layout, last: bool = False) -> int:
    """Return the most micro-batch chunks whose activations the first (or last) rank holds."""
    p, m, v = layout.pipeline, layout.micro_batches, layout.chunks
    if v > 1:
        return min(m * v, (v - 1) * p + 1 + (0 if last else 2 * (p - 1)))
    return 1 if last else min(m, p)
