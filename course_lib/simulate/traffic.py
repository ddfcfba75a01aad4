"""Bytes that one rank sends in a step, by purpose and by link."""

from typing import NamedTuple

from course_lib.simulate.cluster import Cluster
from course_lib.simulate.layout import Layout
from course_lib.simulate.parameters import parameters_of_a_rank
from course_lib.simulate.transformer import Transformer


class Traffic(NamedTuple):
    """Bytes that the busiest rank sends in one step."""

    tensor: float
    pipeline: float
    data: float
    experts: float
    context: float
    between: float
    """The part of all these that leaves the node."""


def traffic_of(model: Transformer, cluster: Cluster, layout: Layout) -> Traffic:
    """Return the bytes that one rank in the middle of a pipeline sends.

    Raises:
        LayoutError: the model cannot be laid out so.

    """
    t, h, p, e = layout.tensor, layout.holders, layout.pipeline, layout.expert
    passes = 2 + layout.backward_collectives
    times = layout.micro_batches * layout.layers_of_a_rank(model)
    activations = model.boundary_bytes(layout.sequences)
    c = layout.context
    keys_and_values = 4.0 * layout.micro_batch * model.sequence * model.keys / t
    context = times * (1 + layout.backward_collectives) * (c - 1) / c * keys_and_values
    tensor = times * passes * model.blocks / 2 * 2 * (t - 1) / t * activations
    experts = times * passes * (e - 1) / e * model.top_k * activations / t
    pipeline = (p > 1) * 2 * layout.micro_batches * layout.chunks * activations / t
    parameters = parameters_of_a_rank(model, layout)
    if layout.zero == 3:
        bytes_per_parameter = layout.micro_batches * (4 + layout.gradient_bytes)
    else:
        bytes_per_parameter = layout.gradient_bytes + (2 if layout.zero else layout.gradient_bytes)
    data = (h - 1) / h * parameters * bytes_per_parameter
    spans = (
        *((tensor, t), (context, t * c), (experts, t * c * e)),
        *((data, t * h), (pipeline, 2 * t * h)),
    )
    between = sum(nbytes for nbytes, ranks in spans if ranks > cluster.node_size)
    return Traffic(tensor, pipeline, data, experts, context, between)
