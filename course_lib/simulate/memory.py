"""The memory of a rank: weights, gradients, the optimizer's state, and activations.

Each parameter takes 2 + 2 + 12 bytes; each stage of ZeRO divides more of them (see
`sharded_optimizer`). Activations of a micro-batch are held from its forward to its backward, and
the schedule decides how many micro-batches are held at once. With full recomputation, only the
input of each layer and the activations of one layer are held.
"""

from typing import NamedTuple

from course_lib.sharded_optimizer import model_state_bytes
from course_lib.simulate.layout import Layout
from course_lib.simulate.parameters import parameters_of_a_rank
from course_lib.simulate.transformer import Transformer


class Memory(NamedTuple):
    """Bytes on the rank that holds most."""

    weights_and_state: float
    activations: float

    @property
    def total(self) -> float:
        """Bytes of all."""
        return self.weights_and_state + self.activations


def memory_of(model: Transformer, layout: Layout) -> Memory:
    """Return the memory of the rank that holds most.

    Raises:
        LayoutError: the model cannot be laid out like this.

    """
    state = model_state_bytes(
        parameters_of_a_rank(model, layout),
        layout.data,
        layout.zero,
        gradient=layout.gradient_bytes,
    )
    b, t = layout.micro_batch, layout.tensor
    whole = model.activation_bytes(b, t, layout.sequence_parallel)
    kept, once = whole, 0.0
    if layout.recompute == "full":
        divided = t if layout.sequence_parallel else 1
        kept, once = model.boundary_bytes(b) / divided, whole
    elif layout.recompute == "selective":
        kept = whole - b * model.sequence * model.scores_bytes / t
        once = whole - kept
    layers = layout.layers_of_a_rank(model) / layout.chunks
    return Memory(state, activations_at_once(layout) * layers * kept + once)


def activations_at_once(layout: Layout) -> int:
    """Return the most micro-batch chunks whose activations a rank holds at once."""
    p, m, v = layout.pipeline, layout.micro_batches, layout.chunks
    if layout.schedule == "gpipe":
        return m
    if layout.schedule == "interleaved":
        return min(m * v, 2 * (p - 1) + (v - 1) * p + 1)
    return min(m, p)
