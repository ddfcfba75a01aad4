"""A student's function may return NumPy's numbers, slices and ranges instead of Python's own."""

import numpy as np
import pytest
import torch

from course_lib.checking import Wrong
from course_lib.checking.answers import expect_equal
from course_lib.checking.on_ranks.given import simple
from course_lib.checking.on_ranks.leaves import ARRAY


@pytest.mark.parametrize(
    ("returned", "plain"),
    [
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.float32(0.5), 0.5),
        (slice(2, 5), (2, 5)),
        (slice(np.int32(2), None), (2, None)),
        (range(2, 5), (2, 5)),
        ([np.int64(1), (np.float64(2.5),)], [1, (2.5,)]),
        ({"a": {"b": np.uint8(7)}}, {"a": {"b": 7}}),
    ],
)
def test_it_becomes_plain(returned, plain) -> None:
    value = simple(returned)
    assert value == plain
    assert type(value) is type(plain)


def test_an_array_keeps_its_numbers_and_its_kind() -> None:
    [value] = simple([np.arange(3)])
    assert value.keys() == {ARRAY}
    assert value[ARRAY].tolist() == [0, 1, 2]
    assert simple(np.array(2.5)) == 2.5


@pytest.mark.parametrize(
    ("right", "message"),
    [
        (torch.ones(3), "x: you returned a NumPy array; return a torch.Tensor"),
        (1.0, "x is a NumPy array of shape [3], float64, expected the number 1"),
        (2, "x: expected 2, got a NumPy array of shape [3], float64"),
    ],
)
def test_an_array_is_called_an_array(right, message: str) -> None:
    with pytest.raises(Wrong) as caught:
        expect_equal({"x": simple(np.ones(3))}, {"x": right}, "rank 0")
    assert caught.value.message == f"rank 0: {message}"


@pytest.mark.parametrize("returned", [range(0, 6, 2), slice(0, 6, 2), True, "text", None, 2.5])
def test_what_is_plain_or_means_something_else_stays(returned) -> None:
    assert simple(returned) is returned
