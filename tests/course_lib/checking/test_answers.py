"""The form of an answer and its values: what passes, and what is said of the rest."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course_lib.checking import Wrong, expect_equal
from course_lib.checking.answers import expect_form

pytestmark = pytest.mark.every_case
THREE = [torch.zeros(2), torch.zeros(3), torch.zeros(())]
RIGHT = {"g of {}": THREE, "n": 1, "loss": 0.5, "steps": [["F", 0]], "none": []}


def changed(**values):
    return RIGHT | {key.replace("_", " of {}"): value for key, value in values.items()}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "rank 1: the answer is None (is a return missing, or was it never set?), expected a "
               "dict with g of {}, n, loss, steps, none"),
        (changed(g_=1), "rank 1: g of is int '1', expected a list of 3 tensors"),
        (changed(g_=THREE[:2]), "rank 1: g of 2 is missing"),
        (changed(g_=[*THREE, 1]), "rank 1: g of 3 was not asked for"),
        ({"g of {}": THREE}, "rank 1: n is missing"),
        (changed(n=2**1024), "rank 1: n: expected 1, got 1797"),
    ],
)  # fmt: skip
def test_a_comparison_says_where_an_answer_has_another_form(value, message: str) -> None:
    with pytest.raises(Wrong) as caught:
        expect_form(value, RIGHT, "rank 1")
        expect_equal(value, RIGHT, "rank 1")
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "rank 1: the answer has the keys [], expected ['g of {}', 'n', 'loss'"),
        (changed(b=2), "'b'], expected"),
        (changed(g_=[torch.zeros(1, 1)]), "g of 0 is a tensor of shape [1, 1], float32, expected"),
        (changed(g_=[THREE[0].double()]), "float64, expected a tensor of shape [2], float32"),
        (changed(g_=[3.0]), "g of 0 is float '3.0', expected a tensor of shape [2]"),
        (changed(n=2**63), "n is int '9223372036854775808', expected a whole number"),
        (changed(n=True), "n is bool 'True', expected a whole number"),
        (changed(loss=2**1024 - 1), "expected a number"),
        (changed(loss=torch.zeros(2)), "a tensor of shape [2], float32, expected a number"),
        (changed(steps=[["F", 0], ["B", "0"]]), "steps[1][1] is str '0', expected a whole number"),
        (changed(steps=[["F", 0]] * 10_001), "steps is a list of 10001"),
        (changed(none=[None]), "none is a list of 1: [None], expected an empty list"),
    ],
)
def test_a_judge_sees_only_the_kinds_of_the_right_value(value, message: str) -> None:
    with pytest.raises(Wrong) as caught:
        expect_form(value, RIGHT, "rank 1", kinds=True)
    assert message in caught.value.message
    steps = (["F", 0], ["B", 5], ("B", 6))
    fewer_and_more = changed(g_=[torch.ones(7)], loss=2, steps=steps, none=[[7, "B"]])
    expect_form(fewer_and_more, RIGHT, "rank 1", kinds=True)


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
