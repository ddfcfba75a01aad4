"""Count the parameters of a rank: its part of its layers, and the embedding."""

from course_lib.simulate.layout import Layout
from course_lib.simulate.transformer import Transformer


def parameters_of_a_rank(model: Transformer, layout: Layout) -> float:
    """Return the number of parameters on the rank that has most, before ZeRO divides them.

    Raises:
        LayoutError: the model cannot be laid out so.

    """
    layer = model.attention_parameters / layout.tensor
    if model.experts == 1:
        layer += model.expert_parameters / layout.tensor
    ends = 1 if layout.pipeline > 1 or model.tied else 2  # embedding and output layer
    own = layout.layers_of_a_rank(model) * layer
    own += ends * model.embedding_parameters / layout.tensor
    return own + experts_of_a_rank(model, layout)


def experts_of_a_rank(model: Transformer, layout: Layout) -> float:
    """Return how many parameters of a rank belong to experts, which fewer ranks have in common.

    Raises:
        LayoutError: the model cannot be laid out so.

    """
    if model.experts == 1:
        return 0.0
    experts = model.experts * model.expert_parameters / layout.expert / layout.tensor
    return layout.layers_of_a_rank(model) * experts


def gradient_buckets(model: Transformer, layout: Layout) -> int:
    """Return the number of a rank's gradient buckets that brings them nearest to `bucket` bytes.

    Raises:
        LayoutError: the model cannot be laid out so.

    """
    nbytes = layout.gradient_bytes * parameters_of_a_rank(model, layout)
    return max(1, round(nbytes / layout.bucket))
