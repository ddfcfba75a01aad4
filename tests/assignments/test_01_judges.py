"""Assignment 01: two epochs may be equal by chance; five are not, and a float32 loss is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from course_lib.checking import Case, Wrong, run_check
from course_lib.checking.local import LocalRunner
from tests.helpers.course_folders import SOURCES, needs_sources
from tests.helpers.solutions import checks_of

pytestmark = needs_sources
FOLDER = SOURCES / "01_minibatch_sgd"


def judged(epochs: list[list[torch.Tensor]]) -> None:
    judge = checks_of(FOLDER)["minibatches"].judge.__self__.custom  # type: ignore[attr-defined]
    inputs = {"n": 11, "batch_size": 5, "drop_last": True, "seed": 1, "epochs": 0}
    with_the_rest = [torch.arange(5), torch.arange(5, 10), torch.tensor([10])]
    value = {
        "epoch {}, batch {}": epochs,
        "epoch {}, batch {}, with the same seed": epochs[:1],
        "epoch {}, batch {}, with the other drop_last": [with_the_rest],
        "many epochs": [],
    }
    judge.test(Case("11 rows", 1), [inputs], [value], [value])


def test_two_epochs_may_be_equal_by_chance() -> None:
    """With rows sorted in each batch there are only 2,772 epochs."""
    usual, other = ([torch.arange(k, k + 5), torch.arange(k + 5, k + 10)] for k in (0, 1))
    judged([usual, usual, other, usual, usual])
    with pytest.raises(Wrong, match="have the same batches"):
        judged([usual] * 5)


def test_a_loss_may_be_added_up_in_float32() -> None:
    def with_loss_in(dtype: torch.dtype) -> Any:
        def accumulate_gradients(model: Any, loss_fn: Any, x: Any, y: Any, micro: int) -> Any:
            model.zero_grad()
            total = torch.zeros((), dtype=dtype)
            for rows, targets in zip(x.split(micro), y.split(micro), strict=True):
                part = loss_fn(model(rows), targets) * len(rows) / len(x)
                part.backward()
                total += part.detach()
            return total

        return accumulate_gradients

    check = checks_of(FOLDER)["accumulate_gradients"]
    assert any(case.form.dtype == "float64" for case in check.cases)
    for dtype, right in ((torch.float32, True), (torch.bfloat16, False)):
        with LocalRunner(with_loss_in(dtype), "simulated", echo=None) as runner:
            report = run_check("01/accumulate_gradients", check, runner, seed="1")
        assert report.passed is right, str(report)
