"""Compute the time of one training step by cause, and a rank's traffic and memory.

The time of a layer's forward for one micro-batch is its operations divided by the rate that matrix
products reach, plus all bytes that its operations move divided by the memory's bandwidth. Backward
takes twice as long, plus a forward if it is recomputed, plus the time to add its gradients to those
of earlier micro-batches. A tensor-parallel layer adds two all-reduces in each direction, an expert
layer two all-to-alls, and a divided sequence a gather of keys and values. With these F and B
seconds per micro-batch, p ranks of a pipeline are idle for

    1F1B              (p-1) (F + B)      + 2 (p-1) c + (2 (p-1) m/p - 2) c
    interleaved, v    (p-1) (F + B) / v  + 2 (pv-1) c             c: seconds of a message

(1F1B waits at every turn from forward to backward, unless the last rank, which has the output
layer, is slower anyway.) The gradients are sent during the last backward, or after it:

    all at the end      C                                   C: time of the collective
    in k buckets        max(C/k, B/k + C - B)               during B seconds of backward,
                                                            if each layer fills a bucket
    ZeRO-3, n layers    about n max(f, g) forward, n max(b, g+r) backward

(g, r: gather and reduce-scatter of a layer's weights and gradients; f, b: its computation.) With v
chunks per rank, p more backwards of a chunk can hide the gradients of a chunk. Hidden communication
still costs a share of its time, 1 - `hidden`. At the end, the optimizer reads and writes 28 bytes
per parameter.

Not included: reading data, checkpoints, failures, imbalance of stages other than the output
layer's, memory fragmentation, and contention of groups for one link.

Most of the terms are in D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", SC 2021, section 3.
"""

from typing import NamedTuple

from course_lib.cost_model import message_time
from course_lib.simulate.cluster import Cluster
from course_lib.simulate.group_time import all_reduce_time, all_to_all_time, half_time
from course_lib.simulate.layout import Layout
from course_lib.simulate.memory import Memory, memory_of
from course_lib.simulate.parameters import experts_of_a_rank, parameters_of_a_rank
from course_lib.simulate.traffic import Traffic, traffic_of
from course_lib.simulate.transformer import Transformer

OPTIMIZER_BYTES = 28
"""Bytes per parameter: read the gradient (2), read and write the weight and two moments (24), and
write the 2-byte weight."""

LOSS_BYTES = 12
"""Bytes per logit in forward: read 2, write and read 4, write a gradient 2; in backward twice."""


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


class Causes(NamedTuple):
    """The seconds of a step by cause; they add up to its time.

    Attributes:
        computation: time on the rank with the most layers, recomputation included.
        tensor: collectives of tensor parallelism that computation does not hide.
        context: gathering keys and values of the other parts of a sequence.
        experts: all-to-alls.
        pipeline: idle time because of the schedule and its messages.
        data: communication of gradients and weights that computation does not hide.
        optimizer: time of the optimizer's update.

    """

    computation: float
    tensor: float
    context: float
    experts: float
    pipeline: float
    data: float
    optimizer: float

    @property
    def network(self) -> float:
        """The seconds of all communication but the pipeline's."""
        return self.tensor + self.context + self.experts + self.data


class Estimate(NamedTuple):
    """The estimate of a step.

    Attributes:
        causes: its seconds by cause.
        mfu: the model's operations over those of all devices at their peak.
        tokens_per_second: tokens per second of one device.
        memory: memory of the rank that holds the most.
        traffic: bytes that one rank sends.

    """

    causes: Causes
    mfu: float
    tokens_per_second: float
    memory: Memory
    traffic: Traffic

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return sum(self.causes)


def estimate(model: Transformer, cluster: Cluster, layout: Layout) -> Estimate:
    """Return the estimate of a step of `model` on `cluster` in this `layout`.

    Raises:
        LayoutError: the model cannot be laid out so.

    """
    causes = seconds_by_cause(model, cluster, layout)
    seconds = sum(causes)
    peak = cluster.device.flops * layout.ranks
    return Estimate(
        causes,
        mfu=model.model_flops(layout.batch) / seconds / peak,
        tokens_per_second=layout.batch * model.sequence / seconds / layout.ranks,
        memory=memory_of(model, layout),
        traffic=traffic_of(model, cluster, layout),
    )


def seconds_by_cause(model: Transformer, cluster: Cluster, layout: Layout) -> Causes:
    """Return the seconds of a step by cause.

    Raises:
        LayoutError: the model cannot be laid out so.

    """
    layers = layout.layers_of_a_rank(model)
    compute = layer_computation(model, cluster, layout).times(layers)
    tensor = layer_all_reduces(model, cluster, layout).times(layers)
    if layout.tensor_overlap:
        tensor = _beside(tensor, compute, cluster)
    context = layer_context(model, cluster, layout).times(layers)
    experts = layer_all_to_alls(model, cluster, layout).times(layers)
    output = output_layer(model, cluster, layout)
    rank = compute.plus(tensor).plus(context).plus(experts)
    if layout.zero == 3:
        gathered = _gathered(model, cluster, layout, rank, layers)
        data = layout.micro_batches * (gathered - rank.total)
    else:
        data = exposed_gradients(model, cluster, layout, rank.backward)
    m = layout.micro_batches
    idle = pipeline_idle(layout, rank, boundary(model, cluster, layout), output.total)
    computed = m * (compute.total + output.total)
    parameters = parameters_of_a_rank(model, layout)
    updated = parameters / (layout.shards if layout.zero else 1)
    optimizer = OPTIMIZER_BYTES * updated / _memory_rate(cluster)
    sent = m * tensor.total, m * context.total, m * experts.total
    return Causes(computed, *sent, idle, data, optimizer)


def _memory_rate(cluster: Cluster) -> float:
    """Return the bytes per second that a streaming kernel moves."""
    return cluster.device.memory_bandwidth * cluster.reached.memory


def layer_computation(model: Transformer, cluster: Cluster, layout: Layout) -> Both:
    """Return the seconds of one layer's computation for one micro-batch.

    Matrix products take the time of their operations plus the time to read and write the matrices.
    The second term is why small matrices are slow. The operations in between take the time to move
    their bytes.
    """
    b, t = layout.sequences, layout.tensor
    flops, attention = model.layer_flops(b)
    reached, peak, memory = cluster.reached, cluster.device.flops, _memory_rate(cluster)
    share = layout.expert if model.experts > 1 else 1
    weights = 2 * model.experts * model.expert_parameters / t  # only its own experts are read
    products = (flops - attention) / t / (peak * reached.matmul)
    products += (model.product_bytes(b, t) - weights + weights / share) / memory
    moved = model.elementwise_bytes(b, t, layout.sequence_parallel) / memory
    moved *= reached.eager if layout.eager else 1
    scores = model.scores_moved(b, t)
    rate = peak * (reached.attention if model.fused_attention else reached.matmul)
    forward_attention = attention / t / rate + scores[0] / memory
    again = 2.5 if model.fused_attention else 2.0
    backward_attention = again * attention / t / rate + scores[1] / memory
    forward = products + moved + forward_attention
    backward = 2 * (products + moved) + backward_attention
    if layout.zero != 3 and layout.micro_batches > 1:  # read a gradient, read and write the sum
        parameters = (model.layer_parameters - model.experts * model.expert_parameters) / t
        parameters += model.experts * model.expert_parameters / t / share
        backward += (2 + 2 * layout.gradient_bytes) * parameters / memory
    if layout.recompute == "full":
        backward += layout.recomputed * forward
    elif layout.recompute == "selective" and not model.fused_attention:
        backward += layout.recomputed * forward_attention
    return Both(forward, backward)


def output_layer(model: Transformer, cluster: Cluster, layout: Layout) -> Both:
    """Return the seconds of the output layer and the loss, which only the last stage has."""
    tokens = layout.sequences * model.sequence
    logits = tokens * model.vocabulary / layout.tensor
    forward = model.output_flops(layout.sequences) / layout.tensor
    forward /= cluster.device.flops * cluster.reached.matmul
    moved = 2 * (logits + tokens * model.width + model.embedding_parameters / layout.tensor)
    forward += (moved + LOSS_BYTES * logits) / _memory_rate(cluster)
    return Both(forward, 2 * forward)


def layer_all_reduces(model: Transformer, cluster: Cluster, layout: Layout) -> Both:
    """Return the seconds of one layer's tensor-parallel collectives: two in each direction.

    If activations are divided along the sequence, each collective becomes an all-gather and a
    reduce-scatter, which together take the same time.
    """
    nbytes = model.boundary_bytes(layout.sequences)
    all_reduce = all_reduce_time(nbytes, layout.tensor, 1, cluster)
    backward = layout.backward_collectives / 2
    return Both(model.blocks * all_reduce, backward * model.blocks * all_reduce)


def layer_context(model: Transformer, cluster: Cluster, layout: Layout) -> Both:
    """Return the seconds to gather one layer's keys and values from a sequence's other parts.

    Backward gathers them again and adds up their gradients.
    """
    if layout.context == 1:
        return Both(0.0, 0.0)
    nbytes = 4.0 * layout.micro_batch * model.sequence * model.keys / layout.tensor
    gather = half_time(nbytes, layout.context, layout.tensor, cluster)
    return Both(gather, layout.backward_collectives * gather)


def layer_all_to_alls(model: Transformer, cluster: Cluster, layout: Layout) -> Both:
    """Return the seconds to send tokens to experts and back: two all-to-alls in each direction."""
    if layout.expert == 1:
        return Both(0.0, 0.0)
    nbytes = model.boundary_bytes(layout.sequences) * model.top_k / layout.tensor
    all_to_all = all_to_all_time(nbytes, layout.expert, layout.tensor * layout.context, cluster)
    return Both(2 * all_to_all, layout.backward_collectives * all_to_all)


def _beside(sent: Both, compute: Both, cluster: Cluster) -> Both:
    """Return the part of `sent` that simultaneous computation does not hide."""
    lost = 1 - cluster.reached.tensor_hidden
    forward = max(sent.forward - compute.forward, lost * sent.forward)
    return Both(forward, max(sent.backward - compute.backward, lost * sent.backward))


def pipeline_idle(layout: Layout, rank: Both, message: float, output: float = 0.0) -> float:
    """Return the idle seconds of a rank of the pipeline.

    `output` is the extra time that the last rank computes for every micro-batch; meanwhile,
    messages of 1F1B arrive. The result is exact if messages are short compared with F and B; for
    1F1B, p must also divide m.
    """
    p, m, v = layout.pipeline, layout.micro_batches, layout.chunks
    if p == 1:
        return 0.0
    if v > 1:
        return (p - 1) * rank.total / v + 2 * (p * v - 1) * message
    waits = max(0.0, (2 * (p - 1) * m / p - 2) * message - m * output)
    return (p - 1) * (rank.total + 2 * message) + waits


def boundary(model: Transformer, cluster: Cluster, layout: Layout) -> float:
    """Return the seconds to send one micro-batch's activations to the next stage.

    Each rank of a tensor-parallel group sends its part.
    """
    nbytes = model.boundary_bytes(layout.sequences) / layout.tensor
    return message_time(nbytes, cluster.link(2 * layout.tensor * layout.holders))


def gradients_time(model: Transformer, cluster: Cluster, layout: Layout, buckets: int = 1) -> float:
    """Return the seconds of the all-reduce of one of `buckets`; with ZeRO, of its two halves."""
    experts = experts_of_a_rank(model, layout)
    shared = parameters_of_a_rank(model, layout) - experts
    seconds = _sum_time(shared / buckets, layout.holders, layout.shards, cluster, layout)
    if experts:
        replicas = layout.holders // layout.expert
        stride = layout.tensor * layout.expert
        seconds += _sum_time(experts / buckets, replicas, replicas, cluster, layout, stride)
    return seconds


def _sum_time(
    numbers: float,
    holders: int,
    shards: int,
    cluster: Cluster,
    layout: Layout,
    stride: int | None = None,
) -> float:
    """Return the seconds to add up gradients; with ZeRO, also to gather weights."""
    stride = stride or layout.tensor
    gradients = layout.gradient_bytes * numbers
    if not layout.zero:
        return all_reduce_time(gradients, holders, stride, cluster)
    gather = half_time(2 * numbers, shards, stride, cluster)
    return gather + scatter_time(gradients, holders, shards, stride, cluster)


def scatter_time(nbytes: float, holders: int, shards: int, stride: int, cluster: Cluster) -> float:
    """Return the seconds after which each of `shards` ranks has the sum of its part of `nbytes`.

    With fewer shards than holders, the replicas add up the parts afterwards.
    """
    scatter = half_time(nbytes, shards, stride, cluster)
    replicas = holders // shards
    if replicas == 1:
        return scatter
    return scatter + all_reduce_time(nbytes / shards, replicas, stride * shards, cluster)


def exposed_gradients(
    model: Transformer, cluster: Cluster, layout: Layout, backward: float
) -> float:
    """Return the part of the gradients' time that the last `backward` seconds do not hide."""
    if layout.holders == 1:
        return 0.0
    if not layout.overlap:
        return gradients_time(model, cluster, layout)
    nbytes = layout.gradient_bytes * parameters_of_a_rank(model, layout)
    buckets = max(1, round(nbytes / layout.bucket))
    bucket = gradients_time(model, cluster, layout, buckets)
    layers = layout.layers_of_a_rank(model)
    # The rank ends its work on one chunk p micro-batches before its work on the next chunk.
    chunk, backward_of_layer = layers // layout.chunks, backward / layers
    between = layout.pipeline * backward / layout.chunks if layout.chunks > 1 else 0.0
    over, gone, now = 0.0, 0, 0.0
    for layer in range(1, layers + 1):
        if layer % chunk == 1 % chunk and layer > 1:
            now += between - backward / layout.chunks
        now += backward_of_layer
        ready = buckets * layer // layers
        start = max(over, now)
        over, gone = start + (ready - gone) * bucket, ready
    left = max(over - now, 0.0)
    return left + (1 - cluster.reached.hidden) * (buckets * bucket - left)


def _gathered(
    model: Transformer, cluster: Cluster, layout: Layout, rank: Both, layers: int
) -> float:
    """Return the seconds of one micro-batch if each layer's weights are gathered in advance."""
    parameters = model.layer_parameters / layout.tensor
    gather = half_time(2 * parameters, layout.shards, layout.tensor, cluster)
    nbytes = layout.gradient_bytes * parameters
    reduce = scatter_time(nbytes, layout.holders, layout.shards, layout.tensor, cluster)
    alone = rank.total + layers * (2 * gather + reduce)
    if not layout.overlap:
        return alone
    best = _one_ahead(rank.forward / layers, gather, 0.0, layers)
    best += _one_ahead(rank.backward / layers, gather, reduce, layers)
    return best + (1 - cluster.reached.hidden) * (alone - best)


def _one_ahead(compute: float, gather: float, reduce: float, layers: int) -> float:
    """Return the seconds of a pass in which weights arrive while the previous layer computes."""
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
