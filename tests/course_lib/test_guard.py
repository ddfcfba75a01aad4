"""What users do to parameters that a wrapper has: the weights of one process, or an error at once.

A situation runs in one process with whole batches, and on ranks with their shards.
"""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parametrizations, prune
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

    def forward(self, x, stop: str = "", twice: bool = False):
        x = self.late(torch.tanh(self.conv(x)).flatten(1))
        for _ in range(1 + twice):
            x = checkpoint(self.body, x, use_reentrant=True) if twice else self.body(x)
        if stop == "early":
            return x
        if stop == "by an error":
            raise KeyError
        return self.head(torch.tanh(self.same(self.norm(x))))


class Run:
    """Training in one process (`wrapper` None), or on this rank of several."""

    def __init__(self, wrapper: str | None) -> None:
        self.net, self.wrapper, self.seen = Net(), wrapper, []
        self.model = self.net
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(12, 2, 4, 4, generator=generator, dtype=torch.float64)
        self.y = torch.randn(12, 4, generator=generator, dtype=torch.float64)

    def wrap(self) -> None:
        if self.wrapper == "ddp":
            self.model = DistributedDataParallel(self.net, bucket_cap_mb=4e-4)
        if self.wrapper == "fsdp":
            self.model = FullyShardedDataParallel(self.net)
        params, options = list(self.model.parameters()), {**SGD, "bucket_cap_mb": 4e-4}
        self.optimizer = (
            ShardedOptimizer(params, torch.optim.SGD, gradients=self.wrapper, **options)
            if self.wrapper in ("averaged", "local", "sharded")
            else torch.optim.SGD(params, **SGD)
        )

    def loss(self, **options):
        k, rank = (dist.get_world_size(), dist.get_rank()) if self.wrapper else (1, 0)
        return mse_loss(self.model(shard(self.x, k, rank), **options), shard(self.y, k, rank))

    def backward(self, **options) -> None:
        self.optimizer.zero_grad()
        self.loss(**options).backward()
        if self.wrapper == "averaged":
            sync_flat(self.model.parameters())

    def step(self, **options) -> None:
        self.backward(**options)
        self.optimizer.step()

    def evaluate(self, model=None) -> None:
        with torch.no_grad():
            self.seen.append((self.model if model is None else model)(self.x))

    def weights(self):
        fsdp = self.wrapper == "fsdp"
        return dict(self.model.full_state_dict() if fsdp else self.net.state_dict())


# --- the situations -----------------------------------------------------------------------------

ZERO, MODULES = ("averaged", "local", "sharded"), ("ddp", "fsdp")
REPLACED = r"rank \d: .* (is no longer the parameter|was not there)"
CONVERTED = r"rank \d: .* had the shape, strides, dtype .*, and now "
NONE = "does not apply: an optimizer has tensors, and does not know which modules have them"
SITUATIONS = {}


def situation(name, errors=None, *, before=False):
    """Name what is done after one step, or before wrapping; `errors` has those of each wrapper."""

    def note(change):
        SITUATIONS[name] = change, before, errors or {}
        return change

    return note


def stop(run: Run, place: str) -> None:
    run.step()  # the order of the layers is known from here on
    run.backward()
    with torch.no_grad(), contextlib.suppress(KeyError):
        run.model(run.x, stop=place)
    run.optimizer.step()


situation("a forward that stops early")(lambda run: stop(run, "early"))
situation("a forward that fails")(lambda run: stop(run, "by an error"))


@situation("param.data = …")
def _(run: Run) -> None:
    for param in run.model.parameters():
        param.data = param.data * 0.9


@situation("an average put in and taken out")
def _(run: Run) -> None:
    params = list(run.model.parameters())
    live = [param.data for param in params]
    for param in params:
        param.data = param.data * 0.5
    run.evaluate()
    for param, data in zip(params, live, strict=True):
        param.data = data


@situation("param.data.mul_, which no version counter sees")
def _(run: Run) -> None:
    run.evaluate()
    for param in run.model.parameters():
        param.data.mul_(0.9)


@situation("float()", dict.fromkeys((*ZERO, "fsdp"), CONVERTED))
def _(run: Run) -> None:
    run.x, run.y = run.x.float(), run.y.float()
    run.model.float()


@situation("float().double() after backward", {"sharded": "of a gradient"})
def _(run: Run) -> None:
    run.backward()
    run.model.float().double()


situation("float().double()")(lambda run: run.model.float().double())
situation("channels_last", dict.fromkeys(ZERO, CONVERTED))(
    lambda run: run.model.to(memory_format=torch.channels_last)
)


@situation("load_state_dict(assign=True)", dict.fromkeys(MODULES, REPLACED))
def _(run: Run) -> None:
    state = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.model.load_state_dict(state, assign=True)


@situation("another parameter", dict.fromkeys(MODULES, REPLACED))
def _(run: Run) -> None:
    run.net.head.weight = nn.Parameter(run.net.head.weight.detach().clone())


@situation("another module", dict.fromkeys(MODULES, REPLACED))
def _(run: Run) -> None:
    run.net.head = nn.Linear(12, 4).double()


@situation("tied weights", dict.fromkeys(MODULES, REPLACED))
def _(run: Run) -> None:
    run.net.same.weight = run.net.body.weight


situation(
    "weight_norm", {"ddp": REPLACED, "local": NONE, "sharded": NONE, "fsdp": "would be wrong here"}
)(lambda run: parametrizations.weight_norm(run.net.head))
situation("prune", {"fsdp": "would be wrong here"})(
    lambda run: prune.l1_unstructured(run.net.head, "weight", 0.5)
)
situation("unfrozen")(lambda run: run.net.late.requires_grad_(True))


@situation("frozen, and unfrozen again")
def _(run: Run) -> None:
    run.net.body.requires_grad_(False)
    run.step()
    run.net.body.requires_grad_(True)
    run.net.head.requires_grad_(False)


@situation("a copy", dict.fromkeys(ZERO, NONE))
def _(run: Run) -> None:
    twin = copy.deepcopy(run.model)
    run.step()
    run.evaluate(twin)
    before = run.model, run.optimizer
    run.model, run.optimizer = twin, torch.optim.SGD(twin.parameters(), lr=0.1)
    run.step()
    run.evaluate()
    run.model, run.optimizer = before


situation(
    "a block used twice, checkpointed", dict.fromkeys(("ddp", "sharded"), "rank .* a second time")
)(lambda run: run.step(twice=True))


def halve(param) -> None:
    param.grad.mul_(0.5)


@situation("a hook on a gradient, before", before=True)
def _(run: Run) -> None:
    mask = torch.arange(48.0).view(4, 12).double() / 48
    run.net.head.weight.register_hook(lambda gradient: gradient * mask)


situation("a hook on a gradient, after")(
    lambda run: run.net.head.weight.register_hook(lambda gradient: gradient * 0.5)
)
situation("a hook on a sum, before", {"fsdp": "'head.weight' has a hook"}, before=True)(
    lambda run: run.net.head.weight.register_post_accumulate_grad_hook(halve)
)
situation("a hook on a sum, after")(
    lambda run: run.net.head.weight.register_post_accumulate_grad_hook(halve)
)


@situation("a failed backward", {"ddp": "rank .* did not end"})
def _(run: Run) -> None:
    def interrupt(_) -> None:
        raise KeyError

    handle = run.net.body.register_forward_hook(lambda *io: io[2].register_hook(interrupt) and None)
    with contextlib.suppress(KeyError):
        run.backward()
    handle.remove()


@situation("a penalty of gradients")
def _(run: Run) -> None:
    run.optimizer.zero_grad()
    run.x.requires_grad_()
    loss = run.loss()
    (slope,) = torch.autograd.grad(loss, run.x, create_graph=True)
    rows = len(run.x) / (dist.get_world_size() if run.wrapper else 1)
    (loss + rows * slope.square().sum()).backward()
    if run.wrapper == "averaged":
        sync_flat(run.model.parameters())
    run.optimizer.step()


@situation(
    "backward(create_graph=True)",
    dict.fromkeys(("ddp", *ZERO, "fsdp"), r"create_graph=True.*torch\.autograd\.grad"),
)
def _(run: Run) -> None:
    """A loss of `.grad` would lack its second derivatives."""
    run.loss().backward(create_graph=True)
    if run.wrapper == "averaged":
        sync_flat(run.model.parameters())
    run.optimizer.step()


@situation(
    "gradients set by hand",
    {"sharded": r"rank .* that backward\(\) did not compute", "fsdp": "not have been used"},
)
def _(run: Run) -> None:
    run.optimizer.zero_grad()
    params = [param for param in run.model.parameters() if param.requires_grad]
    for param, gradient in zip(params, torch.autograd.grad(run.loss(), params), strict=True):
        param.grad = gradient
    if run.wrapper in ("averaged", "ddp"):
        sync_flat(run.model.parameters())
    run.optimizer.step()


def train(wrapper: str | None, name: str):
    run, (change, before, _) = Run(wrapper), SITUATIONS[name]
    if before:
        change(run)
    run.wrap()
    run.step()
    if not before:
        change(run)
    run.evaluate()
    run.step()
    run.step()
    return run.weights(), run.seen


@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.parametrize("wrapper", ["ddp", *ZERO, "fsdp"])
@pytest.mark.parametrize(("on", "k"), [("simulated", 3), ("cpu", 2)])
def test_as_in_one_process_or_an_error(ranks_of, on, k, wrapper, name):
    error = SITUATIONS[name][2].get(wrapper)
    if error == NONE:
        return
    if error:
        with pytest.raises(RankError, match=error):
            ranks_of(on, k).run(train, wrapper, name)
        return
    expected, outputs = train(None, name)
    tolerance = 1e-5 if name == "float()" else 1e-10
    for state, evaluated in ranks_of(on, k).run(train, wrapper, name):
        torch.testing.assert_close(state, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(evaluated, outputs, rtol=tolerance, atol=tolerance)
