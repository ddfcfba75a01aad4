"""The search beside trying everything, and what it says when nothing fits."""

from __future__ import annotations

import pytest

from course_lib.simulate import CLUSTERS, Transformer, estimate
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
    assert {layout.zero for layout in seen} == {0, 1, 3}


def test_a_model_that_fits_nowhere_says_what_it_would_take() -> None:
    huge = Transformer(layers=100, width=16384, heads=64, vocabulary=50000)
    with pytest.raises(ValueError, match=r"the smallest needs .* GB of 80"):
        search(huge, SELENE, ranks=8, batch=8)
    with pytest.raises(ValueError, match="cuts a batch of 3 sequences evenly"):
        search(Transformer(7, 64, 1, 10), SELENE, ranks=512, batch=3)
