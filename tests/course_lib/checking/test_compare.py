"""The judges say the right words, and only when something is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course_lib.checking import (
    Wrong,
    expect_close,
    expect_number,
    expect_tensor,
)
from course_lib.checking.answers import expect_equal


@given(st.integers(0, 5), st.floats(-100, 100).filter(lambda d: abs(d) > 1e-2))
def test_one_wrong_element_is_named(index: int, difference: float) -> None:
    expected = torch.arange(6.0).view(2, 3)
    got = expected.clone()
    got.view(-1)[index] += difference
    with pytest.raises(Wrong) as caught:
        expect_close(got, expected, "rank 1: x")
    assert f"rank 1: x[{index // 3}, {index % 3}]: expected {index}" in caught.value.message
    assert "(1 of 6 elements differ)" in caught.value.message


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_are_wrong(bad: float) -> None:
    with pytest.raises(Wrong, match=r"x\[1\]: expected 1, got"):
        expect_close(torch.tensor([1.0, bad]), torch.ones(2), "x")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "None (is a return missing, or was it never set?)"),
        (3.0, "float '3.0'"),
        (torch.ones(2), "shape [2], expected [3]"),
        (torch.ones(3, dtype=torch.float64), "dtype torch.float64, expected torch.float32"),
    ],
)
def test_what_is_not_such_a_tensor_is_described(value: object, words: str) -> None:
    with pytest.raises(Wrong) as caught:
        expect_tensor(value, torch.ones(3), "x")
    assert words in caught.value.message


def test_numbers() -> None:
    expect_number(0.5, 0.5, "loss")
    expect_number(torch.tensor(0.5), 0.5, "loss")
    for wrong in (0.6, float("nan"), True, None, "0.5", torch.ones(2)):
        with pytest.raises(Wrong, match="loss"):
            expect_number(wrong, 0.5, "loss")


@pytest.mark.parametrize(
    ("got", "words"),
    [
        ({"epoch": 3, "loss": None, "name": "a"}, ""),
        ({"loss": None, "name": "a"}, "rank 1: epoch is missing, expected int '3'"),
        ({"epoch": 3, "loss": 0.5, "name": "a"}, "rank 1: loss is float '0.5', expected None"),
        ({"epoch": 4, "loss": None, "name": "a"}, "rank 1: epoch: expected 3, got 4"),
        ({"epoch": True, "loss": None, "name": "a"}, "rank 1: epoch: expected 3, got bool"),
        ({"epoch": 3, "loss": None, "name": "b"}, "rank 1: name: expected 'a', got 'b'"),
    ],
)
def test_what_is_no_tensor_is_compared_as_it_is(got: object, words: str) -> None:
    right = {"epoch": 3, "loss": None, "name": "a"}
    try:
        expect_equal(got, right, "rank 1")
    except Wrong as wrong:
        assert words
        assert words in wrong.message
    else:
        assert not words


@pytest.mark.parametrize("number", [float, lambda value: torch.full((2,), float(value))])
def test_a_mistake_is_named_only_if_it_gives_all_that_is_wrong(number: Callable[..., Any]) -> None:
    right = {"rate {}": [number(value) for value in (1, 2, 3)]}
    late = {"late": {"rate {}": [number(value) for value in (0, 1, 2)]}}
    for found, hint in (((0, 1, 2), "This equals late."), ((0, 1, 3), "This equals late.")):
        with pytest.raises(Wrong) as caught:
            got = {"rate {}": [number(value) for value in found]}
            expect_equal(got, right, "rank 0", lookalikes=late.items())
        assert caught.value.hint == hint
    with pytest.raises(Wrong, match="rate 0") as caught:  # the first fits by chance
        got = {"rate {}": [number(value) for value in (0, 0, 0)]}
        expect_equal(got, right, "rank 0", lookalikes=late.items())
    assert caught.value.hint == ""
