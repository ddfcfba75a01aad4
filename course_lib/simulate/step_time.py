"""Compute the time of one training step by cause, and a rank's traffic and memory.

The forward of one layer and one micro-batch takes its operations over the rate that matrix products
reach, plus the bytes of activations over the memory's bandwidth. Backward takes twice that, plus a
forward if it is recomputed. A tensor-parallel layer adds two all-reduces each way, an expert layer
two all-to-alls. With these F and B seconds per micro-batch, p ranks of a pipeline are idle for

    GPipe             (p-1) (F + B)      + 2 (p-1) c              c: seconds of a message
    1F1B              (p-1) (F + B)      + 2 (p-1) c + (2 (p-1) m/p - 2) c
    interleaved, v    (p-1) (F + B) / v  + 2 (pv-1) c
    zero bubble       (p-1) F            + 4 (p-1) c

(1F1B also waits at every turn from forward to backward, unless the last rank, which has the output
layer, is slower anyway.) The gradients are sent beside the last backward, or after it:

    all at the end      C                                   C: time of the collective
    in k buckets        max(C/k, B/k + C - B)               beside B seconds of backward,
                                                            where each layer fills a bucket
    ZeRO-3, n layers    about n max(f, g) forward, n max(b, g+r) backward

(g, r: gather and reduce-scatter of a layer's weights and gradients; f, b: its computation.) Then
comes the optimizer, which reads and writes 28 bytes per parameter. A share for waiting grows with
log K, because among many ranks one is always late.

Not included: reading data, checkpoints, failures, imbalance of stages other than the output
layer's, memory fragmentation, and contention of groups for one link.

D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021, section 3, has most of the terms.
"""

from typing import NamedTuple

from course_lib.cost_model import message_time
from course_lib.simulate.cluster import Cluster
from course_lib.simulate.group_time import all_reduce_time, all_to_all_time, half_time
from course_lib.simulate.layout import Layout
from course_lib.simulate.memory import Memory, memory_of
from course_lib.simulate.parameters import gradient_buckets, parameters_of_a_rank
from course_lib.simulate.traffic import Traffic, traffic_of
from course_lib.simulate.transformer import Transformer

OPTIMIZER_BYTES = 28
"""Per parameter: gradient 2, weight, two moments read and written 24, and the 2-byte weight."""


class Both(NamedTuple):
    """Seconds of a forward and of a backward."""

    forward: float
    backward: float

    def times(self, factor: float) -> "Both":
        """Return both, multiplied by `factor`."""
        return Both(self.forward * factor, self.backward * factor)

    def plus(self, other: "Both") -> "Both":
        """Return the sums."""
        return Both(self.forward + other.forward, self.backward + other.backward)

    @property
    def total(self) -> float:
        """Seconds of both together."""
        return self.forward + self.backward


class Estimate(NamedTuple):
    """The estimate of a step. The seconds by cause add up to `seconds`.

    Attributes:
        seconds: time of one step.
        computation: time on the rank with most layers, recomputation included.
        tensor: collectives of tensor parallelism.
        experts: all-to-alls.
        pipeline: idle time because of the schedule and its messages.
        data: communication of gradients and weights that computation does not hide.
        optimizer: the update.
        waiting: waiting for the slowest rank.
        mfu: the model's operations over those of all devices at their peak.
        tokens_per_second: tokens per second of one device.
        memory: memory of the rank that holds most.
        traffic: bytes that one rank sends.

    """

    seconds: float
    computation: float
    tensor: float
    experts: float
    pipeline: float
    data: float
    optimizer: float
    waiting: float
    mfu: float
    tokens_per_second: float
    memory: Memory
    traffic: Traffic


def estimate(model: Transformer, cluster: Cluster, layout: Layout) -> Estimate:
    """Return the estimate of a step of `model` on `cluster` in this `layout`.

    Raises:
        LayoutError: the model cannot be laid out so.

    """
    layers = layout.layers_of_a_rank(model)
    compute = layer_computation(model, cluster, layout).times(layers)
    tensor = layer_all_reduces(model, cluster, layout).times(layers)
    experts = layer_all_to_alls(model, cluster, layout).times(layers)
    output = output_layer(model, cluster, layout)
    rank = compute.plus(tensor).plus(experts)
    if layout.zero == 3:
        whole = _gathered(model, cluster, layout, rank, layers)
        data = layout.micro_batches * (whole - rank.total)
    else:
        data = exposed_gradients(model, cluster, layout, rank.backward)
    m = layout.micro_batches
    idle = pipeline_idle(layout, rank, boundary(model, cluster, layout), output.total)
    computed = m * (compute.total + output.total)
    parameters = parameters_of_a_rank(model, layout)
    updated = parameters / (layout.data if layout.zero else 1)
    optimizer = OPTIMIZER_BYTES * updated / cluster.device.memory_bandwidth
    busy = m * (rank.total + output.total) + idle + data + optimizer
    waiting = busy * cluster.reached.waiting * (layout.ranks.bit_length() - 1)
    seconds = busy + waiting
    peak = cluster.device.flops * layout.ranks
    return Estimate(
        seconds, computed, m * tensor.total, m * experts.total, idle, data, optimizer, waiting,
        model.model_flops(layout.batch) / seconds / peak,
        layout.batch * model.sequence / seconds / layout.ranks,
        memory_of(model, layout), traffic_of(model, cluster, layout),
    )  # fmt: skip


def layer_computation(model: Transformer, cluster: Cluster, layout: Layout) -> Both:
    """Return the seconds of one layer's computation for one micro-batch."""
    b, t = layout.micro_batch, layout.tensor
    flops, attention = model.layer_flops(b)
    rate = cluster.device.flops * cluster.reached.matmul
    moved = cluster.reached.traffic / cluster.device.memory_bandwidth
    kept = model.activation_bytes(b, t, layout.sequence_parallel)
    forward = flops / t / rate + moved * kept
    again = 0.0
    if layout.recompute == "full":
        again = forward
    elif layout.recompute == "selective" and not model.fused_attention:
        scores = b * model.sequence * model.scores_bytes / t
        again = attention / t / rate + moved * scores
    return Both(forward, 2 * forward + again)


def output_layer(model: Transformer, cluster: Cluster, layout: Layout) -> Both:
    """Return the seconds of the output layer and the loss, which only the last stage has."""
    rate = cluster.device.flops * cluster.reached.matmul
    logits = 4 * layout.micro_batch * model.sequence * model.vocabulary / layout.tensor
    forward = model.output_flops(layout.micro_batch) / layout.tensor / rate
    forward += cluster.reached.traffic * logits / cluster.device.memory_bandwidth
    return Both(forward, 2 * forward)


def layer_all_reduces(model: Transformer, cluster: Cluster, layout: Layout) -> Both:
    """Return the seconds of one layer's tensor-parallel collectives: two each way.

    If activations are divided along the sequence, each becomes an all-gather and a reduce-scatter,
    which together take the same time.
    """
    nbytes = model.boundary_bytes(layout.micro_batch)
    one = all_reduce_time(nbytes, layout.tensor, 1, cluster)
    return Both(2 * one, layout.backward_collectives * one)


def layer_all_to_alls(model: Transformer, cluster: Cluster, layout: Layout) -> Both:
    """Return the seconds of sending tokens to their experts and back: two each way."""
    if layout.expert == 1:
        return Both(0.0, 0.0)
    nbytes = model.boundary_bytes(layout.micro_batch) * model.top_k / layout.tensor
    one = all_to_all_time(nbytes, layout.expert, layout.tensor, cluster)
    return Both(2 * one, layout.backward_collectives * one)


def pipeline_idle(layout: Layout, rank: Both, message: float, output: float = 0.0) -> float:
    """Return the idle seconds of a rank of the pipeline.

    `output` is the extra time that the last rank computes for every micro-batch; meanwhile,
    messages of 1F1B arrive. Exact for messages that are short beside F and B, and for 1F1B if p
    divides m.
    """
    p, m, v = layout.pipeline, layout.micro_batches, layout.chunks
    if p == 1:
        return 0.0
    if layout.schedule == "zero-bubble":  # both halves of backward take the same time
        return (p - 1) * (rank.forward + 4 * message)
    if layout.schedule == "interleaved":
        return (p - 1) * rank.total / v + 2 * (p * v - 1) * message
    there_and_back = (p - 1) * (rank.total + 2 * message)
    if layout.schedule == "gpipe":
        return there_and_back
    return there_and_back + max(0.0, (2 * (p - 1) * m / p - 2) * message - m * output)


def boundary(model: Transformer, cluster: Cluster, layout: Layout) -> float:
    """Return the seconds to send one micro-batch's activations to the next stage.

    Each rank of a tensor-parallel group sends its part.
    """
    nbytes = model.boundary_bytes(layout.micro_batch) / layout.tensor
    return message_time(nbytes, cluster.link(2 * layout.tensor * layout.data))


def gradients_time(model: Transformer, cluster: Cluster, layout: Layout, buckets: int = 1) -> float:
    """Return the seconds of the all-reduce of one of `buckets`; with ZeRO, of its halves."""
    nbytes = parameters_of_a_rank(model, layout) / buckets
    group = layout.data, layout.tensor, cluster
    if layout.zero:
        gather = half_time(2 * nbytes, *group)
        return gather + half_time(layout.gradient_bytes * nbytes, *group)
    return all_reduce_time(layout.gradient_bytes * nbytes, *group)


def exposed_gradients(
    model: Transformer, cluster: Cluster, layout: Layout, backward: float
) -> float:
    """Return the gradients' time that the last `backward` seconds do not hide."""
    if layout.data == 1:
        return 0.0
    if not layout.overlap:
        return gradients_time(model, cluster, layout)
    buckets = gradient_buckets(model, layout)
    one = gradients_time(model, cluster, layout, buckets)
    layers = layout.layers_of_a_rank(model) // layout.chunks
    over, gone = 0.0, 0
    for layer in range(1, layers + 1):
        ready = buckets * layer // layers
        start = max(over, backward / layout.chunks * layer / layers)
        over, gone = start + (ready - gone) * one, ready
    left = over - backward / layout.chunks
    return left + (1 - cluster.reached.hidden) * (buckets * one - left)


def _gathered(
    model: Transformer, cluster: Cluster, layout: Layout, rank: Both, layers: int
) -> float:
    """Return the seconds of one micro-batch if each layer's weights are gathered in advance."""
    one = model.layer_parameters / layout.tensor
    gather = half_time(2 * one, layout.data, layout.tensor, cluster)
    reduce = half_time(layout.gradient_bytes * one, layout.data, layout.tensor, cluster)
    alone = rank.total + layers * (2 * gather + reduce)
    if not layout.overlap:
        return alone
    best = _one_ahead(rank.forward / layers, gather, 0.0, layers)
    best += _one_ahead(rank.backward / layers, gather, reduce, layers)
    return best + (1 - cluster.reached.hidden) * (alone - best)


def _one_ahead(compute: float, gather: float, reduce: float, layers: int) -> float:
    """Return the seconds of a pass in which weights arrive while the layer before computes."""
    now, link = 0.0, gather  # when the rank, and its link, are free again
    arrived = link
    for layer in range(layers):
        now = max(now, arrived)
        if layer + 1 < layers:
            arrived = link = max(link, now) + gather
        now += compute
        if reduce:
            link = max(link, now) + reduce
    return max(now, link)
