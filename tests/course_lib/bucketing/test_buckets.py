"""Buckets: every tensor in one, in order, within the cap, and no bucket closed too early."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course_lib.bucketing import MEGABYTE, Bucket, assign_buckets, trained_buckets

DTYPES = [torch.float32, torch.float16, torch.float64]


@st.composite
def tensors_and_order(draw: st.DrawFn) -> tuple[list[torch.Tensor], list[int]]:
    kinds = draw(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(DTYPES)), max_size=25))
    tensors = [torch.empty(length, dtype=dtype) for length, dtype in kinds]
    return tensors, draw(st.permutations(range(len(tensors))))


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@given(tensors_and_order(), st.integers(0, 100), st.integers(0, 100))
def test_buckets_of_any_tensors(case, cap, first_cap):
    tensors, order = case
    buckets = assign_buckets(tensors, cap / MEGABYTE, first_cap / MEGABYTE, order)
    position_of = {index: position for position, index in enumerate(order)}

    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(tensors)))
    for bucket in buckets:
        assert len({tensors[i].dtype for i in bucket}) == 1
        assert [position_of[i] for i in bucket] == sorted(position_of[i] for i in bucket)
    complete = [position_of[bucket[-1]] for bucket in buckets]
    assert complete == sorted(complete)
    for dtype in DTYPES:
        same = [bucket for bucket in buckets if tensors[bucket[0]].dtype == dtype]
        limit = min(first_cap, cap)
        for number, bucket in enumerate(same):
            size = sum(nbytes(tensors[i]) for i in bucket)
            assert size <= limit or len(bucket) == 1
            # It was closed because the next tensor did not fit, not before.
            if number + 1 < len(same):
                assert size + nbytes(tensors[same[number + 1][0]]) > limit
            limit = cap


@pytest.mark.parametrize("caps", [(-1, 1), (25, -0.5)])
def test_sizes_below_zero_are_refused(caps):
    with pytest.raises(ValueError, match="0 or more"):
        assign_buckets([torch.empty(1)], *caps)


@given(tensors_and_order(), st.data(), st.integers(0, 100), st.integers(0, 100))
def test_trained_buckets_have_each_trained_parameter_once(case, data, cap, first_cap):
    tensors, _ = case
    positions = range(len(tensors))
    frozen = data.draw(st.sets(st.sampled_from(positions))) if tensors else set()
    params = [torch.nn.Parameter(t, requires_grad=i not in frozen) for i, t in enumerate(tensors)]
    tied = data.draw(st.lists(st.sampled_from(positions), max_size=5)) if tensors else []
    buckets = trained_buckets(iter([*params, *(params[i] for i in tied)]), cap, first_cap)

    trained = [i for i in positions if i not in frozen]
    alone = assign_buckets([tensors[i] for i in trained], cap / MEGABYTE, first_cap / MEGABYTE)
    assert buckets == [[trained[i] for i in bucket] for bucket in alone]


@given(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=6))
def test_views_cover_the_buffer_without_overlap(shapes):
    tensors = [torch.empty(shape, dtype=torch.float64) for shape in shapes]
    bucket = Bucket(tensors, range(len(tensors)))
    for number, view in enumerate(bucket.views):
        view.fill_(number)
    expected = [torch.full((t.numel(),), float(n)) for n, t in enumerate(tensors)]
    assert torch.equal(bucket.buffer, torch.cat(expected).double())
    assert [view.shape for view in bucket.views] == [tensor.shape for tensor in tensors]
