"""What users do to parameters that a wrapper has: the weights of one process, or an error at once.

A situation is a script. It runs in one process with whole batches, and on ranks with their shards.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parameters_to_vector, parametrizations, prune, vector_to_parameters
from torch.utils.checkpoint import checkpoint

from course_lib.ddp import DistributedDataParallel
from course_lib.fully_sharded import FullyShardedDataParallel
from course_lib.gradient_sync import sync_flat
from course_lib.ranks import RankError
from course_lib.sharded_optimizer import ShardedOptimizer
from course_lib.sharding import shard

SGD = {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01}


class Net(nn.Module):
    """It can stop early, fail, and use a block twice, checkpointed; `late` begins frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 3, 3)
        self.late = nn.Linear(12, 12).requires_grad_(False)
        self.body = nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)
        self.same = nn.Linear(12, 12)
        self.head = nn.Linear(12, 4)
        self.double()

    def forward(self, x: Tensor, stop: str = "", twice: bool = False) -> Tensor:
        x = self.late(torch.tanh(self.conv(x)).flatten(1))
        for _ in range(1 + twice):
            x = checkpoint(self.body, x, use_reentrant=True) if twice else self.body(x)
        if stop == "early":
            return x
        if stop == "by an error":
            raise KeyError
        out: Tensor = self.head(torch.tanh(self.same(self.norm(x))))
        return out


class Run:
    """Training in one process (`wrapper` None), or on this rank of several."""

    def __init__(self, wrapper: str | None) -> None:
        self.net, self.wrapper, self.seen = Net(), wrapper, []  # type: ignore[var-annotated]
        self.model: Any = self.net
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(12, 2, 4, 4, generator=generator, dtype=torch.float64)
        self.y = torch.randn(12, 4, generator=generator, dtype=torch.float64)

    def wrap(self) -> None:
        if self.wrapper == "ddp":
            self.model = DistributedDataParallel(self.net, bucket_cap_mb=4e-4)
        if self.wrapper == "fsdp":
            self.model = FullyShardedDataParallel(self.net)
        params, options = list(self.model.parameters()), {**SGD, "bucket_cap_mb": 4e-4}
        self.optimizer: Any = (
            ShardedOptimizer(params, torch.optim.SGD, gradients=self.wrapper, **options)  # type: ignore[arg-type]
            if self.wrapper in ("averaged", "local", "sharded")
            else torch.optim.SGD(params, **SGD)
        )

    def loss(self, **how: Any) -> Tensor:
        k, rank = (dist.get_world_size(), dist.get_rank()) if self.wrapper else (1, 0)
        return mse_loss(self.model(shard(self.x, k, rank), **how), shard(self.y, k, rank))

    def backward(self, **how: Any) -> None:
        self.optimizer.zero_grad()
        self.loss(**how).backward()
        if self.wrapper == "averaged":
            sync_flat(self.model.parameters())

    def step(self, **how: Any) -> None:
        self.backward(**how)
        self.optimizer.step()

    def evaluate(self, model: Any = None) -> None:
        with torch.no_grad():
            self.seen.append((self.model if model is None else model)(self.x))

    def weights(self) -> dict[str, Tensor]:
        fsdp = self.wrapper == "fsdp"
        return dict(self.model.full_state_dict() if fsdp else self.net.state_dict())


# --- the situations -----------------------------------------------------------------------------


def steps_around(change: Callable[[Run], None]) -> Callable[[Run], None]:
    def script(run: Run) -> None:
        run.wrap()
        run.step()
        change(run)
        run.evaluate()
        run.step()
        run.step()

    return script


def stop(run: Run, how: str) -> None:
    run.step()  # the order of the layers is known from here on
    run.backward()
    with torch.no_grad(), contextlib.suppress(KeyError):
        run.model(run.x, stop=how)
    run.optimizer.step()


def new_data(run: Run) -> None:
    for param in run.model.parameters():
        param.data = param.data * 0.9


def from_vector(run: Run) -> None:
    params = list(run.model.parameters())
    vector_to_parameters(parameters_to_vector(params).detach() * 0.9, params)


def swap_average(run: Run) -> None:
    params = list(run.model.parameters())
    live = [param.data for param in params]
    for param in params:
        param.data = param.data * 0.5
    run.evaluate()
    for param, data in zip(params, live, strict=True):
        param.data = data


def write_data(run: Run) -> None:
    """As optimizers and averages wrote in the days of `.data`: no version counter sees it."""
    run.evaluate()
    for param in run.model.parameters():
        param.data.mul_(0.9)


def assign(run: Run) -> None:
    state = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.model.load_state_dict(state, assign=True)


def replace(run: Run) -> None:
    run.net.head.weight = nn.Parameter(run.net.head.weight.detach().clone())


def replace_module(run: Run) -> None:
    run.net.head = nn.Linear(12, 4).double()


def tie(run: Run) -> None:
    run.net.same.weight = run.net.body.weight


def back_and_forth(run: Run) -> None:
    run.backward()
    run.model.float()
    run.model.double()


def thaw(run: Run) -> None:
    run.net.late.requires_grad_(True)


def freeze(run: Run) -> None:
    run.net.body.requires_grad_(False)
    run.step()
    run.net.body.requires_grad_(True)
    run.net.head.requires_grad_(False)


def normalise(run: Run) -> None:
    torch.manual_seed(2)
    parametrizations.weight_norm(run.net.head)


def copied(run: Run) -> None:
    import copy

    twin = copy.deepcopy(run.model)
    run.step()
    run.evaluate(twin)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    run.model, run.optimizer, before = twin, other, (run.model, run.optimizer)
    run.step()
    run.evaluate()
    run.model, run.optimizer = before


def halve(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def hooks_before(run: Run) -> None:
    mask = torch.arange(48.0).view(4, 12).double() / 48
    run.net.head.weight.register_hook(lambda gradient: gradient * mask)
    steps_around(lambda run: None)(run)


def summing_hook_before(run: Run) -> None:
    run.net.head.weight.register_post_accumulate_grad_hook(halve)
    steps_around(lambda run: None)(run)


def hook(run: Run) -> None:
    run.net.head.weight.register_hook(lambda gradient: gradient * 0.5)


def summing_hook(run: Run) -> None:
    run.net.head.weight.register_post_accumulate_grad_hook(halve)


def fail(run: Run) -> None:
    def interrupt(_: Tensor) -> None:
        raise KeyError

    handle = run.net.body.register_forward_hook(lambda *io: io[2].register_hook(interrupt) and None)
    with contextlib.suppress(KeyError):
        run.backward()
    handle.remove()


def to_float(run: Run) -> None:
    run.x, run.y = run.x.float(), run.y.float()
    run.model.float()


ZERO = ("averaged", "local", "sharded")
REPLACED = r"rank \d: .* (is no longer the parameter|was not there)"
CONVERTED = r"rank \d: .* had (strides|dtype) .* now has "
NONE = "does not apply: an optimizer has tensors, and does not know which modules have them"
SITUATIONS: dict[str, tuple[Callable[[Run], None], dict[str, str]]] = {
    "a forward that stops early": (steps_around(lambda run: stop(run, "early")), {}),
    "a forward that fails": (steps_around(lambda run: stop(run, "by an error")), {}),
    "param.data = …": (steps_around(new_data), {}),
    "vector_to_parameters": (steps_around(from_vector), {}),
    "an average put in and taken out": (steps_around(swap_average), {}),
    "param.data.mul_": (steps_around(write_data), {}),
    "channels_last": (
        steps_around(lambda run: run.model.to(memory_format=torch.channels_last)),
        dict.fromkeys(ZERO, CONVERTED),
    ),
    "float().double()": (steps_around(lambda run: run.model.float().double()), {}),
    "float()": (steps_around(to_float), dict.fromkeys((*ZERO, "fsdp"), CONVERTED)),
    "float().double() after backward": (steps_around(back_and_forth), {"sharded": "of a gradient"}),
    "load_state_dict(assign=True)": (
        steps_around(assign),
        dict.fromkeys(("ddp", "fsdp"), REPLACED),
    ),
    "another parameter": (steps_around(replace), dict.fromkeys(("ddp", "fsdp"), REPLACED)),
    "another module": (steps_around(replace_module), dict.fromkeys(("ddp", "fsdp"), REPLACED)),
    "tied weights": (steps_around(tie), dict.fromkeys(("ddp", "fsdp"), REPLACED)),
    "weight_norm": (
        steps_around(normalise),
        {"ddp": REPLACED, "local": NONE, "sharded": NONE, "fsdp": "from an instance of type Piece"},
    ),
    "prune": (
        steps_around(lambda run: prune.l1_unstructured(run.net.head, "weight", 0.5)),
        {"fsdp": REPLACED},
    ),
    "unfrozen": (steps_around(thaw), {}),
    "frozen, and unfrozen again": (steps_around(freeze), {}),
    "a copy": (steps_around(copied), dict.fromkeys(ZERO, NONE)),
    "a block used twice, checkpointed": (
        steps_around(lambda run: run.step(twice=True)),
        dict.fromkeys(("ddp", "sharded"), "a second time"),
    ),
    "a hook on a gradient, before": (hooks_before, {}),
    "a hook on a sum, before": (summing_hook_before, {"fsdp": "head.weight.* has a hook"}),
    "a hook on a gradient, after": (steps_around(hook), {}),
    "a hook on a sum, after": (steps_around(summing_hook), {}),
    "a failed backward": (steps_around(fail), {"ddp": "did not end"}),
}


def run(wrapper: str | None, name: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    run = Run(wrapper)
    SITUATIONS[name][0](run)
    return run.weights(), run.seen


@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.parametrize("wrapper", ["ddp", *ZERO, "fsdp"])
@pytest.mark.parametrize(("on", "k"), [("simulated", 3), ("cpu", 2)])
def test_as_in_one_process_or_an_error(ranks_of, on, k, wrapper, name):
    error = SITUATIONS[name][1].get(wrapper)
    if error == NONE:
        return
    if error:
        with pytest.raises(RankError, match=error):
            ranks_of(on, k).run(run, wrapper, name)
        return
    expected, outputs = run(None, name)
    tolerance = 1e-5 if name == "float()" else 1e-10
    for state, seen in ranks_of(on, k).run(run, wrapper, name):
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(seen, outputs, rtol=tolerance, atol=tolerance)
