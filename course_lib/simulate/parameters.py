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
    parameters = layout.layers_of_a_rank(model) * layer
    parameters += ends * model.embedding_parameters / layout.tensor
    return parameters + experts_of_a_rank(model, layout)


def experts_of_a_rank(model: Transformer, layout: Layout) -> float:
    """Return how many parameters of a rank belong to experts, which fewer ranks have in common.

    Raises:
        LayoutError: the model cannot be laid out so.

    """
    if model.experts == 1:
        return 0.0
    experts = model.experts * model.expert_parameters / layout.expert / layout.tensor
    return layout.layers_of_a_rank(model) * experts
