"""Find the fastest layouts that fit: try all of them, with the formulas.

    >>> from course_lib.simulate import CLUSTERS, Transformer
    >>> from course_lib.simulate.search import search
    >>> gpt = Transformer(layers=40, width=5120, heads=40, vocabulary=51200)
    >>> best = search(gpt, CLUSTERS["selene"], ranks=64, batch=512)[0]
    >>> best.binds
    'arithmetic'

A tensor-parallel group stays inside a node: between nodes its all-reduces would cost more time than
the division saves. Stages may be uneven, as long as the longest has at most a tenth more layers
than the mean. All other divisions by tensor, context, data and pipeline are candidates. The numbers
of ranks for experts are those that divide both the experts and `data`. Each division is combined
with every stage of ZeRO (ZeRO-3 also inside each node: HSDP), micro-batches, chunks, and
recomputation.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from course_lib.simulate.cluster import Cluster
from course_lib.simulate.layout import Layout, LayoutError, Recompute
from course_lib.simulate.memory import memory_of
from course_lib.simulate.step_time import Estimate, estimate, seconds_by_cause
from course_lib.simulate.transformer import Transformer

MICRO_BATCHES = (1, 2, 4, 8, 16)
CHUNKS = (1, 2, 3, 4, 6, 8)
RECOMPUTE: dict[bool, tuple[tuple[Recompute, float], ...]] = {
    False: (("none", 1.0), ("selective", 1.0), ("full", 0.5), ("full", 1.0)),
    True: (("none", 1.0), ("full", 0.5), ("full", 1.0)),  # no scores are kept: nothing to select
}
SPARE = 0.1
"""Share of the memory for communication buffers, fragmentation, and libraries."""
UNEVEN = 1.1
"""The most layers on a rank, over the mean."""
FEWEST_TOKENS = 1024
"""The fewest tokens of a sequence on one rank: with fewer, dividing it costs more than it saves."""
BINDS = 0.05
"""A loss below this share of a step does not count as the limit of a layout."""


class Found(NamedTuple):
    """A layout that fits, and the estimate of a step in it."""

    layout: Layout
    estimate: Estimate
    binds: str
    """The limit of the layout: "bubble", "network", "memory" (recomputation) or "arithmetic"."""


def search(
    model: Transformer,
    cluster: Cluster,
    ranks: int,
    batch: int,
    like: Layout | None = None,
) -> list[Found]:
    """Return the ten best layouts on `ranks` devices, the fastest first.

    If layouts differ only in ZeRO, one of them is returned: the fastest stage that fits, and if
    some are equally fast, the lowest. `like` says what the program can do (overlap, kernels, bytes
    of a gradient).

    Raises:
        ValueError: no layout fits; the message says how much memory the smallest one needs.

    """
    tried = list(candidates(model, cluster, ranks, batch, like))
    best: dict[Layout, tuple[float, int, Layout]] = {}
    smallest = float("inf")
    for layout in tried:
        held = memory_of(model, layout).total
        smallest = min(smallest, held)
        if held > (1 - SPARE) * cluster.memory:
            continue
        seconds = sum(seconds_by_cause(model, cluster, layout))
        same = replace(layout, zero=0, shard=None)
        if same not in best or (seconds, layout.zero) < best[same][:2]:
            best[same] = seconds, layout.zero, layout
    if not best:
        raise ValueError(
            f"no layout fits on {ranks} devices: the smallest needs {smallest / 1e9:.1f} GB per "
            f"device. A device has {cluster.memory / 1e9:.0f} GB, and {SPARE:.0%} must stay free"
            if tried
            else f"no layout on {ranks} devices divides a batch of {batch} sequences equally"
        )
    first = sorted(best.values(), key=lambda candidate: candidate[:2])[:10]
    return [_found(model, cluster, layout) for _, _, layout in first]


def _found(model: Transformer, cluster: Cluster, layout: Layout) -> Found:
    result = estimate(model, cluster, layout)
    again = sum(seconds_by_cause(model, cluster, replace(layout, recompute="none")))
    losses = {
        "bubble": result.causes.pipeline,
        "network": result.causes.network,
        "memory": result.seconds - again,
    }
    limit = max(losses, key=lambda name: losses[name])
    return Found(layout, result, limit if losses[limit] > BINDS * result.seconds else "arithmetic")


def candidates(
    model: Transformer, cluster: Cluster, ranks: int, batch: int, like: Layout | None = None
) -> Iterator[Layout]:
    """Yield every valid layout of the model."""
    program = {
        name: getattr(like, name)
        for name in ("overlap", "tensor_overlap", "eager", "bucket", "gradient_bytes")
        if like is not None
    }
    for tensor, context, data, pipeline in _divisions(model, cluster, ranks):
        if batch % data:
            continue
        holders, inside = data * context, cluster.node_size // tensor
        shards: list[tuple[int, int | None]] = [(0, None)]
        if holders > 1:
            shards += [(1, None), (2, None)]
        if holders > 1 and pipeline == 1:
            shards += [(3, None)]
        if holders > inside > 1 and holders % inside == 0 and pipeline == 1:
            shards += [(3, inside)]
        experts = [divisor for divisor in _divisors(model.experts) if data % divisor == 0]
        for micro_batch, chunks, expert in product(
            MICRO_BATCHES, CHUNKS if pipeline > 1 else (1,), experts
        ):
            try:
                division = Layout(
                    data, tensor, pipeline, expert, batch=batch, micro_batch=micro_batch,
                    chunks=chunks, context=context, sequence_parallel=tensor > 1, **program,
                )  # fmt: skip
                if division.layers_of_a_rank(model) * pipeline > UNEVEN * model.layers:
                    continue
            except LayoutError:
                continue
            for (zero, shard), (recompute, share) in product(
                shards, RECOMPUTE[model.fused_attention]
            ):
                yield replace(
                    division, zero=zero, shard=shard, recompute=recompute, recomputed=share
                )


def _divisions(
    model: Transformer, cluster: Cluster, ranks: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield tensor, context, data and pipeline degrees whose product is `ranks`."""
    for tensor in _divisors(min(cluster.node_size, ranks)):
        if ranks % tensor:
            continue
        for pipeline in _divisors(ranks // tensor):
            if pipeline > model.layers:
                break
            for context in _divisors(ranks // tensor // pipeline):
                if context > 1 and model.sequence // context < FEWEST_TOKENS:
                    break
                yield tensor, context, ranks // tensor // pipeline // context, pipeline


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
