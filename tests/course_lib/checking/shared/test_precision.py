"""The hint for answers that are right but for a rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from course_lib.checking import Case, equals
from course_lib.checking.answers import form_seen_by
from course_lib.checking.shared.precision import tells_rounding
from tests.helpers.findings import expect_said, said

CASE = Case("", 1)
RIGHT = torch.tensor([1 / 3, 20 / 7, -1e5 / 9], dtype=torch.float64)
EXACTLY = dict.fromkeys(("float32", "float64"), 0.0)


def right(case: Any, inputs: Any, me: int) -> dict[str, Tensor]:
    return {"numbers": RIGHT}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x, ""),
        (Tensor.float, "Was something rounded to float32"),
        (Tensor.half, "Was something rounded to float16 or bfloat16"),
        (Tensor.bfloat16, "Was something rounded to float16 or bfloat16"),
        (lambda x: 1.01 * x, "elements differ) | "),
        (lambda x: -x, "elements differ) | "),
        (lambda x: 0 * x, "elements differ) | "),
        (lambda x: x / 0, "elements differ) | "),
    ],
)
def test_a_rounding_is_named(change: Callable[[Tensor], Tensor], words: str) -> None:
    judge = tells_rounding(equals(right, tolerance=EXACTLY))
    found = said(judge, CASE, [None], [{"numbers": change(RIGHT).double()}])
    expect_said(found, words)
    assert ("rounded" in found) == ("rounded" in words)


def test_a_mistake_that_is_known_is_named_instead() -> None:
    known = {"half of it": lambda case, inputs, me: {"numbers": RIGHT.half().double()}}
    judge = tells_rounding(equals(right, known, tolerance=EXACTLY))
    expect_said(
        said(judge, CASE, [None], [{"numbers": RIGHT.half().double()}]), "equals half of it"
    )


def test_a_judge_sees_what_it_saw() -> None:
    judge = equals(right)
    forms = [form_seen_by(each, CASE, [None], 0) for each in (judge, tells_rounding(judge))]
    assert forms[0] is forms[1]
