"""The form of an answer and its values: what passes, and what is said of the rest."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course_lib.checking import Wrong, expect_equal
from course_lib.checking.answers import NUMBER, WHOLE, Kind, ListOf, expect_containers, expect_form

pytestmark = pytest.mark.every_case
THREE = [torch.zeros(2), torch.zeros(3), torch.zeros(())]


@pytest.mark.parametrize(
    ("value", "form", "message"),
    [
        (None, THREE, "rank 1: the answer is None (is a return missing, or was it never set?), "
                      "expected a list of 3 tensors"),
        ({"loss": 1}, {"loss": THREE}, "loss is int '1', expected a list of 3 tensors"),
        ({"g {}": THREE[:2]}, {"g {}": THREE}, "is a list of 2: [tensor"),
        ({"g {}": [*THREE[:2], torch.ones(1)]}, {"g {}": THREE}, "g 2 has shape [1], expected []"),
        ({"x": THREE[0].double()}, {"x": THREE[0]}, "dtype torch.float64, expected torch.float32"),
        ({"x": 3.0}, {"x": THREE[0]}, "x is float '3.0', expected a tensor of shape [2]"),
        ({}, {"loss": NUMBER}, "rank 1: loss is missing, expected a number"),
        ({"loss": 1, "b": 2}, {"loss": NUMBER}, "rank 1: b was not asked for"),
        ({"n": 2**63}, {"n": WHOLE}, "n is int '9223372036854775808', expected a whole number"),
        ({"n": True}, {"n": WHOLE}, "n is bool 'True', expected a whole number"),
        ({"n": 2**1024 - 1}, {"n": NUMBER}, "expected a number"),
        ({"n": torch.zeros(2)}, {"n": NUMBER}, "a tensor of shape [2], float32, expected a number"),
        ([[1], 2], ListOf(ListOf(WHOLE)), "the answer[1] is int '2', expected a list of whole"),
        ([1] * 1001, ListOf(WHOLE), "the answer has 1001 items, more than 1000"),
        ({"e {}": {"3": [1], "4": []}}, {"e {}": {"3": ListOf(WHOLE)}}, "expected a dict with 3"),
        ({"x": torch.zeros(2)}, {"x": None}, "x is a tensor of shape [2], float32, expected None"),
        (3, Kind("an even thing", lambda v: False), "expected an even thing"),
    ],
)  # fmt: skip
def test_what_has_not_is_described(value, form, message: str) -> None:
    with pytest.raises(Wrong) as caught:
        expect_form(value, form, "rank 1")
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "rank 0: the answer is None (is a return missing, or was it never set?), expected a "
               "dict with g of {}, n"),
        ({"g of {}": THREE[:2], "n": 1}, "rank 0: g of 2 is missing"),
        ({"g of {}": [*THREE, 1], "n": 1}, "rank 0: g of 3 was not asked for"),
        ({"g of {}": THREE}, "rank 0: n is missing"),
        ({"g of {}": THREE, "n": 2**1024}, "rank 0: n: expected 1, got 1797"),
    ],
)  # fmt: skip
def test_a_comparison_says_where_an_answer_has_another_form(value, message: str) -> None:
    right = {"g of {}": THREE, "n": 1}
    with pytest.raises(Wrong) as caught:
        expect_containers(value, right, "rank 0")
        expect_equal(value, right, "rank 0")
    assert message in caught.value.message


@given(st.integers(0, 5), st.floats(-100, 100).filter(lambda d: abs(d) > 1e-2))
def test_one_wrong_element_is_named(index: int, difference: float) -> None:
    expected = torch.arange(6.0).view(2, 3)
    got = expected.clone()
    got.view(-1)[index] += difference
    with pytest.raises(Wrong) as caught:
        expect_equal({"x": got}, {"x": expected}, "rank 1")
    assert f"rank 1: x[{index // 3}, {index % 3}]: expected {index}" in caught.value.message
    assert "(1 of 6 elements differ)" in caught.value.message


def test_only_numbers_equal_numbers() -> None:
    expect_equal(torch.tensor(0.5), 0.5, "loss")
    for bad in (float("nan"), float("inf")):
        with pytest.raises(Wrong, match=r"x\[1\]: expected 1, got"):
            expect_equal(torch.tensor([1.0, bad]), torch.ones(2), "x")
    for value in (0.6, float("nan"), True, None, "0.5", torch.ones(2)):
        with pytest.raises(Wrong, match="loss"):
            expect_equal(value, 0.5, "loss")


@pytest.mark.parametrize(
    ("got", "message"),
    [
        ({"loss": None, "name": "a"}, "rank 1: epoch is missing, expected int '3'"),
        ({"epoch": 3, "loss": 0.5, "name": "a"}, "rank 1: loss is float '0.5', expected None"),
        ({"epoch": 4, "loss": None, "name": "a"}, "rank 1: epoch: expected 3, got 4"),
        ({"epoch": True, "loss": None, "name": "a"}, "rank 1: epoch: expected 3, got bool"),
        ({"epoch": 3, "loss": None, "name": "b"}, "rank 1: name: expected 'a', got 'b'"),
    ],
)
def test_what_is_no_tensor_is_compared_as_it_is(got: object, message: str) -> None:
    with pytest.raises(Wrong) as caught:
        expect_equal(got, {"epoch": 3, "loss": None, "name": "a"}, "rank 1")
    assert message in caught.value.message


@pytest.mark.parametrize("number", [float, lambda value: torch.full((2,), float(value))])
def test_a_mistake_is_named_only_if_it_gives_all_that_is_wrong(number) -> None:
    right = {"rate {}": [number(value) for value in (1, 2, 3)]}
    late = {"late": {"rate {}": [number(value) for value in (0, 1, 2)]}}
    for numbers, hint in (((0, 1, 2), "This equals late."), ((0, 1, 3), "This equals late.")):
        with pytest.raises(Wrong) as caught:
            got = {"rate {}": [number(value) for value in numbers]}
            expect_equal(got, right, "rank 0", lookalikes=late.items())
        assert caught.value.hint == hint
    with pytest.raises(Wrong, match="rate 0") as caught:  # the first fits by chance
        got = {"rate {}": [number(value) for value in (0, 0, 0)]}
        expect_equal(got, right, "rank 0", lookalikes=late.items())
    assert caught.value.hint == ""
