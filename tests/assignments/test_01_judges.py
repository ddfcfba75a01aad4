"""Assignment 01: two epochs may be equal by chance; five are not."""

from __future__ import annotations

import pytest
import torch

from course_lib.checking import Case, Wrong
from tests.helpers.course_folders import SOURCES, needs_sources
from tests.helpers.solutions import checks_of

pytestmark = needs_sources
FOLDER = SOURCES / "01_minibatch_sgd"


def judged(epochs: list[list[torch.Tensor]]) -> None:
    judge = checks_of(FOLDER)["minibatches"].judge.__self__.judge
    inputs = {"n": 11, "batch_size": 5, "drop_last": True, "seed": 1, "epochs": 0}
    with_the_rest = [torch.arange(5), torch.arange(5, 10), torch.tensor([10])]
    value = {
        "epoch {}, batch {}": epochs,
        "epoch {}, batch {}, with the same seed": epochs[:1],
        "epoch {}, batch {}, with the other drop_last": [with_the_rest],
        "many epochs": [],
    }
    judge(Case("11 rows", 1), [inputs], [value], [value])


def test_two_epochs_may_be_equal_by_chance() -> None:
    """With rows sorted in each batch there are only 2,772 epochs."""
    usual, other = ([torch.arange(k, k + 5), torch.arange(k + 5, k + 10)] for k in (0, 1))
    judged([usual, usual, other, usual, usual])
    with pytest.raises(Wrong, match="have the same batches"):
        judged([usual] * 5)
