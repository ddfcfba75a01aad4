"""What a rank reports of a call: a case begins as if none came before; a report may be forged."""

import pytest
import torch

from course_lib.checking.on_ranks.effects import Watch, effects_of, states_from

pytestmark = pytest.mark.every_case
X = torch.arange(3.0)


def test_gradients_and_float32_are_there_again() -> None:
    """A function may have turned them off, and have ended by an exception."""
    try:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        Watch({})
        assert torch.is_grad_enabled()
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)


def report(**changed):
    """Return the report of a rank that left its input, `X`, as it was, with entries replaced."""
    return {
        "inputs": {"its input": [X]},
        "addresses": {"of the inputs": {"its input": [1]}, "of the output": []},
        "objects": {"the matrix": [{"changed": [X]}, {"changed": [X.clone()]}]},
        "generators": states_from(5),
        "gradients": True,
        "dtype": "torch.float32",
        "asks": [False],
        "history": False,
    } | changed


def test_an_honest_report_has_no_effect() -> None:
    assert effects_of(report(), X, 1.0, may_change=[], seed=5) == []


@pytest.mark.parametrize(
    "forged",
    [
        {"asks": [torch.empty(0)]},
        {"asks": [torch.ones(2)]},
        {"generators": {}},
        {"objects": {"the matrix": [{}]}},
        {"objects": {"the matrix": [{"changed": [X]}, {}]}},
        {"objects": {"the matrix": [{"hooks": [X]}, {"hooks": X}]}},
        {"objects": {"a lie": [{}, {}]}},
        {"inputs": {"its input": None}},
    ],
)
def test_a_forged_report_is_refused(forged) -> None:
    with pytest.raises(ValueError):
        effects_of(report(**forged), X, 1.0, may_change=[], seed=5)


def test_the_most_helpful_effect_comes_first() -> None:
    model = {"mode": [True], "hooks": [0], "inference": False}
    left = report(
        objects={"the model": [model, {"mode": [False], "hooks": [1], "inference": True}]},
        addresses={"of the inputs": {"its input": [7]}, "of the output": [7]},
        generators={**states_from(5), "NumPy": "drawn"},
        gradients=False,
    )
    effects = effects_of(left, X, torch.ones(2), may_change=[], seed=5)
    assert [effect.code for effect in effects] == [
        *("mode", "hooks", "inference", "grad_mode", "aliases", "random")
    ]
