"""A student's function may return NumPy's numbers, slices and ranges instead of Python's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from course_lib.checking.on_ranks.given import simple


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
def test_it_becomes_plain(returned: Any, plain: Any) -> None:
    found = simple(returned)
    assert found == plain
    assert type(found) is type(plain)


def test_an_array_becomes_a_tensor() -> None:
    found = simple(np.arange(3))
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == [0, 1, 2]


@pytest.mark.parametrize("returned", [range(0, 6, 2), slice(0, 6, 2), True, "text", None, 2.5])
def test_what_is_plain_or_means_something_else_stays(returned: Any) -> None:
    assert simple(returned) is returned
