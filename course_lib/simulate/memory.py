"""What a rank holds: weights, gradients, the optimizer's state, and activations.

Per parameter 2 + 2 + 12 bytes, of which ZeRO divides more at each stage (see `sharded_optimizer`).
Activations of a micro-batch are held from its forward to its backward, and a schedule says of how
many at once; recomputing all keeps only the input of each layer, and one layer whole.
"""

from typing import NamedTuple

from course_lib.sharded_optimizer import model_state_bytes
from course_lib.simulate.layout import Layout
from course_lib.simulate.parameters import parameters_of_a_rank
from course_lib.simulate.transformer import Transformer


class Memory(NamedTuple):
    """Bytes of the rank that holds most."""

    weights_and_state: float
    activations: float

    @property
    def total(self) -> float:
        """Bytes of all."""
        return self.weights_and_state + self.activations


def memory_of(model: Transformer, layout: Layout) -> Memory:
    """Return what the rank that holds most has in its memory.

    Raises:
        LayoutError: the model cannot be laid out so.

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
    """Return of how many chunks of micro-batches a rank holds the activations at most."""
    p, m, v = layout.pipeline, layout.micro_batches, layout.chunks
    if layout.schedule == "gpipe":
        return m
    if layout.schedule == "interleaved":
        return min(m * v, 2 * (p - 1) + (v - 1) * p + 1)
    return min(m, p)
