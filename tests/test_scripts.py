"""The scripts that lectures start with torchrun: the same result on any number of ranks."""

import re

import pytest

from tests.helpers.torchrun import torchrun


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"epoch \d+: loss ([\d.]+)", output)]


@pytest.mark.large
def test_the_ddp_script_trains_alike_on_any_number_of_ranks(tmp_path):
    """Also in micro-batches, and in two goes."""
    alone = torchrun(tmp_path, 1, "train_ddp.py", "--epochs", "3")
    assert len(losses(alone)) == 3
    split = torchrun(tmp_path, 3, "train_ddp.py", "--epochs", "3", "--accumulate", "2")
    assert losses(split) == pytest.approx(losses(alone), abs=2e-6)
    assert split.splitlines()[-1] == alone.splitlines()[-1]  # each test row counts once

    kept = ("--checkpoint", "kept.pt", "--epochs")
    first = torchrun(tmp_path, 2, "train_ddp.py", *kept, "2")
    second = torchrun(tmp_path, 2, "train_ddp.py", *kept, "3")
    assert second.startswith("going on after epoch 2")
    assert losses(first) + losses(second) == pytest.approx(losses(alone), abs=2e-6)
    assert second.splitlines()[-1] == alone.splitlines()[-1]
