"""`torch.compile(DistributedDataParallel(model))`: what is compiled is the model."""

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from course_lib.ddp import DistributedDataParallel
from tests.helpers.ddp_scenarios import SMALL_CAP, mlp, own_shards, sgd, state_of


def train_compiled(wrap: bool, compiled: bool) -> tuple[list[Tensor], int]:
    """Return the state, and how many operations of the model were compiled."""
    torch.compiler.reset()
    operations = 0

    def backend(graph: GraphModule, _: list[Tensor]) -> GraphModule:
        nonlocal operations
        operations += sum(node.op != "placeholder" for node in graph.graph.nodes) - 1  # its output
        return graph

    net = mlp(seed=0)
    model = DistributedDataParallel(net, SMALL_CAP) if wrap else net
    if compiled:
        model = torch.compile(model, backend=backend)
    optimizer = sgd(net)
    for x, y in own_shards():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return state_of(net), operations


@pytest.mark.parametrize("k", [1, 2])
def test_a_compiled_wrapper_trains_like_the_plain_one(ranks_of, k):
    ranks = ranks_of("cpu", k)
    plain, compiled = (ranks.run(train_compiled, True, choice) for choice in (False, True))
    _, wanted = ranks_of("cpu", 1).run(train_compiled, False, True)[0]
    for (state, operations), (expected, none) in zip(compiled, plain, strict=True):
        torch.testing.assert_close(state, expected, rtol=1e-11, atol=1e-12)
        assert (operations, none) == (wanted, 0)
        assert wanted >= 5  # five layers
