"""The formulas beside the same step on simulated ranks, where every message is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from course_lib.simulate import CLUSTERS, Cluster, Layout, LayoutError, Transformer, estimate
from course_lib.simulate.on_ranks import step_on_ranks

WITHIN = 0.01
MODEL = Transformer(layers=8, width=2048, heads=16, vocabulary=5000, sequence=1024)


def cluster(node_size: int) -> Cluster:
    found = CLUSTERS["selene"]
    return replace(found, node_size=node_size, reached=replace(found.reached, hidden=1.0))


SMALL: list[tuple[int, dict[str, Any]]] = [
    (8, {"batch": 2}),
    (8, {"tensor": 2, "batch": 2}),
    (8, {"tensor": 8, "batch": 2, "recompute": "full"}),
    (2, {"tensor": 2, "batch": 1, "micro_batch": 1, "sequence_parallel": True}),
    (8, {"data": 3, "batch": 6, "overlap": False}),
    (8, {"data": 4, "batch": 8, "bucket": 1e7}),
    (8, {"data": 8, "batch": 8, "bucket": 1e12}),
    (1, {"data": 4, "batch": 4, "overlap": False}),
    (1, {"data": 4, "batch": 4, "bucket": 5e7}),
    (4, {"data": 8, "batch": 8, "overlap": False}),
    (4, {"data": 4, "batch": 4, "zero": 1, "overlap": False}),
    (2, {"data": 4, "batch": 4, "zero": 2, "overlap": False, "gradient_bytes": 4}),
    (8, {"data": 4, "batch": 4, "zero": 3}),
    (1, {"data": 4, "batch": 8, "zero": 3}),
    (8, {"data": 4, "batch": 4, "zero": 3, "overlap": False}),
    (8, {"pipeline": 2, "batch": 4, "schedule": "gpipe"}),
    (1, {"pipeline": 4, "batch": 8, "schedule": "gpipe"}),
    (8, {"pipeline": 2, "batch": 6}),
    (8, {"pipeline": 4, "batch": 8, "recompute": "full"}),
    (1, {"pipeline": 4, "batch": 8}),
    (8, {"pipeline": 2, "batch": 4, "schedule": "interleaved", "chunks": 2}),
    (1, {"pipeline": 4, "batch": 8, "schedule": "interleaved", "chunks": 2}),
    (8, {"pipeline": 4, "batch": 8, "schedule": "zero-bubble"}),
    (8, {"tensor": 2, "pipeline": 2, "batch": 4}),
    (8, {"data": 2, "pipeline": 2, "batch": 8, "overlap": False}),
    (8, {"data": 2, "tensor": 2, "batch": 4, "overlap": False}),
    (2, {"data": 2, "tensor": 2, "batch": 4, "bucket": 2e7}),
    (8, {"data": 2, "tensor": 2, "pipeline": 2, "batch": 8, "overlap": False}),
]
LARGE: list[tuple[int, dict[str, Any]]] = [
    (8, {"data": 4, "tensor": 8, "batch": 8, "overlap": False}),
    (8, {"data": 2, "tensor": 8, "pipeline": 2, "batch": 8, "bucket": 2e6}),
    (8, {"data": 4, "tensor": 4, "pipeline": 4, "batch": 32, "overlap": False}),
    (8, {"data": 64, "batch": 64, "overlap": False}),
    (8, {"tensor": 8, "pipeline": 8, "batch": 16}),
    (8, {"data": 2, "tensor": 8, "pipeline": 4, "batch": 16, "schedule": "interleaved",
         "chunks": 2, "overlap": False, "recompute": "full"}),
]  # fmt: skip


def name(case: object) -> str:
    return "-".join(f"{k}={v}" for k, v in case.items()) if isinstance(case, dict) else str(case)


def agrees(node_size: int, layout: Layout) -> None:
    found, _ = step_on_ranks(MODEL, cluster(node_size), layout)
    formula = estimate(MODEL, cluster(node_size), layout)
    assert formula.seconds - formula.optimizer == pytest.approx(found, rel=WITHIN)


@pytest.mark.parametrize(("node_size", "layout"), SMALL, ids=name)
def test_formula_and_ranks_agree(node_size: int, layout: dict[str, Any]) -> None:
    agrees(node_size, Layout(**layout))


@pytest.mark.large
@pytest.mark.parametrize(("node_size", "layout"), LARGE, ids=name)
def test_formula_and_up_to_64_ranks_agree(node_size: int, layout: dict[str, Any]) -> None:
    agrees(node_size, Layout(**layout))


@pytest.mark.parametrize(
    ("node_size", "layout", "words"),
    [
        (8, {"data": 1024, "batch": 1024}, "at most 512 ranks"),
        (8, {"tensor": 3, "batch": 1}, "must divide width"),
        (8, {"pipeline": 9, "batch": 9}, "too few"),
        (2, {"data": 4, "batch": 4}, "overlap=False"),
        (8, {"data": 2, "zero": 1, "batch": 2}, "overlap=False"),
        (8, {"data": 2, "expert": 2, "batch": 2}, "experts"),
        (8, {"context": 2, "batch": 2}, "context, shard and tensor_overlap"),
        (2, {"data": 4, "zero": 3, "shard": 2, "batch": 4}, "context, shard and tensor_overlap"),
        (8, {"batch": 1, "recompute": "full", "recomputed": 0.5}, "recomputed below 1"),
        (8, {"pipeline": 3, "batch": 3}, "8 layers cannot be divided equally into 3 stages"),
        (
            8,
            {"data": 2, "pipeline": 2, "batch": 8, "schedule": "interleaved", "chunks": 2},
            "with several chunks per rank, step_on_ranks needs overlap=False",
        ),
    ],
    ids=name,
)
def test_what_cannot_run_says_what_to_do(
    node_size: int, layout: dict[str, Any], words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        step_on_ranks(MODEL, cluster(node_size), Layout(**layout))
