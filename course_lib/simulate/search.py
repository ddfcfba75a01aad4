"""Find the fastest layout that fits: try all of them, with one formula each.

    >>> from course_lib.simulate import CLUSTERS, Transformer
    >>> from course_lib.simulate.search import search
    >>> gpt = Transformer(layers=40, width=5120, heads=40, vocabulary=51200)
    >>> best = search(gpt, CLUSTERS["selene"], ranks=64, batch=512)[0]

A tensor-parallel group stays inside a node: between nodes its all-reduces would cost more time than
the division saves. Every other layout that divides evenly is a candidate.
"""

from collections.abc import Iterator
from typing import NamedTuple

from course_lib.simulate.cluster import Cluster
from course_lib.simulate.layout import Layout, LayoutError, Recompute
from course_lib.simulate.memory import memory_of
from course_lib.simulate.step_time import Estimate, estimate
from course_lib.simulate.transformer import Transformer

MICRO_BATCHES = (1, 2, 4, 8, 16)
RECOMPUTE: dict[bool, tuple[Recompute, ...]] = {
    False: ("none", "selective", "full"),
    True: ("none", "full"),  # fused attention keeps no scores: nothing to select
}
SPARE = 0.1
"""Share of the memory for communication buffers, fragmentation, and libraries."""


class Found(NamedTuple):
    """A layout that fits, and the estimate of a step in it."""

    layout: Layout
    estimate: Estimate


def search(
    model: Transformer, cluster: Cluster, ranks: int, batch: int, most: int = 10
) -> list[Found]:
    """Return up to `most` layouts on `ranks` devices, the fastest first.

    Raises:
        ValueError: no layout fits; the message says how much memory the smallest one needs.

    """
    found, smallest = [], float("inf")
    for layout in candidates(model, cluster, ranks, batch):
        held = memory_of(model, layout).total
        smallest = min(smallest, held)
        if held <= (1 - SPARE) * cluster.memory:
            found.append(Found(layout, estimate(model, cluster, layout)))
    if not found:
        raise ValueError(
            f"no layout fits on {ranks} devices: the smallest needs {smallest / 1e9:.1f} GB of "
            f"{cluster.memory / 1e9:.0f} per device, and {SPARE:.0%} must stay free"
            if smallest < float("inf")
            else f"no layout on {ranks} devices cuts a batch of {batch} sequences evenly"
        )
    return sorted(found, key=lambda each: each.estimate.seconds)[:most]


def candidates(model: Transformer, cluster: Cluster, ranks: int, batch: int) -> Iterator[Layout]:
    """Yield every valid layout of the model."""
    for tensor in _divisors(min(cluster.node_size, ranks)):
        for pipeline in _divisors(ranks // tensor) if ranks % tensor == 0 else ():
            data = ranks // tensor // pipeline
            for micro_batch in MICRO_BATCHES:
                for chunks in (1, 2, 3, 4, 6) if pipeline > 1 else (1,):
                    for zero in (0, 1, 3) if data > 1 else (0,):
                        for recompute in RECOMPUTE[model.fused_attention]:
                            try:
                                layout = Layout(
                                    data, tensor, pipeline, 1, zero, batch, micro_batch,
                                    "1f1b" if chunks == 1 else "interleaved", chunks,
                                    recompute, sequence_parallel=tensor > 1,
                                )  # fmt: skip
                                if model.layers % layout.stages == 0:
                                    layout.layers_of_a_rank(model)
                                    yield layout
                            except LayoutError:
                                continue


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
