"""Around a forward: names to leave alone, and joins that end early or are switched off."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from course_lib.ddp import DistributedDataParallel
from tests.helpers.ddp_scenarios import BOTH, FEW, mlp, random


class Counter(nn.Module):
    """Counts, on every rank, something of its own; and holds a buffer in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 2).double()
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.norm = nn.BatchNorm1d(2).double()

    def forward(self, x: Tensor) -> Tensor:
        self.seen += dist.get_rank() + 1
        return self.norm(self.layer(x))


# --- names to leave alone -------------------------------------------------------------------------


def ignoring(by: str) -> dict[str, Tensor]:
    net = Counter()
    net.seen += dist.get_rank()
    net.layer.bias.data += dist.get_rank()
    net.tied = net.layer.weight  # a second name, which is not ignored
    names = ["seen", "layer.bias", "layer.weight"]
    if by == "ours":
        wrapped = DistributedDataParallel(net, ignored=names)
    else:
        TorchDDP._set_params_and_buffers_to_ignore_for_model(net, names)
        wrapped = {"theirs, with ours": DistributedDataParallel, "theirs": TorchDDP}[by](net)
    wrapped(random(4, 6)).square().sum().backward()
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    grads = {f"grad of {name}": p.grad for name, p in net.named_parameters()}
    return {name: tensor.detach() for name, tensor in (tensors | grads).items()}


@pytest.mark.parametrize("by", ["ours", "theirs, with ours"])
@pytest.mark.parametrize(("on", "k"), FEW)
def test_ignored_names_stay_each_rank_s_own(ranks_of, on, k, by):
    replicas = ranks_of(on, k).run(ignoring, by)
    differing = {
        name for name in replicas[0] if not torch.equal(replicas[0][name], replicas[1][name])
    }
    expected = {"seen", "layer.bias", "grad of layer.bias"}
    statistics = {name for name in replicas[0] if name.startswith("norm.running")}
    assert differing - statistics == expected
    assert "grad of tied" in replicas[0] or "grad of layer.weight" in replicas[0]


# --- join -----------------------------------------------------------------------------------------


def ending_early(ddp: type, counts: list[int]) -> tuple[int, str]:
    net = mlp(seed=0)
    wrapped = ddp(net)
    steps = 0
    try:
        with wrapped.join(throw_on_early_termination=True):
            for step in range(counts[dist.get_rank()]):
                wrapped(random(4, 6, seed=step)).sum().backward()
                steps += 1
    except RuntimeError as error:
        with wrapped.join(enable=False):
            wrapped(random(4, 6)).sum().backward()  # and then it goes on as before
        return steps, str(error)
    return steps, "no error"


@pytest.mark.parametrize("counts", [[2, 4, 2], [3, 3], [5, 1]])
@pytest.mark.parametrize("on", ["simulated", "cpu"])
def test_the_first_rank_that_is_done_may_end_it_for_all(ranks_of, on, counts):
    ours, torch_results = (
        ranks_of(carrier, len(counts)).run(ending_early, ddp, counts)
        for carrier, ddp in zip((on, "cpu"), BOTH, strict=True)
    )
    for (steps, message), (their_steps, they_said) in zip(ours, torch_results, strict=True):
        assert steps == their_steps
        assert message.startswith(they_said.rstrip("."))
