"""Code reads `.grad` between backward and step: it is right as in one process, or raises an error.

The oracle is one process that computes with all rows: PyTorch's own clipping and GradScaler.
"""

import copy
import io
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip_of_torch
from torch.nn.utils import clip_grad_value_

from course_lib.ddp import DistributedDataParallel
from course_lib.fully_sharded import FullyShardedDataParallel
from course_lib.mesh import (
    AXES,
    average_gradients,
    batch_of,
    divide_experts,
    divide_tensors,
    make_mesh,
    next_word_loss,
)
from course_lib.parts import clip_grad_norm_, gradient_norms, whole_norms
from course_lib.pipeline_parallel import Pipeline, gpipe, split_layers
from course_lib.ranks import RankError
from course_lib.sharded_optimizer import ShardedOptimizer
from course_lib.tensor_parallel import ColumnParallelLinear, ParallelMLP
from tests.helpers.meshes import KINDS as MESHES
from tests.helpers.meshes import Case, in_and_out, whole_model
from tests.helpers.meshes import batches as token_batches
from tests.helpers.zero_scenarios import Awkward, batches


def test_a_backward_between_clipping_and_step_is_an_error(ranks_of):
    def backward_after_clipping() -> None:
        trained = Trained("local", torch.optim.SGD, lr=0.1)
        for _ in range(2):
            trained.backward()
            trained.optimizer.clip_grad_norm_(1.0)

    with pytest.raises(RankError, match="after the gradients were averaged"):
        ranks_of("simulated", 2).run(backward_after_clipping)


def test_pieces_leave_the_ranks_as_ordinary_tensors(ranks_of):
    def gradients() -> list[Tensor]:
        wrapped = FullyShardedDataParallel(Awkward())
        wrapped(batches()[0][0]).sum().backward()
        pieces = [p.grad for p in wrapped.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(pieces, copy.deepcopy(pieces), strict=True))
        if dist.get_world_size() == 1:
            dist.all_reduce(pieces[0])  # as between nodes, in hybrid sharding
        return pieces

    for on, k in (("simulated", 1), ("simulated", 2), ("cpu", 1), ("cpu", 2)):
        for pieces in ranks_of(on, k).run(gradients):
            assert sum(float(piece.square().sum()) for piece in pieces) > 0


@pytest.mark.parametrize("k", [1, 3])
def test_a_weight_read_outside_its_forward_is_named(ranks_of, k):
    def tied_by_hand() -> None:
        net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
        wrapped = FullyShardedDataParallel(net)
        hidden = wrapped(torch.arange(5))
        hidden @ net[0].weight.T

    with pytest.raises(RankError, match=r"'Embedding\.weight' is read outside"):
        ranks_of("simulated", k).run(tied_by_hand)


@pytest.mark.parametrize("kind", ["fsdp", "tensor"])
def test_parts_are_copied_saved_and_shown_as_parameters(ranks_of, kind):
    def handled():
        net = FullyShardedDataParallel(Awkward()) if kind == "fsdp" else ParallelMLP(4, 6)
        params = list(net.parameters())
        copies, again = copy.deepcopy(params), io.BytesIO()
        assert all(isinstance(param, nn.Parameter) for param in [*params, *copies])
        assert [type(param) for param in copies] == [type(param) for param in params]
        torch.save(params, again)
        saved = torch.load(io.BytesIO(again.getvalue()))
        assert {type(param) for param in saved} == {nn.Parameter}
        assert all(torch.equal(a, b) for a, b in zip(params, saved, strict=True))
        assert "[" in repr(copies[0])
        return [whole_norms(copies), saved]

    results = ranks_of("cpu", 2).run(handled)
    squares = [sum(param.square().sum() for param in saved) for _, saved in results]
    if kind == "fsdp":  # with tensor parallelism, both ranks hold the last bias
        for norms, _ in results:
            torch.testing.assert_close(norms.square().sum(), torch.stack(squares).sum())


# --- each situation × each wrapper: what a loop reads is that of one process, or an error ---------


ZERO = ("averaged", "local", "sharded")
WRAPPERS = ("DDP", *ZERO, "FSDP", "tensor", "pipeline", "expert")
CASE = Case("experts")
CLIP_VALUE = 0.002  # below some elements of the gradients, and above others


class Lamb(torch.optim.Optimizer):
    """The step of each whole tensor is a hundredth as long as its weights, or as long as 1.

    Its momentum is a state that began as zeros.
    """

    def __init__(self, params, normalised: bool = False) -> None:
        super().__init__(params, {})
        self.normalised = normalised

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for param in (param for group in self.param_groups for param in group["params"]):
            if param.grad is not None:
                length = 1.0 if self.normalised else param.norm()
                moment = self.state[param].setdefault("moment", torch.zeros_like(param))
                moment.mul_(0.9).add_(param.grad)
                param.sub_(moment * (0.01 * length / (moment.norm() + 1e-9)))


class Trained:
    """The transformer in a wrapper or in two, on this rank; "alone": in one process."""

    def __init__(self, wrapper: str, make: type[torch.optim.Optimizer], **options: float) -> None:
        self.kinds, self.scale, net = wrapper.split("+"), 1.0, whole_model(CASE)
        axes = [kind if kind in AXES else "data" for kind in self.kinds]
        self.mesh = None if wrapper == "alone" else make_mesh(**dict.fromkeys(axes, 2))
        group = self.mesh and self.mesh["data"]
        self.model = net
        self.zero = next((kind for kind in self.kinds if kind in ZERO), None)
        if "tensor" in self.kinds:
            divide_tensors(net, self.mesh["tensor"])
        if "expert" in self.kinds:
            divide_experts(net, self.mesh["expert"])
        if "DDP" in self.kinds or wrapper == "averaged":
            self.model = DistributedDataParallel(net, group=group)
        elif wrapper.endswith("FSDP") and "pipeline" not in self.kinds:
            self.model = FullyShardedDataParallel(net, group=group)
        elif "pipeline" in self.kinds:
            stages, place = split_layers(net, 2), self.mesh.coordinates["pipeline"]
            if "FSDP" in self.kinds:
                stages[place] = FullyShardedDataParallel(stages[place], group=group)
            group = self.mesh["pipeline"]
            self.model = Pipeline(stages, self.loss, gpipe(2, 2), group=group)
        params = self.model.parameters()
        if self.zero:
            options = {"gradients": self.zero, "group": self.mesh["data"], **options}
            self.optimizer = ShardedOptimizer(params, make, **options)
        else:
            self.optimizer = make(params, **options)
        apart = self.kinds[-1] in AXES or (self.zero == "averaged" and len(self.kinds) > 1)
        self.sync = average_gradients if apart else lambda *_: None

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        return self.scale * next_word_loss(scores, targets)

    def backward(self, step: int = 0, penalty=lambda _: 0.0) -> None:
        rows = token_batches(MESHES[CASE.kind])[step]
        x, y = in_and_out(rows if self.mesh is None else batch_of(rows, self.mesh))
        if "pipeline" in self.kinds:
            self.model.step(x, y)
            added = penalty(self.model.parameters())
        else:
            added = self.loss(self.model(x), y) + penalty(self.model.parameters())
        if isinstance(added, Tensor):
            added.backward()
        self.sync(self.model, self.mesh)

    def named(self, values) -> dict[str, Tensor]:
        names = [name.replace("module.", "") for name, _ in self.model.named_parameters()]
        names = [n.split(".", 2)[2] if n.startswith("stages.") else n for n in names]
        return dict(zip(names, values, strict=True))


def clipped(trained: Trained, clip, norm_type: float = 2.0):
    trained.backward()
    clip = clip if trained.mesh else clip_of_torch
    totals = [clip(trained.model.parameters(), limit, norm_type) for limit in (0.05, 1e9)]
    return dict(zip(("before", "after"), totals, strict=True))


def clamped(trained: Trained, foreach: bool, averaged: bool = False):
    """Clip each element, with `averaged` after the mean of a ZeRO optimizer, and take a step."""
    trained.backward()
    params = list(trained.model.parameters())
    of_mean = averaged and trained.zero
    to_clip = trained.optimizer.averaged_parameters() if of_mean else params
    clip_grad_value_(to_clip, CLIP_VALUE, foreach=foreach)
    trained.optimizer.step()
    return trained.named(whole_norms(params))


def read(trained: Trained, situation: str):
    penalty = lambda params: 0.1 * sum(param.norm() for param in params)
    trained.backward(0, **({"penalty": penalty} if situation == "lasso" else {}))
    params = list(trained.model.parameters())
    if situation == "weights":
        return trained.named([param.detach().norm() for param in params])
    if situation == "gradients":
        return trained.named([param.grad.norm() for param in params])
    if situation == "finite":
        return trained.named([param.grad.isfinite().all() for param in params])
    if situation == "NumPy":
        return trained.named([torch.tensor(param.grad.numpy().sum()) for param in params])
    if situation == "one vector":
        return {"norm": torch.cat([param.grad.flatten() for param in params]).norm()}
    if situation == "gradients cleared by the module":
        trained.model.zero_grad()
    if situation in ("accumulation", "gradients cleared by the module"):
        trained.backward(1)
    if situation == "step":
        trained.optimizer.step()
        return trained.named([param.detach().norm() for param in params])
    return trained.named(gradient_norms(params))


def scaled(trained: Trained):
    """Whether the weights moved, and the scale, if one rank overflows in three steps of six."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    history = []
    for step in range(6):
        trained.optimizer.zero_grad()
        scaler.scale(torch.ones(()))  # a stage without the loss must have a scale, too
        trained.scale = scaler.get_scale()
        last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        handles = []
        if last and step in (0, 3, 4):
            if trained.kinds[-1] in (*AXES, "alone"):
                params = [p for name, p in trained.model.named_parameters() if "leave.w" in name]
                handles = [params[-1].register_hook(lambda gradient: gradient / 0)]
            else:
                trained.scale = float("inf")
        trained.backward(step % 5)
        for handle in handles:
            handle.remove()
        before = [param.detach().clone() for param in trained.model.parameters()]
        if step % 2:
            scaler.unscale_(trained.optimizer)
            clip = clip_grad_norm_ if trained.mesh else clip_of_torch
            clip(trained.model.parameters(), 0.1)
        scaler.step(trained.optimizer)
        scaler.update()
        pairs = zip(before, trained.model.parameters(), strict=True)
        moved = any(not torch.equal(a, b) for a, b in pairs)
        history += [scaler.get_scale(), float(moved)]
    return {"scales and moves": torch.tensor(history)}


SITUATIONS = {
    # situation: (function, its arguments, the wrappers that must raise)
    "torch's clip_grad_norm_": (
        clipped,
        (clip_of_torch,),
        "local sharded FSDP tensor pipeline expert",
    ),
    "torch's, one by one": (
        clipped,
        (partial(clip_of_torch, foreach=False),),
        "local sharded FSDP tensor pipeline expert",
    ),
    "our clip_grad_norm_": (clipped, (clip_grad_norm_,), ""),
    "ours, by the largest": (clipped, (clip_grad_norm_, math.inf), ""),
    "ours, by the sum": (clipped, (clip_grad_norm_, 1.0), ""),
    "clip_grad_value_": (clamped, (False,), "local sharded"),
    "clip_grad_value_, all at once": (clamped, (True,), "local sharded"),
    "clip_grad_value_ of means": (clamped, (False, True), ""),
    "GradScaler": (scaled, (), ""),
    "p.norm()": (read, ("weights",), "FSDP tensor"),
    "p.grad.norm()": (read, ("gradients",), "local sharded FSDP tensor"),
    "isfinite().all()": (read, ("finite",), "local sharded FSDP tensor"),
    "p.grad.numpy()": (read, ("NumPy",), "local sharded FSDP tensor"),
    "cat([p.grad]).norm()": (read, ("one vector",), "local sharded FSDP tensor pipeline expert"),
    "LAMB": (read, ("step",), "averaged local sharded FSDP tensor"),
    "a moment's norm": (read, ("step",), "averaged local sharded FSDP tensor"),
    "group lasso": (read, ("lasso",), "FSDP tensor"),
    "accumulation": (read, ("accumulation",), ""),
    "gradients cleared by the module": (read, ("gradients cleared by the module",), ""),
}


def on_a_rank(wrapper: str, situation: str) -> dict[str, Tensor]:
    function, arguments, _ = SITUATIONS[situation]
    make, options = torch.optim.SGD, {"lr": 0.1}
    if situation in ("LAMB", "a moment's norm"):
        make, options = Lamb, {"normalised": situation != "LAMB"}
    results = function(Trained(wrapper, make, **options), *arguments)
    return {name: value.detach() for name, value in results.items()}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_as_in_one_process_or_an_error(ranks_of, situation, wrapper):
    ranks = ranks_of("simulated", 2)
    if wrapper in SITUATIONS[situation][2].split():
        with pytest.raises(RankError, match=r"would be wrong here.*(clip_grad_norm_|whole_norms)"):
            ranks.run(on_a_rank, wrapper, situation)
        return
    check_each(ranks.run(on_a_rank, wrapper, situation), situation)


def check_each(results: list[dict[str, Tensor]], situation: str) -> None:
    expected = on_a_rank("alone", situation)
    assert {name for result in results for name in result} == expected.keys()
    for result in results:
        for name, value in result.items():
            torch.testing.assert_close(value, expected[name].to(value.dtype), msg=name)


MIXTURES = [f"{axis}+{kind}" for axis in ("tensor", "pipeline") for kind in (*ZERO, "FSDP")]


@pytest.mark.parametrize("wrapper", ["tensor+DDP", "expert+averaged", "tensor+pipeline", *MIXTURES])
@pytest.mark.parametrize("situation", ["our clip_grad_norm_", "GradScaler", "accumulation"])
def test_two_wrappers_at_once(ranks_of, situation, wrapper):
    check_each(ranks_of("simulated", 4).run(on_a_rank, wrapper, situation), situation)


@pytest.mark.parametrize("wrapper", ["FSDP", "tensor"])
def test_one_element_is_not_used_for_many(ranks_of, wrapper):
    def scaled_by_a_norm() -> None:
        net = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
        if wrapper == "FSDP":
            model = FullyShardedDataParallel(net)
            model(torch.ones(4, 3)) * net[1].weight
        else:
            column = ColumnParallelLinear(3, 2)
            torch.ones(4, 2) * column.bias

    with pytest.raises(RankError, match=r"mul\(\) of .*would be wrong here"):
        ranks_of("simulated", 2).run(scaled_by_a_norm)
