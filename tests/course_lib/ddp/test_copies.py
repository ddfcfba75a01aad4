"""Copies of a wrapped model: each is synchronised as it should be."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import mse_loss

from tests.helpers.ddp_scenarios import SMALL_CAP, compare, gradients, mlp, own_shards, steps

ignore_torch_warnings = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def train_a_copy(ddp: type, method: str) -> list[Tensor]:
    original = ddp(mlp(seed=dist.get_rank()), bucket_cap_mb=SMALL_CAP)
    shards = own_shards()
    mse_loss(original(shards[0][0]), shards[0][1]).backward()
    if method == "deepcopy":
        copied = copy.deepcopy(original)
    else:
        file = io.BytesIO()
        torch.save(original, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert all(a is not b for a, b in zip(original.parameters(), copied.parameters(), strict=True))
    state = steps(copied, copied.module)
    original.zero_grad()
    mse_loss(original(shards[1][0]), shards[1][1]).backward()  # and the original still works
    return [*state, *gradients(original.module)]


@ignore_torch_warnings
@pytest.mark.parametrize("method", ["deepcopy", "pickle"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_copy_is_synchronised_as_well(ranks_of, k, method):
    compare(ranks_of("cpu", k), train_a_copy, method)
