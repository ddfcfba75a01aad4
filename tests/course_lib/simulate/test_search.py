"""The search beside trying everything, and what it says when nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from course_lib.cost_model import Link
from course_lib.simulate import CLUSTERS, Layout, Transformer, estimate
from course_lib.simulate.published import load
from course_lib.simulate.search import SPARE, candidates, search

MODEL = Transformer(layers=12, width=4096, heads=32, vocabulary=50000, fused_attention=True)
SELENE = CLUSTERS["selene"]


def test_the_first_is_the_fastest_that_fits() -> None:
    found = search(MODEL, SELENE, ranks=16, batch=32, most=5)
    assert len(found) == 5
    times = [each.estimate.seconds for each in found]
    assert times == sorted(times)
    fitting = [
        result.seconds
        for layout in candidates(MODEL, SELENE, 16, 32)
        if (result := estimate(MODEL, SELENE, layout)).memory.total <= (1 - SPARE) * SELENE.memory
    ]
    assert times[0] == min(fitting)


def test_every_candidate_uses_all_devices_and_the_whole_batch() -> None:
    seen = list(candidates(MODEL, SELENE, 24, 48))
    assert {layout.ranks for layout in seen} == {24}
    for layout in seen:
        sequences = layout.data * layout.micro_batch * layout.micro_batches
        assert sequences == layout.batch == 48
        assert layout.tensor <= SELENE.node_size
    assert {layout.zero for layout in seen} == {0, 1, 2, 3}
    assert {layout.context for layout in seen} == {1, 2}  # of 1024 tokens at least
    assert any(layout.shard == SELENE.node_size for layout in seen)
    assert {layout.recomputed for layout in seen} == {0.5, 1.0}


def test_stages_may_be_uneven_by_a_tenth() -> None:
    eleven = replace(MODEL, layers=11)
    assert any(layout.pipeline == 4 for layout in candidates(eleven, SELENE, 4, 8))
    nine = replace(MODEL, layers=9)  # three on the longest of four stages, 2.25 on the mean
    assert not any(layout.pipeline == 4 for layout in candidates(nine, SELENE, 4, 8))


def test_experts_are_spread_over_every_number_of_ranks_that_divides() -> None:
    seen = list(candidates(replace(MODEL, experts=4, top_k=2), SELENE, 8, 8))
    assert {layout.expert for layout in seen} == {1, 2, 4}
    assert {layout.expert for layout in candidates(MODEL, SELENE, 8, 8)} == {1}


def test_layouts_that_differ_in_zero_only_are_one() -> None:
    found = search(MODEL, SELENE, ranks=16, batch=32, most=100)
    assert len({replace(each.layout, zero=0, shard=None) for each in found}) == len(found)


def test_what_the_program_can_do_is_kept() -> None:
    like = Layout(gradient_bytes=4, tensor_overlap=True, eager=True, overlap=False)
    for layout in candidates(MODEL, SELENE, 8, 8, like):
        assert layout.gradient_bytes == 4 and layout.tensor_overlap
        assert layout.eager and not layout.overlap


def test_a_slow_network_binds_and_a_long_pipeline_has_a_bubble() -> None:
    slow = replace(SELENE, node_size=1, between=Link(1e-5, 1e8))
    flat = replace(MODEL, layers=1)  # no pipeline
    assert search(flat, slow, ranks=2, batch=2, most=1)[0].binds == "network"
    deep = Transformer(layers=64, width=8192, heads=64, vocabulary=1000, fused_attention=True)
    fast = replace(SELENE, node_size=1, between=Link(0.0, 1e15))
    assert search(deep, fast, ranks=16, batch=1, most=1)[0].binds == "bubble"


def test_the_bar_ends_where_all_are_tried() -> None:
    seen: list[tuple[int, int]] = []
    search(MODEL, SELENE, 16, 32, progress=lambda done, of: seen.append((done, of)))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 100


@pytest.mark.parametrize("name", ["Llama 3 405B, 16384", "Llama 3 405B, 16384, 131k"])
def test_the_layouts_of_llama_3_are_among_the_ten_best(name: str) -> None:
    """Meta's own: 126 layers on 16 ranks of 8 chunks, ZeRO-2, nothing computed again."""
    run = next(run for run in load() if run.name == name)
    cluster = CLUSTERS[run.cluster]
    found = search(run.model, cluster, run.layout.ranks, run.layout.batch, like=run.layout)
    assert run.layout in [each.layout for each in found]


def test_a_model_that_fits_nowhere_says_what_it_would_take() -> None:
    huge = Transformer(layers=100, width=16384, heads=64, vocabulary=50000)
    with pytest.raises(ValueError, match=r"the smallest needs .* GB per device. A device has 86"):
        search(huge, SELENE, ranks=8, batch=8)
    with pytest.raises(ValueError, match="divides a batch of 3 sequences equally"):
        search(Transformer(7, 64, 1, 10), SELENE, ranks=512, batch=3)
