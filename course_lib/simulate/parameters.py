"""How many parameters a rank has: those of its layers, its part of each, and the embedding."""

from course_lib.simulate.layout import Layout
from course_lib.simulate.transformer import Transformer


def parameters_of_a_rank(model: Transformer, layout: Layout) -> float:
    """Return the parameters of the rank that has most, before ZeRO divides anything.

    Raises:
        LayoutError: the model cannot be laid out so.

    """
    experts = model.experts * model.expert_parameters / layout.expert
    layer = (model.attention_parameters + experts) / layout.tensor
    ends = 1 if layout.pipeline > 1 or model.tied else 2  # embedding and output layer
    own = layout.layers_of_a_rank(model) * layer
    return own + ends * model.embedding_parameters / layout.tensor


def gradient_buckets(model: Transformer, layout: Layout) -> int:
    """Return in how many buckets a rank's gradients leave: as many as come nearest to their size.

    Raises:
        LayoutError: the model cannot be laid out so.

    """
    nbytes = layout.gradient_bytes * parameters_of_a_rank(model, layout)
    return max(1, round(nbytes / layout.bucket))
