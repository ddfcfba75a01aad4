"""The form of an answer: what lets through, what it says of the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from course_lib.checking import Case, Wrong, equals
from course_lib.checking.answers import (
    NUMBER,
    TEXT,
    WHOLE,
    Kind,
    ListOf,
    expect_form,
)

THREE = [torch.zeros(2), torch.zeros(3), torch.zeros(())]


@pytest.mark.parametrize(
    ("value", "form"),
    [
        ({"x": THREE}, {"x": THREE}),
        ({"x": None}, {"x": None}),
        ({"n": 3, "f": 0.5}, {"n": WHOLE, "f": NUMBER}),
        ({"n": 3, "f": torch.tensor([0.5])}, {"n": WHOLE, "f": NUMBER}),
        ([[1, 2], []], ListOf(ListOf(WHOLE))),
        ({"epoch {}": {"3": [1]}}, {"epoch {}": {"3": ListOf(WHOLE)}}),
        ("yes", TEXT),
    ],
)
def test_what_has_the_form_passes(value: Any, form: Any) -> None:
    expect_form(value, form, "rank 1")


@pytest.mark.parametrize(
    ("value", "form", "words"),
    [
        (None, THREE, "rank 1: the answer is None (is a return missing, or was it never set?), "
                      "expected a list of 3 tensors"),
        ({"loss": 1}, {"loss": THREE}, "loss is int '1', expected a list of 3 tensors"),
        ({"g {}": THREE[:2]}, {"g {}": THREE}, "is a list of 2: [tensor"),
        ({"g {}": [*THREE[:2], torch.ones(1)]}, {"g {}": THREE}, "g 2 has shape [1], expected []"),
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
def test_what_has_not_is_described(value: Any, form: Any, words: str) -> None:
    with pytest.raises(Wrong) as caught:
        expect_form(value, form, "rank 1")
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "rank 0: the answer is None (is a return missing, or was it never set?), expected a "
               "dict with g of {}, n"),
        ({"g of {}": THREE[:2], "n": 1}, "rank 0: g of 2 is missing"),
        ({"g of {}": [*THREE, 1], "n": 1}, "rank 0: g of 3 was not asked for"),
        ({"g of {}": THREE}, "rank 0: n is missing"),
        ({"g of {}": THREE, "n": 2**1024}, "rank 0: n: expected 1, got 1797"),
    ],
)  # fmt: skip
def test_equals_says_where_an_answer_has_another_form(value: Any, words: str) -> None:
    judge = equals(lambda case, inputs, me: {"g of {}": THREE, "n": 1})
    with pytest.raises(Wrong) as caught:
        judge(Case("1 rank", 1), [{}], [value])
    assert words in caught.value.message
