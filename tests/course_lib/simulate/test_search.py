"""The search beside trying everything, and what it says when nothing fits."""

import pytest

from course_lib.simulate import CLUSTERS, Transformer, estimate
from course_lib.simulate.published import load
from course_lib.simulate.search import SPARE, candidates, search

MODEL = Transformer(layers=12, width=4096, heads=32, vocabulary=50000, fused_attention=True)
SELENE = CLUSTERS["selene"]


def test_the_first_is_the_fastest_that_fits() -> None:
    layouts = search(MODEL, SELENE, ranks=16, batch=32)
    assert len(layouts) == 10
    times = [layout.estimate.seconds for layout in layouts]
    assert times == sorted(times)
    fitting = [
        result.seconds
        for layout in candidates(MODEL, SELENE, 16, 32)
        if (result := estimate(MODEL, SELENE, layout)).memory.total <= (1 - SPARE) * SELENE.memory
    ]
    assert times[0] == min(fitting)


@pytest.mark.parametrize("name", ["Llama 3 405B, 16384", "Llama 3 405B, 16384, 131k"])
def test_the_layouts_of_llama_3_are_among_the_ten_best(name: str) -> None:
    """Meta's own: 126 layers on 16 ranks of 8 chunks, ZeRO-2, nothing computed again."""
    run = next(run for run in load() if run.name == name)
    cluster = CLUSTERS[run.cluster]
    layouts = search(run.model, cluster, run.layout.ranks, run.layout.batch, like=run.layout)
    assert run.layout in [finding.layout for finding in layouts]


def test_a_model_that_fits_nowhere_says_what_it_would_take() -> None:
    huge = Transformer(layers=100, width=16384, heads=64, vocabulary=50000)
    with pytest.raises(ValueError, match=r"the smallest needs .* GB per device. A device has 86"):
        search(huge, SELENE, ranks=8, batch=8)
    with pytest.raises(ValueError, match="divides a batch of 3 sequences equally"):
        search(Transformer(7, 64, 1, 10), SELENE, ranks=512, batch=3)
