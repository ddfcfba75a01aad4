"""Silent bugs of real projects, each as a small wrong step; and right programs beside them.

A bug is a function of `(rank, world_size)` that takes one or two wrong steps and returns what was
recorded. Its decorator says where it is from, which kind of tensor differs first, and what the
report must call it. The sources are issues and pull requests of public projects; the code is ours,
as small as the mistake allows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, linear, mse_loss

from course_lib.compare import Cut, Record, blocks, record
from course_lib.ddp import DistributedDataParallel
from course_lib.fully_sharded import FullyShardedDataParallel
from course_lib.gradient_sync import sync_flat
from course_lib.pipeline_parallel import Pipeline, one_forward_one_backward, split_layers
from course_lib.sharded_optimizer import ShardedOptimizer
from course_lib.sharding import shard
from course_lib.tensor_parallel import (
    ParallelMLP,
    gather_from_sequence,
    reduce_from_ranks,
    sum_partial_gradients,
)
from course_lib.tensor_parallel.linear import RowParallelLinear

Step = Callable[[int, int], Record]
"""A step of rank `rank` of `world_size`."""
B = 24


@dataclass(frozen=True)
class Bug:
    """A wrong step, and what must be said of it."""

    step: Step
    right: Callable[[], Record]
    source: str
    kind: str
    labels: tuple[str, ...]
    shards: Mapping[str, Cut] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.step.__name__

    @property
    def what(self) -> str:
        return (self.step.__doc__ or "").strip()


BUGS: list[Bug] = []


# The problem, and one rank that solves it.


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4))


def batch(step: int = 0, rows: int = B, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1000 * seed + 100 + step)
    return torch.randn(rows, 8, generator=random), torch.randn(rows, 4, generator=random)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


Backward = Callable[..., Tensor]
"""The loss of a model and a micro-batch."""


def nothing(*_: object) -> None:
    """Do nothing with the gradients."""


def squared(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(model(x), y)


def train(
    model: nn.Module,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    *,
    after: Callable[[nn.Module], object] = nothing,
    each: Callable[[nn.Module, int], object] = nothing,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    loss: Backward = squared,
    data: Callable[[int], Sequence[Tensor]] | None = None,
    steps: int = 1,
    micro: int = 1,
    dtype: torch.dtype = torch.float32,
    dim: int = 0,
) -> Record:
    """Take the steps; `each` follows every backward, `after` the last one of a step.

    `data` returns this rank's part of a step's batch, by default its shard.
    """
    optim = optimizer(model)
    with record(model, optim) as recorded:
        for step in range(steps):
            optim.zero_grad()
            whole = data(step) if data else mine(rank, world_size, step, seed=seed)
            parts = [t.to(dtype) if t.is_floating_point() else t for t in whole]
            for i, chunks in enumerate(zip(*(t.chunk(micro, dim) for t in parts), strict=True)):
                (loss(model, *chunks) / micro).backward()
                each(model, i)
            after(model)
            optim.step()
    return recorded


def one_rank(
    make: Callable[[], nn.Module] = mlp,
    clip: float | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Record:
    """Take the steps on one rank: what can be trusted."""
    after = nothing if clip is None else partial(clipped, most=clip)
    return train(make().to(dtype), dtype=dtype, after=after, **options)


def bug(
    source: str,
    kind: str,
    *labels: str,
    right: Callable[[], Record] = one_rank,
    shards: Mapping[str, Cut] | None = None,
) -> Callable[[Step], Step]:
    def add(step: Step) -> Step:
        url = "https://github.com/" + source
        BUGS.append(Bug(step, right, url, kind, labels, shards or {}))
        return step

    return add


def mine(
    rank: int, world_size: int, step: int = 0, rows: int = B, seed: int = 0
) -> tuple[Tensor, Tensor]:
    x, y = batch(step, rows, seed)
    return shard(x, world_size, rank), shard(y, world_size, rank)


def all_reduce(tensors: Any) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)


def gradients(model: nn.Module) -> list[Tensor]:
    """Return the gradients, of a sharded model this rank's pieces, as plain tensors."""
    found = [param.grad for param in model.parameters() if param.grad is not None]
    return [each.as_subclass(Tensor) for each in found]


def synchronized(model: nn.Module) -> None:
    sync_flat(model.parameters())


def summed(model: nn.Module) -> None:
    all_reduce(gradients(model))


def clipped(model: nn.Module, most: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), most)


def scaled(model: nn.Module, factor: Tensor | float) -> None:
    for gradient in gradients(model):
        gradient.mul_(factor)


def squared_norm(model: nn.Module) -> Tensor:
    return torch.stack([each.square().sum() for each in gradients(model)]).sum()


# Averaging: what becomes of the ranks' gradients.


@bug("facebookresearch/dinov3/pull/250", "gradient", "times K")
def sum_in_place_of_mean(rank: int, world_size: int) -> Record:
    """gradients are summed over the ranks and not divided"""
    return train(mlp(), rank, world_size, after=summed)


@bug("verl-project/verl-SpeCo/pull/29", "gradient", "divided by K")
def divided_by_k_twice(rank: int, world_size: int) -> Record:
    """the loss is divided by the tokens of all ranks, and the gradients averaged on top"""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(model(x), y, reduction="sum") / (B * 4)

    return train(DistributedDataParallel(mlp()), rank, world_size, loss=loss)


@bug("huggingface/transformers/pull/34191", "gradient", "mean of means")
def mean_of_means(rank: int, world_size: int) -> Record:
    """ranks with more and with fewer examples count the same"""
    cuts = [4 + i * 20 // (world_size - 1) for i in range(world_size - 1)]
    own = [each.tensor_split(cuts)[rank] for each in batch()]
    return train(DistributedDataParallel(mlp()), rank, world_size, data=lambda _: own)


@bug("determined-ai/determined/pull/602", "gradient", "unequal factors",
     right=partial(one_rank, clip=0.05))  # fmt: skip
def clipped_before_the_average(rank: int, world_size: int) -> Record:
    """each rank clips its own gradients, then they are averaged"""

    def after(model: nn.Module) -> None:
        clipped(model, 0.05)
        synchronized(model)

    return train(mlp(), rank, world_size, after=after)


@bug("pytorch/pytorch/issues/170862", "gradient", "unequal factors",
     right=partial(one_rank, clip=0.05))  # fmt: skip
def clipped_by_the_norm_of_a_shard(rank: int, world_size: int) -> Record:
    """each rank clips its shard by the norm of that shard"""
    model = FullyShardedDataParallel(mlp())
    return train(model, rank, world_size, after=lambda m: scaled(m, 0.05 / squared_norm(m).sqrt()))


@bug("modelscope/twinkle/pull/290", "gradient", "scaled",
     right=partial(one_rank, clip=0.05))  # fmt: skip
def norm_is_summed_over_equal_ranks(rank: int, world_size: int) -> Record:
    """under DDP the squared norm is summed over ranks that all have the whole gradient"""

    def after(model: nn.Module) -> None:
        scaled(model, 0.05 / (squared_norm(model) * world_size).sqrt())

    return train(DistributedDataParallel(mlp()), rank, world_size, after=after)


@bug("NVIDIA-NeMo/Automodel/pull/2468", "gradient", "rank missing")
def one_rank_takes_no_part(rank: int, world_size: int) -> Record:
    """the last rank skips its backward and gives zeros to the average"""

    def after(model: nn.Module) -> None:
        if rank == world_size - 1:
            model.zero_grad()
        synchronized(model)

    return train(mlp(), rank, world_size, after=after)


@bug("ecmwf/WeatherGenerator/issues/2724", "gradient", "NaN")
def one_rank_has_nan(rank: int, world_size: int) -> Record:
    """one rank's loss is NaN, only rank 0 looks, and its gradients go into the average"""
    times = float("nan") if rank == 1 else 1.0
    model = DistributedDataParallel(mlp())
    return train(model, rank, world_size, loss=lambda *batch: squared(*batch) * times)


# Accumulation: several backwards for one step.

MICRO = 3


@bug("verl-project/verl/pull/3332", "gradient", "times backwards")
def loss_is_not_divided(rank: int, world_size: int) -> Record:
    """the losses of the micro-batches are added, not averaged"""
    return train(
        mlp(),
        rank,
        world_size,
        loss=lambda *batch: squared(*batch) * MICRO,
        after=synchronized,
        micro=MICRO,
    )


@bug("modelscope/FunASR/pull/3472", "gradient", "reduced too early")
def synchronized_at_the_first_micro_batch(rank: int, world_size: int) -> Record:
    """`no_sync` is left out at the first micro-batch in place of the last"""

    def each(model: nn.Module, i: int) -> None:
        if i == 0:
            synchronized(model)

    return train(mlp(), rank, world_size, each=each, micro=MICRO)


@bug("karpathy/build-nanogpt/pull/30", "gradient", "no all-reduce")
def never_synchronized(rank: int, world_size: int) -> Record:
    """the last micro-batch's forward is inside `no_sync` too"""
    model = DistributedDataParallel(mlp())
    with model.no_sync():
        return train(model, rank, world_size, micro=MICRO)


@bug("allenai/open-instruct/pull/1498", "gradient", "backwards missing")
def only_the_last_micro_batch_counts(rank: int, world_size: int) -> Record:
    """each backward starts the accumulation anew, so the last one's gradients remain"""

    def each(model: nn.Module, i: int) -> None:
        if i < MICRO - 1:
            model.zero_grad()

    return train(mlp(), rank, world_size, each=each, after=synchronized, micro=MICRO)


@bug("hpcaitech/ColossalAI/issues/247", "gradient", "unequal backwards")
def reduced_again_and_again(rank: int, world_size: int) -> Record:
    """after each micro-batch all that is accumulated is summed over the ranks once more"""
    return train(
        mlp(),
        rank,
        world_size,
        loss=lambda *batch: squared(*batch) / world_size,
        each=lambda model, _: summed(model),
        micro=MICRO,
    )


@bug("tenstorrent/tt-blacksmith/pull/711", "gradient", "not zeroed",
     right=partial(one_rank, steps=2))  # fmt: skip
def gradients_are_not_zeroed(rank: int, world_size: int) -> Record:
    """the second step adds to the gradients of the first"""
    before: list[Tensor] = []

    def after(model: nn.Module) -> None:
        synchronized(model)
        for gradient, old in zip(gradients(model), before, strict=False):
            gradient.add_(old)
        before[:] = [gradient.clone() for gradient in gradients(model)]

    return train(mlp(), rank, world_size, after=after, steps=2)


# Where a run begins, and its data.


@bug("pytorch/torchtitan/issues/166", "weight", "other start")
def each_rank_begins_elsewhere(rank: int, world_size: int) -> Record:
    """each rank draws its own initial weights, and nobody broadcasts"""
    return train(mlp(seed=rank), rank, world_size, after=synchronized)


@bug("huggingface/transformers/issues/4398", "input", "stale",
     right=partial(one_rank, steps=2))  # fmt: skip
def set_epoch_is_forgotten(rank: int, world_size: int) -> Record:
    """without `set_epoch` each epoch has the order of the first"""
    own = mine(rank, world_size, step=0)
    return train(DistributedDataParallel(mlp()), rank, world_size, data=lambda _: own, steps=2)


@bug("Shark-NLP/DiffuSeq/issues/37", "input", "same rows")
def all_ranks_have_the_same_data(rank: int, world_size: int) -> Record:
    """no sampler divides the data, all ranks train on the same rows"""
    return train(DistributedDataParallel(mlp()), 0, world_size)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.drop = nn.Linear(8, 16), nn.Dropout(0.5)
        self.leave = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.drop(torch.tanh(self.enter(x))))


@bug("huggingface/accelerate/issues/114", "mask", "same random numbers",
     right=partial(one_rank, make=Dropped))  # fmt: skip
def dropout_is_the_same_on_all_ranks(rank: int, world_size: int) -> Record:
    """all ranks have the same seed, so they drop the same units of other examples"""
    model = DistributedDataParallel(Dropped())
    torch.manual_seed(0)
    return train(model, rank, world_size)


@bug("awslabs/slapo/issues/21", "mask", "other random numbers",
     right=partial(one_rank, make=Dropped))  # fmt: skip
def dropout_differs_where_activations_are_equal(rank: int, world_size: int) -> Record:
    """tensor parallel ranks hold the same activations and drop others of them"""
    model = Dropped()
    torch.manual_seed(rank)
    return train(model)


# The model: tensor, sequence and pipeline parallel.


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(8, 8)
        self.block = nn.ModuleDict({"enter": nn.Linear(8, 16), "leave": nn.Linear(16, 8)})
        self.norm, self.after = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = self.block["leave"](nn.functional.gelu(self.block["enter"](x)))
        return self.after(self.norm(x))


class Parallel(Whole):
    """`Whole` with a tensor parallel block."""

    def __init__(self, leave: type[RowParallelLinear] = RowParallelLinear) -> None:
        super().__init__()
        enter, old = self.block["enter"], self.block["leave"]
        self.block = ParallelMLP(8, 16)
        self.block.enter = type(self.block.enter).from_linear(enter)
        self.block.leave = leave.from_linear(old)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.norm(self.block(self.before(x))))


tensor_parallel = partial(one_rank, make=Whole)


class BiasInside(RowParallelLinear):
    def forward(self, x: Tensor) -> Tensor:
        return reduce_from_ranks(linear(x, self.weight, self.bias), self.group)


class NotReduced(RowParallelLinear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight) + self.bias / dist.get_world_size()


@bug("huggingface/text-generation-inference/issues/1036", "output", "bias", right=tensor_parallel)
def bias_is_added_on_each_rank(rank: int, world_size: int) -> Record:
    """a row-parallel layer adds its bias before the all-reduce, K times"""
    return train(Parallel(BiasInside))


@bug("sgl-project/sglang/pull/14811", "output", "partial sum", right=tensor_parallel)
def row_parallel_is_not_reduced(rank: int, world_size: int) -> Record:
    """the all-reduce of a row-parallel layer does not take place"""
    return train(Parallel(NotReduced))


@bug("vllm-project/vllm-gguf-plugin/issues/103", "weight", "another rank's part",
     right=tensor_parallel)  # fmt: skip
def all_ranks_load_the_first_shard(rank: int, world_size: int) -> Record:
    """each rank loads the shard of rank 0"""
    model = Parallel()
    with torch.no_grad():
        dist.broadcast(model.block.enter.weight, 0)
    return train(model)


@bug("NVIDIA-NeMo/Automodel/pull/1324", "weight", "another order",
     right=lambda: _attention(Mixing()),
     shards={"qkv.*": blocks(3), "qkv": blocks(3, -1)})  # fmt: skip
def fused_projection_is_cut_as_one(rank: int, world_size: int) -> Record:
    """queries, keys and values lie in one weight, and it is cut as if it were one"""
    model = Mixing()
    whole = model.qkv
    model.qkv = nn.Linear(8, 24 // world_size)
    with torch.no_grad():
        model.qkv.weight.copy_(shard(whole.weight, world_size, rank))
        model.qkv.bias.copy_(shard(whole.bias, world_size, rank))
    return _attention(model)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return q * torch.tanh(k) + v


def _attention(model: nn.Module) -> Record:
    with record(model, optimizer := sgd(model)) as recorded:
        model(batch()[0]).square().mean().backward()
        optimizer.step()
    return recorded


class AlongTheSequence(nn.Module):
    """Along the sequence: 24 tokens, cut over the ranks; LayerNorm sees this rank's."""

    def __init__(self, world_size: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.after = nn.LayerNorm(8), nn.Linear(8, 4)
        self.world_size = world_size

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        if self.world_size > 1:
            normed = gather_from_sequence(normed, B)
        return self.after(normed)


def _sequence(
    rank: int, world_size: int, synchronize: Callable[[Any], None], seed: int = 0
) -> Record:
    model = AlongTheSequence(world_size)
    with record(model, optimizer := sgd(model)) as recorded:
        x, y = batch(seed=seed)
        outputs = model(shard(x, world_size, rank))
        # Each rank has all tokens: their gradients are summed on the way back, hence 1/K.
        (mse_loss(outputs, y) / world_size).backward()
        for param in model.after.parameters():
            param.grad.mul_(world_size)
        synchronize(model.norm.parameters())
        optimizer.step()
    return recorded


@bug("NVIDIA/Megatron-LM/issues/1446", "gradient", "no all-reduce",
     right=partial(one_rank, make=AlongTheSequence))  # fmt: skip
def layer_norm_along_the_sequence(rank: int, world_size: int) -> Record:
    """LayerNorm's gradients are of each rank's tokens, and are not added up"""
    return _sequence(rank, world_size, lambda _: None)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.norm, self.leave = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.norm(self.enter(x))))


@bug("pytorch/pytorch/issues/49794", "output", "own statistics",
     right=partial(one_rank, make=Normed))  # fmt: skip
def batch_norm_is_local(rank: int, world_size: int) -> Record:
    """BatchNorm takes mean and variance of this rank's examples"""
    return train(DistributedDataParallel(Normed()), rank, world_size)


class Counting(nn.Module):
    """A running mean in a buffer, which forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.enter(x)


@bug("pytorch/pytorch/issues/63916", "buffer", "no all-reduce",
     right=partial(one_rank, make=Counting))  # fmt: skip
def buffers_are_not_synchronized(rank: int, world_size: int) -> Record:
    """a buffer that forward assigns anew is not synchronized"""
    return train(DistributedDataParallel(Counting()), rank, world_size)


# The optimizer.


@bug("huggingface/accelerate/issues/3256", "option", "not in the optimizer")
def optimizer_is_built_before_wrapping(rank: int, world_size: int) -> Record:
    """the optimizer has the parameters from before the model was wrapped"""
    inner = mlp()
    optimizer = sgd(inner)
    model = FullyShardedDataParallel(inner)
    return train(model, rank, world_size, optimizer=lambda _: optimizer)


@bug("karpathy/nanochat/pull/857", "option", "option")
def learning_rates_differ(rank: int, world_size: int) -> Record:
    """the learning rate follows each rank's own progress through its data"""
    optimizer = partial(sgd, lr=0.1 * (1 - 0.01 * rank))
    return train(DistributedDataParallel(mlp()), rank, world_size, optimizer=optimizer)


@bug("NVIDIA/Megatron-LM/issues/950", "weight", "stale", right=partial(one_rank, steps=2))
def weights_of_the_step_before(rank: int, world_size: int) -> Record:
    """forward runs before the stepped weights of another rank have arrived"""
    model = mlp()
    with record(model, optimizer := sgd(model)) as recorded:
        for step in range(2):
            optimizer.zero_grad()
            x, y = mine(rank, world_size, step)
            mse_loss(model(x), y).backward()
            sync_flat(model.parameters())
            old = model[0].weight.detach().clone()
            optimizer.step()
            if rank > 0:
                with torch.no_grad():
                    model[0].weight.copy_(old)
    return recorded


@bug("facebookresearch/optimizers/pull/149", "update", "unchanged")
def stepped_weights_are_not_sent(rank: int, world_size: int) -> Record:
    """each rank steps its part of the parameters, and what sends them to the others is skipped"""
    model = mlp()
    own = torch.optim.SGD(list(model.parameters())[rank::world_size], lr=0.1, momentum=0.9)
    return train(model, rank, world_size, after=synchronized, optimizer=lambda _: own)


# Right programs: they round otherwise than one rank does, and nothing else.


@dataclass(frozen=True)
class Right:
    """A right program of `(rank, world_size, seed)`, and its one rank, of `(seed)`."""

    step: Callable[[int, int, int], Record]
    right: Callable[[int], Record]
    shards: Mapping[str, Cut] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    on: tuple[str, ...] = ("cpu", "simulated")


RIGHT: list[Right] = []


def right(one: Callable[..., Record] = one_rank, **options: Any) -> Callable[[Any], Any]:
    def add(step: Any) -> Any:
        RIGHT.append(Right(step, lambda seed: one(seed=seed), **options))
        return step

    return add


three = partial(one_rank, steps=3)
three_adam = partial(one_rank, steps=3, optimizer=adam)


@right(three)
def ddp(rank: int, world_size: int, seed: int) -> Record:
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.0005)
    return train(model, rank, world_size, seed, steps=3)


@right(three)
def flat_bucket_and_accumulation(rank: int, world_size: int, seed: int) -> Record:
    return train(mlp(), rank, world_size, seed, after=synchronized, micro=2, steps=3)


def _sharded(model: nn.Module) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW
    return ShardedOptimizer(model.parameters(), kind, gradients="sharded", lr=0.01)


@right(three_adam)
def zero_2(rank: int, world_size: int, seed: int) -> Record:
    return train(mlp(), rank, world_size, seed, optimizer=_sharded, steps=3)


@right(three_adam, on=("cpu",))
def pytorch_fully_sharded(rank: int, world_size: int, seed: int) -> Record:
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    return train(model, rank, world_size, seed, optimizer=adam, steps=3)


@right(partial(one_rank, steps=3, make=Whole))
def tensor_parallel_block(rank: int, world_size: int, seed: int) -> Record:
    return train(Parallel(), seed=seed, steps=3)


@right(partial(one_rank, make=AlongTheSequence))
def sequence_parallel(rank: int, world_size: int, seed: int) -> Record:
    return _sequence(rank, world_size, sum_partial_gradients, seed)


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)]
    return nn.Sequential(*layers, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


@right(partial(one_rank, make=deep, steps=2))
def pipeline(rank: int, world_size: int, seed: int) -> Record:
    schedule = one_forward_one_backward(world_size, micro_batches=4)
    model = Pipeline(split_layers(deep(), world_size), mse_loss, schedule)
    optimizer = sgd(model)
    with record(model, optimizer) as recorded:
        for step in range(2):
            optimizer.zero_grad()
            model.step(*batch(step, B, seed))
            optimizer.step()
    return recorded


@right(partial(one_rank, steps=3, dtype=torch.bfloat16))
def bfloat16(rank: int, world_size: int, seed: int) -> Record:
    model = DistributedDataParallel(mlp().bfloat16())
    return train(model, rank, world_size, seed, steps=3, dtype=torch.bfloat16)


class InBfloat16(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            rounded = {name: param.bfloat16() for name, param in layer.named_parameters()}
            x = functional_call(layer, rounded, x)
        return x


@right(partial(one_rank, steps=2), dtype=torch.bfloat16)
def master_weights_in_float32(rank: int, world_size: int, seed: int) -> Record:
    model = DistributedDataParallel(InBfloat16(*mlp()))
    return train(model, rank, world_size, seed, steps=2, dtype=torch.bfloat16)


def _thirteen_rows(rank: int, world_size: int, seed: int) -> Record:
    return train(
        mlp(),
        data=lambda step: mine(rank, world_size, step, 13, seed),
        loss=lambda model, x, y: squared(model, x, y) * len(x) / 13,
        after=summed if world_size > 1 else nothing,
        steps=2,
    )


@right(lambda seed: _thirteen_rows(0, 1, seed))
def unequal_batches_with_weights(rank: int, world_size: int, seed: int) -> Record:
    return _thirteen_rows(rank, world_size, seed)


@right(partial(one_rank, make=Dropped, steps=2))
def dropout_with_seeds_of_their_own(rank: int, world_size: int, seed: int) -> Record:
    model = DistributedDataParallel(Dropped())
    torch.manual_seed(100 * seed + rank)
    return train(model, rank, world_size, seed, steps=2)


@right(partial(one_rank, steps=2, clip=0.05))
def clipped_by_the_global_norm(rank: int, world_size: int, seed: int) -> Record:
    def clip(model: nn.Module) -> None:
        squares = squared_norm(model)
        dist.all_reduce(squares)
        scaled(model, torch.clamp(0.05 / (squares.sqrt() + 1e-6), max=1.0))

    return train(FullyShardedDataParallel(mlp()), rank, world_size, seed, after=clip, steps=2)


# Right programs whose models return other things than one row of dimension 0 for each example.

TOKENS, WORDS = 5, 11


@dataclass(frozen=True)
class Shaped:
    """A model that is called as ``model(*batch)``, the loss in what it returns, and its batch."""

    make: Callable[[], nn.Module]
    loss: Callable[[Any], Tensor]
    batch: Callable[..., Sequence[Tensor]] = batch
    dim: int = 0

    def one(self, seed: int = 0) -> Record:
        return self.train(0, 1, seed, strided=False)

    def train(
        self,
        rank: int,
        world_size: int,
        seed: int,
        strided: bool = True,
        micro: int = 1,
        sync: Callable[[nn.Module], None] = synchronized,
    ) -> Record:
        rows = torch.arange(B)
        own = rows[rank::world_size] if strided else shard(rows, world_size, rank)
        model = self.make()

        return train(
            model,
            data=lambda step: [t.index_select(self.dim, own) for t in self.batch(step, B, seed)],
            loss=lambda model, *parts: self.loss(model(*parts)),
            after=sync if world_size > 1 else nothing,
            steps=2,
            micro=micro,
            dim=self.dim,
        )


def tokens(step: int = 0, rows: int = B, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1000 * seed + 200 + step)
    words = torch.randint(0, WORDS, (rows, TOKENS + 1), generator=random)
    return words[:, :-1], words[:, 1:]


def sequences(step: int = 0, rows: int = B, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1000 * seed + 300 + step)
    return torch.randn(rows, TOKENS, 8, generator=random), torch.randn(rows, 4, generator=random)


def sequences_in_front(step: int = 0, rows: int = B, seed: int = 0) -> tuple[Tensor, Tensor]:
    x, y = sequences(step, rows, seed)
    return x.transpose(0, 1), y[None]


class Language(nn.Module):
    """Tokens are flattened to (B·T, …), and the loss is returned with the logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix = nn.Embedding(WORDS, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, WORDS)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = torch.tanh(self.mix(self.embed(x))).cumsum(1)
        logits = self.head(self.norm(hidden.flatten(0, 1)))
        return logits.view(*x.shape, -1), cross_entropy(logits, y.flatten())


class Recurrent(nn.Module):
    """h_n and c_n of an LSTM have shape (layers, B, …)."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(8, 6, num_layers=2, dropout=0.5, batch_first=batch_first)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        every, (last, _) = self.lstm(x)
        output = self.out(last[-1])
        return every, output, mse_loss(output, y.view_as(output))


class Measured(nn.Module):
    """Returns what people log beside the loss: accuracy, counts, the largest, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        scores, right = self.inner(x), y.argmax(1)
        counts = torch.zeros(4, 4).index_put_((right, scores.argmax(1)), torch.ones(1), True)
        accuracy = (scores.argmax(1) == right).float().mean()
        logged = {"accuracy": accuracy, "counts": counts, "norm": scores.norm()}
        return {"loss": cross_entropy(scores, right), "log": logged, "top": scores.topk(2).values}


class Experts(nn.Module):
    """Each row goes to one expert, so an expert sees another number of rows on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList([nn.Linear(8, 4) for _ in range(3)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        output = torch.zeros_like(y)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            output = output.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return mse_loss(output, y)


SHAPED = {
    "logits_and_loss": Shaped(Language, lambda out: out[1], tokens),
    "recurrent": Shaped(partial(Recurrent, True), lambda out: out[2], sequences),
    "recurrent_sequence_first": Shaped(
        partial(Recurrent, False), lambda out: out[2], sequences_in_front, dim=1
    ),
    "metrics_in_a_dict": Shaped(Measured, lambda out: out["loss"]),
    "rows_sent_to_experts": Shaped(Experts, lambda out: out),
}


def _register(name: str, shaped: Shaped, **options: Any) -> None:
    def step(rank: int, world_size: int, seed: int) -> Record:
        return shaped.train(rank, world_size, seed, **options)

    step.__name__ = name
    right(shaped.one)(step)


for _name, _shaped in SHAPED.items():
    _register(_name, _shaped, strided=False)
    _register(f"{_name}_strided", _shaped, micro=2)


class TermOfASum(nn.Module):
    """A layer of its own holds a term of a sum, which the layer around it adds up."""

    def __init__(self, world_size: int = 1, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        enter, self.leave = nn.Linear(8, 12), nn.Linear(12, 4, bias=False)
        self.enter = nn.Linear(8, 12 // world_size)
        with torch.no_grad():
            self.enter.weight.copy_(shard(enter.weight, world_size, rank))
            self.enter.bias.copy_(shard(enter.bias, world_size, rank))
            part = shard(self.leave.weight.T.contiguous(), world_size, rank).T.contiguous()
        self.leave = nn.Linear(12 // world_size, 4, bias=False)
        self.leave.weight = nn.Parameter(part)
        self.reduce = reduce_from_ranks if world_size > 1 else lambda term: term

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.leave(torch.tanh(self.enter(x))))


@right(partial(one_rank, make=TermOfASum, steps=2))
def a_term_of_a_sum_in_a_layer(rank: int, world_size: int, seed: int) -> Record:
    return train(TermOfASum(world_size, rank), seed=seed, steps=2)
