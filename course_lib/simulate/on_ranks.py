"""The same step on simulated ranks: every message is sent, but no number is computed.

    >>> from course_lib.simulate import CLUSTERS, Layout, Transformer
    >>> from course_lib.simulate.on_ranks import step_on_ranks
    >>> small = Transformer(layers=4, width=512, heads=8, vocabulary=1000, sequence=256)
    >>> seconds, trace = step_on_ranks(small, CLUSTERS["selene"], Layout(tensor=2, data=2, batch=4))

Tensors are on the device "meta": they have a size and no content. On the ranks' virtual clock,
layers take the seconds that `step_time` computes. Waiting, use of links and overlap follow from the
messages, not from a formula. A few hundred ranks are possible.

There are two differences from `estimate`: the optimizer does not update, and `hidden` is 1, because
on a virtual clock communication and computation do not slow each other down.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import torch
import torch.distributed as dist

from course_lib.pipeline_parallel import Step
from course_lib.ranks import Network, Ranks, Trace, compute
from course_lib.sharded_optimizer import start_all_gather, start_reduce_scatter
from course_lib.simulate.cluster import Cluster
from course_lib.simulate.group_time import members_of_a_node
from course_lib.simulate.layout import Layout, LayoutError
from course_lib.simulate.parameters import gradient_buckets, parameters_of_a_rank
from course_lib.simulate.step_time import Both, layer_computation, output_layer
from course_lib.simulate.transformer import Transformer

MOST_RANKS = 512
"""More ranks would take minutes; `estimate` has no limit."""


def step_on_ranks(model: Transformer, cluster: Cluster, layout: Layout) -> tuple[float, Trace]:
    """Run one step on simulated ranks; return its seconds and its trace.

    Raises:
        LayoutError: the model cannot be laid out like this, there are too many ranks, or
            communication should overlap in a group that fills only a part of several nodes.

    """
    if layout.ranks > MOST_RANKS:
        raise LayoutError(
            f"at most {MOST_RANKS} ranks can be simulated, got {layout.ranks}: use estimate()"
        )
    if layout.expert > 1:
        raise LayoutError("experts work only in estimate(); see course_lib.expert_parallel")
    if layout.context > 1 or layout.shards < layout.holders or layout.tensor_overlap:
        raise LayoutError("context, shard and tensor_overlap work only in estimate()")
    if layout.recompute == "full" and layout.recomputed < 1:
        raise LayoutError(
            "recomputed below 1 works only in estimate(): step_on_ranks treats all layers alike"
        )
    if layout.chunks > 1 and layout.data > 1 and layout.overlap:
        raise LayoutError("with several chunks per rank, step_on_ranks needs overlap=False")
    if layout.layers_of_a_rank(model) * layout.pipeline != model.layers:
        raise LayoutError(
            f"{model.layers} layers cannot be divided equally into {layout.stages} stages"
        )
    inner = members_of_a_node(cluster, layout.data, layout.tensor)
    mixed = 1 < inner < layout.data
    if mixed and (layout.zero == 3 or (layout.overlap and layout.data > 1)):
        way = "" if layout.zero == 3 else "Use overlap=False, or "
        raise LayoutError(
            f"the {layout.data} data-parallel ranks are on several nodes, {inner} on each: "
            f"step_on_ranks cannot overlap collectives on two levels. {way}"
            f"{'u' if way else 'U'}se a node_size of {layout.data * layout.tensor} or more"
        )
    if layout.zero in (1, 2) and layout.overlap:
        raise LayoutError(
            "with ZeRO-1 and ZeRO-2, step_on_ranks needs overlap=False: the ranks gather the "
            "weights only after the update"
        )
    network = Network(
        *cluster.link_between,
        node_size=cluster.node_size,
        inside=Network(*cluster.link_inside, eager_below=1 << 62),
        eager_below=1 << 62,
    )
    with Ranks(layout.ranks, on="simulated", network=network) as ranks:
        ranks.run(_Rank.run, model, cluster, layout)
        return ranks.trace.makespan, ranks.trace


def groups_of(layout: Layout, cluster: Cluster) -> dict[str, list[list[int]]]:
    """Return all groups of ranks by their purpose, each in the order of its ranks."""
    t, d, p = layout.tensor, layout.data, layout.pipeline
    inner = members_of_a_node(cluster, d, t)

    def at(stage: int, replica: int, part: int) -> int:
        return (stage * d + replica) * t + part

    data = [[at(s, r, i) for r in range(d)] for s, i in product(range(p), range(t))]
    return {
        "tensor": [[at(s, r, i) for i in range(t)] for s, r in product(range(p), range(d))],
        "data": data,
        "node": [each[at : at + inner] for each in data for at in range(0, d, inner)],
        "nodes": [each[at::inner] for each in data for at in range(inner)],
    }


class _Rank:
    """One rank's step; the rank itself creates and runs it."""

    @staticmethod
    def run(model: Transformer, cluster: Cluster, layout: Layout) -> None:
        _Rank(model, cluster, layout).step()

    def __init__(self, model: Transformer, cluster: Cluster, layout: Layout) -> None:
        self.model, self.cluster, self.layout = model, cluster, layout
        self.rank = dist.get_rank()
        self.place = self.rank // (layout.tensor * layout.data)  # in the pipeline
        self.schedule = layout.steps()
        self.groups = {
            name: _own(groups, self.rank) for name, groups in groups_of(layout, cluster).items()
        }
        self.layers = layout.layers_of_a_rank(model) // layout.chunks
        self.seconds = layer_computation(model, cluster, layout)
        self.handles: list[dist.Work | None] = []
        self.buckets: list[dist.Work | None] = []

    # --- the pipeline ------------------------------------------------------------------------

    def step(self) -> None:
        steps = self.schedule.steps[self.place]
        last = max(at for at, step in enumerate(steps) if step.action in "BI")
        for at, step in enumerate(steps):
            self.receive(step)
            self.work(step, last=at == last)
            self.send(step)
        if self.layout.zero != 3 and self.layout.data > 1:
            self.finish_gradients()
        for handle in self.handles:
            if handle is not None:
                handle.wait()

    def stage_of(self, step: Step) -> int:
        """Return the stage of the model on which a step works."""
        return self.schedule.work(self.place, step).stage

    def neighbour(self, step: Step, behind: bool) -> int | None:
        """Return the rank from which this step's input comes, or to which its output goes."""
        forward = step.action == "F"
        other = self.stage_of(step) + (1 if forward != behind else -1)
        if step.action == "W" or not 0 <= other < self.schedule.stages:
            return None
        moved = self.schedule.rank_of(other) - self.place
        return self.rank + moved * self.layout.tensor * self.layout.data

    def tag(self, step: Step, behind: bool) -> int:
        """Return a message's tag, which both sides know: it encodes micro-batch and stage."""
        forward = step.action == "F"
        sender = self.stage_of(step) + ((-1 if forward else 1) if behind else 0)
        number = step.micro_batch * self.schedule.stages + sender
        return 2 * number + forward

    def receive(self, step: Step) -> None:
        if (source := self.neighbour(step, behind=True)) not in (None, self.rank):
            dist.recv(self.activations(), source, tag=self.tag(step, behind=True))

    def send(self, step: Step) -> None:
        target = self.neighbour(step, behind=False)
        if target is not None and target != self.rank:
            tag = self.tag(step, behind=False)
            self.handles.append(dist.isend(self.activations(), target, tag=tag))

    # --- one micro-batch on one chunk ----------------------------------------------------------

    def work(self, step: Step, last: bool) -> None:
        if step.action == "F" and self.is_last(step):
            compute(output_layer(self.model, self.cluster, self.layout).forward)
        if step.action in "BI" and self.is_last(step):
            compute(output_layer(self.model, self.cluster, self.layout).backward)
        if step.action == "W":
            compute(self.layers * self.seconds.backward / 2)
            return
        seconds, sums = self.of_layer(step)
        gathers = self.gathers(step) if self.layout.zero == 3 else None
        for layer in range(self.layers):
            if gathers is not None:
                next(gathers)
            compute(seconds)
            for _ in range(sums):
                dist.all_reduce(self.activations(whole=True), group=self.groups["tensor"])
            if last and self.layout.overlap and self.layout.zero == 0:
                self.start_gradients(layer + 1)
        if gathers is not None:
            list(gathers)

    def is_last(self, step: Step) -> bool:
        return self.stage_of(step) == self.schedule.stages - 1

    def of_layer(self, step: Step) -> tuple[float, int]:
        """Return one layer's seconds of computation in this step, and its number of all-reduces."""
        whole = Both(self.seconds.forward, self.seconds.backward)
        seconds = whole.forward if step.action == "F" else whole.backward
        if step.action == "I":
            seconds /= 2
        sums = 2 if step.action == "F" else int(self.layout.backward_collectives)
        return seconds, 0 if self.layout.tensor == 1 else sums

    def activations(self, whole: bool = False) -> torch.Tensor:
        nbytes = self.model.boundary_bytes(self.layout.micro_batch)
        return _meta(nbytes / (1 if whole else self.layout.tensor))

    # --- data parallelism -----------------------------------------------------------------------

    def start_gradients(self, layers: int) -> None:
        """Launch the buckets that are full after the backward of `layers` layers."""
        if self.layout.data == 1:
            return
        parameters = parameters_of_a_rank(self.model, self.layout)
        nbytes = self.layout.gradient_bytes * parameters
        buckets = gradient_buckets(self.model, self.layout)
        ready = buckets * layers // self.layers
        while len(self.buckets) < ready:
            self.buckets.append(
                dist.all_reduce(_meta(nbytes / buckets), group=self.groups["data"], async_op=True)
            )

    def finish_gradients(self) -> None:
        """Send the gradients that were not sent during backward."""
        if self.layout.overlap and self.layout.zero == 0:
            self.handles += self.buckets
            return
        nbytes = parameters_of_a_rank(self.model, self.layout)
        gradients = nbytes * self.layout.gradient_bytes
        self.reduce_scatter(gradients)
        self.all_gather(2 * nbytes if self.layout.zero else gradients)

    def reduce_scatter(self, nbytes: float) -> None:
        """Reduce-scatter inside the nodes, then between them."""
        for name in ("node", "nodes"):
            size = dist.get_world_size(self.groups[name])
            nbytes /= size
            if size > 1:
                _wait(self.scatter(nbytes, name))

    def all_gather(self, nbytes: float) -> None:
        """All-gather between the nodes, then inside them."""
        nbytes /= self.layout.data
        for name in ("nodes", "node"):
            size = dist.get_world_size(self.groups[name])
            if size > 1:
                _wait(self.gather(nbytes, name))
            nbytes *= size

    def scatter(self, nbytes: float, name: str = "data") -> dist.Work | None:
        """Launch a reduce-scatter after which every rank keeps `nbytes`."""
        size = dist.get_world_size(self.groups[name])
        mine = _meta(nbytes)
        return start_reduce_scatter(mine, _meta(size * mine.numel()), self.groups[name])

    def gather(self, nbytes: float, name: str = "data") -> dist.Work | None:
        """Launch an all-gather to which every rank contributes `nbytes`."""
        size = dist.get_world_size(self.groups[name])
        mine = _meta(nbytes)
        return start_all_gather(_meta(size * mine.numel()), mine, self.groups[name])

    def gathers(self, step: Step) -> Iterator[None]:
        """Gather each layer's weights before it computes, and prefetch those of the next one.

        In backward the gradients of a layer are scattered while the next one computes.
        """
        one = self.model.layer_parameters / self.layout.tensor / self.layout.data
        gradients = self.layout.gradient_bytes * one
        overlap = self.layout.overlap
        coming, leaving = self.gather(2 * one), list[dist.Work | None]()
        for layer in range(self.layers):
            _wait(coming)
            more = layer + 1 < self.layers
            if more and overlap:
                coming = self.gather(2 * one)
            yield
            if step.action == "B":
                leaving.append(self.scatter(gradients))
                if not overlap:
                    _wait(leaving[-1])
            if more and not overlap:
                coming = self.gather(2 * one)
        for each in leaving:
            _wait(each)


def _wait(handle: dist.Work | None) -> None:
    if handle is not None:
        handle.wait()


def _meta(nbytes: float) -> torch.Tensor:
    return torch.empty(max(1, round(nbytes)), dtype=torch.uint8, device="meta")


def _own(groups: Sequence[Sequence[int]], rank: int) -> dist.ProcessGroup:
    """Create all groups, in the same order on all ranks; return the group of `rank`."""
    made: list[dist.ProcessGroup] = [dist.new_group(list(members)) for members in groups]
    return made[next(at for at, members in enumerate(groups) if rank in members)]
