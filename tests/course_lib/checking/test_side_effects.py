"""A rank's report may be forged: whatever is in it, reading it blames the answer, not the check."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from course_lib.checking import Wrong
from course_lib.checking.on_ranks.effects import states_from
from course_lib.checking.side_effects import effects_of

X = torch.arange(3.0)


def report(**changed: Any) -> dict[str, Any]:
    """Return the report of a rank that left its input, `X`, as it was, with entries replaced."""
    return {
        "inputs": {"its input": [X]},
        "addresses": {"of the inputs": {"its input": [1]}, "of the output": []},
        "parameters": {},
        "modules": {},
        "generators": states_from(5),
        "gradients": True,
        "dtype": "torch.float32",
        "asks": [False],
        "history": False,
        "kept": [[], []],
    } | changed


def test_an_honest_report_has_no_effect() -> None:
    assert effects_of(report(), X, 1.0, may_change=[], rank=0, seed=5) == []


@pytest.mark.parametrize(
    "forged",
    [
        {"asks": [torch.empty(0)]},
        {"asks": [torch.ones(2)]},
        {"generators": {}},
        {"kept": [[]]},
        {"inputs": {"its input": None}},
    ],
    ids=["no truth value", "two truth values", "no states", "a pair of one", "no list"],
)
def test_a_forged_report_is_refused(forged: dict[str, Any]) -> None:
    with pytest.raises(Wrong, match="cannot be read"):
        effects_of(report(**forged), X, 1.0, may_change=[], rank=0, seed=5)
