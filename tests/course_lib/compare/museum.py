"""Silent bugs of real projects, each as a small wrong step; and right programs beside them.

A bug is a function that takes one or two wrong steps on each rank and returns what was recorded.
Its decorator says where it is from, which kind of tensor differs first, and what the report must
call it. The sources are issues and pull requests of public projects; the code is ours, as small as
the mistake allows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

B = 24


@dataclass(frozen=True)
class Bug:
    """A wrong step, and what must be said of it."""

    step: Callable[[], Record]
    right: Callable[[], Record]
    source: str
    kind: str
    label: str
    shards: Mapping[str, Cut]

    @property
    def name(self) -> str:
        return self.step.__name__

    @property
    def sentence(self) -> str:
        return (self.step.__doc__ or "").strip()


BUGS: list[Bug] = []


# The problem, and one rank that solves it.


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4))


def batch(step: int = 0, rows: int = B, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1000 * seed + 100 + step)
    return torch.randn(rows, 8, generator=random), torch.randn(rows, 4, generator=random)


def own_batch(step: int = 0, rows: int = B, seed: int = 0) -> tuple[Tensor, Tensor]:
    rank, world_size = rank_and_size()
    x, y = batch(step, rows, seed)
    return shard(x, world_size, rank), shard(y, world_size, rank)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def nothing(*_: object) -> None:
    """Do nothing with the gradients."""


def squared(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(model(x), y)


def train(
    model: nn.Module,
    seed: int = 0,
    *,
    after: Callable[[nn.Module], object] = nothing,
    after_backward: Callable[[nn.Module, int], object] = nothing,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    loss: Callable[..., Tensor] = squared,
    data: Callable[[int], Sequence[Tensor]] | None = None,
    steps: int = 1,
    micro: int = 1,
    dtype: torch.dtype = torch.float32,
    dim: int = 0,
) -> Record:
    """Take the steps; `after_backward` follows every backward, `after` the last one of a step.

    `data` returns this rank's part of a step's batch, by default its shard.
    """
    optim = optimizer(model)
    with record(model, optim) as recorded:
        for step in range(steps):
            optim.zero_grad()
            tensors = data(step) if data else own_batch(step, seed=seed)
            parts = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
            for i, chunks in enumerate(zip(*(t.chunk(micro, dim) for t in parts), strict=True)):
                (loss(model, *chunks) / micro).backward()
                after_backward(model, i)
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
    after = nothing if clip is None else partial(clipped, limit=clip)
    return train(make().to(dtype), dtype=dtype, after=after, **options)


def bug(
    source: str, kind: str, label: str, shards: Mapping[str, Cut] | None = None, **options: Any
) -> Callable[[Callable[[], Record]], Callable[[], Record]]:
    """Add a bug; `options` are those of `one_rank`."""

    def add(step: Callable[[], Record]) -> Callable[[], Record]:
        url = "https://github.com/" + source
        BUGS.append(Bug(step, partial(one_rank, **options), url, kind, label, shards or {}))
        return step

    return add


def gradients(model: nn.Module) -> list[Tensor]:
    """Return the gradients, of a sharded model this rank's pieces, as plain tensors."""
    tensors = [param.grad for param in model.parameters() if param.grad is not None]
    return [tensor.as_subclass(Tensor) for tensor in tensors]


def synchronized(model: nn.Module) -> None:
    sync_flat(model.parameters())


def summed(model: nn.Module) -> None:
    for gradient in gradients(model):
        dist.all_reduce(gradient)


def clipped(model: nn.Module, limit: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), limit)


def scaled(model: nn.Module, factor: Tensor | float) -> None:
    for gradient in gradients(model):
        gradient.mul_(factor)


def squared_norm(model: nn.Module) -> Tensor:
    return torch.stack([gradient.square().sum() for gradient in gradients(model)]).sum()


# Averaging: what becomes of the ranks' gradients.


@bug("facebookresearch/dinov3/pull/250", "gradient", "times K")
def sum_in_place_of_mean() -> Record:
    """gradients are summed over the ranks and not divided"""
    return train(mlp(), after=summed)


@bug("verl-project/verl-SpeCo/pull/29", "gradient", "divided by K")
def divided_by_k_twice() -> Record:
    """the loss is divided by the tokens of all ranks, and the gradients averaged on top"""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(model(x), y, reduction="sum") / (B * 4)

    return train(DistributedDataParallel(mlp()), loss=loss)


@bug("huggingface/transformers/pull/34191", "gradient", "mean of means")
def mean_of_means() -> Record:
    """ranks with more and with fewer examples count the same"""
    rank, world_size = rank_and_size()
    cuts = [4 + i * 20 // (world_size - 1) for i in range(world_size - 1)]
    parts = [tensor.tensor_split(cuts)[rank] for tensor in batch()]
    return train(DistributedDataParallel(mlp()), data=lambda _: parts)


@bug("determined-ai/determined/pull/602", "gradient", "unequal factors", clip=0.05)
def clipped_before_the_average() -> Record:
    """each rank clips its own gradients, then they are averaged"""

    def after(model: nn.Module) -> None:
        clipped(model, 0.05)
        synchronized(model)

    return train(mlp(), after=after)


@bug("pytorch/pytorch/issues/170862", "gradient", "unequal factors", clip=0.05)
def clipped_by_the_norm_of_a_shard() -> Record:
    """each rank clips its shard by the norm of that shard"""
    model = FullyShardedDataParallel(mlp())
    return train(model, after=lambda m: scaled(m, 0.05 / squared_norm(m).sqrt()))


@bug("modelscope/twinkle/pull/290", "gradient", "scaled", clip=0.05)
def norm_is_summed_over_equal_ranks() -> Record:
    """under DDP the squared norm is summed over ranks that all have the whole gradient"""

    def after(model: nn.Module) -> None:
        scaled(model, 0.05 / (squared_norm(model) * dist.get_world_size()).sqrt())

    return train(DistributedDataParallel(mlp()), after=after)


@bug("NVIDIA-NeMo/Automodel/pull/2468", "gradient", "rank missing")
def one_rank_takes_no_part() -> Record:
    """the last rank skips its backward and gives zeros to the average"""

    def after(model: nn.Module) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            model.zero_grad()
        synchronized(model)

    return train(mlp(), after=after)


@bug("ecmwf/WeatherGenerator/issues/2724", "gradient", "NaN")
def one_rank_has_nan() -> Record:
    """one rank's loss is NaN, only rank 0 looks, and its gradients go into the average"""
    times = float("nan") if dist.get_rank() == 1 else 1.0
    return train(DistributedDataParallel(mlp()), loss=lambda *batch: squared(*batch) * times)


# Accumulation: several backwards for one step.

MICRO = 3


@bug("verl-project/verl/pull/3332", "gradient", "times backwards")
def loss_is_not_divided() -> Record:
    """the losses of the micro-batches are added, not averaged"""
    loss = lambda *batch: squared(*batch) * MICRO
    return train(mlp(), loss=loss, after=synchronized, micro=MICRO)


@bug("modelscope/FunASR/pull/3472", "gradient", "reduced too early")
def synchronized_at_the_first_micro_batch() -> Record:
    """`no_sync` is left out at the first micro-batch in place of the last"""

    def after_backward(model: nn.Module, i: int) -> None:
        if i == 0:
            synchronized(model)

    return train(mlp(), after_backward=after_backward, micro=MICRO)


@bug("karpathy/build-nanogpt/pull/30", "gradient", "no all-reduce")
def never_synchronized() -> Record:
    """the last micro-batch's forward is inside `no_sync` too"""
    model = DistributedDataParallel(mlp())
    with model.no_sync():
        return train(model, micro=MICRO)


@bug("allenai/open-instruct/pull/1498", "gradient", "backwards missing")
def only_the_last_micro_batch_counts() -> Record:
    """each backward starts the accumulation anew, so the last one's gradients remain"""

    def after_backward(model: nn.Module, i: int) -> None:
        if i < MICRO - 1:
            model.zero_grad()

    return train(mlp(), after_backward=after_backward, after=synchronized, micro=MICRO)


@bug("hpcaitech/ColossalAI/issues/247", "gradient", "unequal backwards")
def reduced_again_and_again() -> Record:
    """after each micro-batch all that is accumulated is summed over the ranks once more"""
    loss = lambda *batch: squared(*batch) / dist.get_world_size()
    return train(mlp(), loss=loss, after_backward=lambda model, _: summed(model), micro=MICRO)


@bug("tenstorrent/tt-blacksmith/pull/711", "gradient", "not zeroed", steps=2)
def gradients_are_not_zeroed() -> Record:
    """the second step adds to the gradients of the first"""
    before: list[Tensor] = []

    def after(model: nn.Module) -> None:
        synchronized(model)
        for gradient, old in zip(gradients(model), before, strict=False):
            gradient.add_(old)
        before[:] = [gradient.clone() for gradient in gradients(model)]

    return train(mlp(), after=after, steps=2)


# Where a run begins, and its data.


@bug("pytorch/torchtitan/issues/166", "weight", "other start")
def each_rank_begins_elsewhere() -> Record:
    """each rank draws its own initial weights, and nobody broadcasts"""
    return train(mlp(seed=dist.get_rank()), after=synchronized)


@bug("huggingface/transformers/issues/4398", "input", "stale", steps=2)
def set_epoch_is_forgotten() -> Record:
    """without `set_epoch` each epoch has the order of the first"""
    return train(DistributedDataParallel(mlp()), data=lambda _: own_batch(0), steps=2)


@bug("Shark-NLP/DiffuSeq/issues/37", "input", "same rows")
def all_ranks_have_the_same_data() -> Record:
    """no sampler divides the data, all ranks train on the same rows"""
    rows = B // dist.get_world_size()
    return train(DistributedDataParallel(mlp()), data=lambda _: [t[:rows] for t in batch()])


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.drop = nn.Linear(8, 16), nn.Dropout(0.5)
        self.leave = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.drop(torch.tanh(self.enter(x))))


@bug("huggingface/accelerate/issues/114", "mask", "same random numbers", make=Dropped)
def dropout_is_the_same_on_all_ranks() -> Record:
    """all ranks have the same seed, so they drop the same units of other examples"""
    model = DistributedDataParallel(Dropped())
    torch.manual_seed(0)
    return train(model)


@bug("awslabs/slapo/issues/21", "mask", "other random numbers", make=Dropped)
def dropout_differs_where_activations_are_equal() -> Record:
    """tensor parallel ranks hold the same activations and drop others of them"""
    model = Dropped()
    torch.manual_seed(dist.get_rank())
    return train(model, data=batch)


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


class BiasInside(RowParallelLinear):
    def forward(self, x: Tensor) -> Tensor:
        return reduce_from_ranks(linear(x, self.weight, self.bias), self.group)


class NotReduced(RowParallelLinear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight) + self.bias / dist.get_world_size()


@bug("huggingface/text-generation-inference/issues/1036", "output", "bias", make=Whole)
def bias_is_added_on_each_rank() -> Record:
    """a row-parallel layer adds its bias before the all-reduce, K times"""
    return train(Parallel(BiasInside), data=batch)


@bug("sgl-project/sglang/pull/14811", "output", "partial sum", make=Whole)
def row_parallel_is_not_reduced() -> Record:
    """the all-reduce of a row-parallel layer does not take place"""
    return train(Parallel(NotReduced), data=batch)


@bug("vllm-project/vllm-gguf-plugin/issues/103", "weight", "another rank's part", make=Whole)
def all_ranks_load_the_first_shard() -> Record:
    """each rank loads the shard of rank 0"""
    model = Parallel()
    with torch.no_grad():
        dist.broadcast(model.block.enter.weight, 0)
    return train(model, data=batch)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return q * torch.tanh(k) + v


def of_the_square(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x).square().mean()


@bug("NVIDIA-NeMo/Automodel/pull/1324", "weight", "another order", make=Mixing,
     loss=of_the_square, shards={"qkv.*": blocks(3), "qkv": blocks(3, -1)})  # fmt: skip
def fused_projection_is_cut_as_one() -> Record:
    """queries, keys and values lie in one weight, and it is cut as if it were one"""
    rank, world_size = rank_and_size()
    model = Mixing()
    fused = model.qkv
    model.qkv = nn.Linear(8, 24 // world_size)
    with torch.no_grad():
        model.qkv.weight.copy_(shard(fused.weight, world_size, rank))
        model.qkv.bias.copy_(shard(fused.bias, world_size, rank))
    return train(model, loss=of_the_square, data=batch)


class AlongTheSequence(nn.Module):
    """Along the sequence: 24 tokens, cut over the ranks; LayerNorm sees this rank's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.after = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return self.after(gather_from_sequence(normed, B) if dist.is_initialized() else normed)


def _sequence(synchronize: Callable[[Any], None], seed: int = 0) -> Record:
    _, world_size = rank_and_size()
    y = batch(seed=seed)[1]

    def after(model: nn.Module) -> None:
        for param in model.after.parameters():
            param.grad.mul_(world_size)
        synchronize(model.norm.parameters())

    # Each rank has all tokens: their gradients are summed on the way back, hence 1/K.
    loss = lambda model, x, _: mse_loss(model(x), y) / world_size
    return train(AlongTheSequence(), seed, loss=loss, after=after)


@bug("NVIDIA/Megatron-LM/issues/1446", "gradient", "no all-reduce", make=AlongTheSequence)
def layer_norm_along_the_sequence() -> Record:
    """LayerNorm's gradients are of each rank's tokens, and are not added up"""
    return _sequence(nothing)


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


@bug("pytorch/pytorch/issues/49794", "output", "own statistics", make=normed)
def batch_norm_is_local() -> Record:
    """BatchNorm takes mean and variance of this rank's examples"""
    return train(DistributedDataParallel(normed()))


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


@bug("pytorch/pytorch/issues/63916", "buffer", "no all-reduce", make=Counting)
def buffers_are_not_synchronized() -> Record:
    """a buffer that forward assigns anew is not synchronized"""
    return train(DistributedDataParallel(Counting()))


# The optimizer.


@bug("huggingface/accelerate/issues/3256", "option", "not in the optimizer")
def optimizer_is_built_before_wrapping() -> Record:
    """the optimizer has the parameters from before the model was wrapped"""
    inner = mlp()
    optimizer = sgd(inner)
    return train(FullyShardedDataParallel(inner), optimizer=lambda _: optimizer)


@bug("karpathy/nanochat/pull/857", "option", "option")
def learning_rates_differ() -> Record:
    """the learning rate follows each rank's own progress through its data"""
    optimizer = partial(sgd, lr=0.1 * (1 - 0.01 * dist.get_rank()))
    return train(DistributedDataParallel(mlp()), optimizer=optimizer)


@bug("NVIDIA/Megatron-LM/issues/950", "weight", "stale", steps=2)
def weights_of_the_step_before() -> Record:
    """forward runs before the stepped weights of another rank have arrived"""
    model = mlp()
    with record(model, optimizer := sgd(model)) as recorded:
        for step in range(2):
            optimizer.zero_grad()
            squared(model, *own_batch(step)).backward()
            synchronized(model)
            old = model[0].weight.detach().clone()
            optimizer.step()
            if dist.get_rank() > 0:
                with torch.no_grad():
                    model[0].weight.copy_(old)
    return recorded


@bug("facebookresearch/optimizers/pull/149", "update", "unchanged")
def stepped_weights_are_not_sent() -> Record:
    """each rank steps its part of the parameters, and what sends them to the others is skipped"""
    rank, world_size = rank_and_size()
    model = mlp()
    part = torch.optim.SGD(list(model.parameters())[rank::world_size], lr=0.1, momentum=0.9)
    return train(model, after=synchronized, optimizer=lambda _: part)


# Right programs: they round otherwise than one rank does, and nothing else.


@dataclass(frozen=True)
class Right:
    """A right program of `(seed)`, and its one rank, of `(seed)`."""

    step: Callable[[int], Record]
    right: Callable[..., Record]
    rounded_to: torch.dtype | None
    on: str


RIGHT: list[Right] = []


def right(
    one: Callable[..., Record] = one_rank,
    on: str = "simulated",
    rounded_to: torch.dtype | None = None,
    **options: Any,
) -> Callable[[Any], Any]:
    """Add a right program; `options` are those of `one`, its step on one rank."""

    def add(step: Any) -> Any:
        RIGHT.append(Right(step, partial(one, **options), rounded_to, on))
        return step

    return add


@right(steps=3)
def ddp(seed: int) -> Record:
    return train(DistributedDataParallel(mlp(), bucket_cap_mb=0.0005), seed, steps=3)


@right(steps=3)
def flat_bucket_and_accumulation(seed: int) -> Record:
    return train(mlp(), seed, after=synchronized, micro=2, steps=3)


@right(steps=3, optimizer=adam)
def zero_2(seed: int) -> Record:
    def sharded(model: nn.Module) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW
        return ShardedOptimizer(model.parameters(), kind, gradients="sharded", lr=0.01)

    return train(mlp(), seed, optimizer=sharded, steps=3)


@right(on="cpu", steps=3, optimizer=adam)
def pytorch_fully_sharded(seed: int) -> Record:
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    return train(model, seed, optimizer=adam, steps=3)


@right(steps=3, make=Whole)
def tensor_parallel_block(seed: int) -> Record:
    return train(Parallel(), data=partial(batch, seed=seed), steps=3)


@right(make=AlongTheSequence)
def sequence_parallel(seed: int) -> Record:
    return _sequence(sum_partial_gradients, seed)


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)]
    return nn.Sequential(*layers, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


@right(make=deep, steps=2)
def pipeline(seed: int) -> Record:
    world_size = dist.get_world_size()
    schedule = one_forward_one_backward(world_size, micro_batches=4)
    model = Pipeline(split_layers(deep(), world_size), mse_loss, schedule)
    with record(model, optimizer := sgd(model)) as recorded:
        for step in range(2):
            optimizer.zero_grad()
            model.step(*batch(step, B, seed))
            optimizer.step()
    return recorded


@right(steps=3, dtype=torch.bfloat16)
def bfloat16(seed: int) -> Record:
    model = DistributedDataParallel(mlp().bfloat16())
    return train(model, seed, steps=3, dtype=torch.bfloat16)


class InBfloat16(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            rounded = {name: param.bfloat16() for name, param in layer.named_parameters()}
            x = functional_call(layer, rounded, x)
        return x


@right(steps=2, rounded_to=torch.bfloat16)
def master_weights_in_float32(seed: int) -> Record:
    model = DistributedDataParallel(InBfloat16(*mlp()))
    return train(model, seed, steps=2, dtype=torch.bfloat16)


def _thirteen_rows(seed: int) -> Record:
    return train(
        mlp(),
        data=lambda step: own_batch(step, 13, seed),
        loss=lambda model, x, y: squared(model, x, y) * len(x) / 13,
        after=summed if dist.is_initialized() else nothing,
        steps=2,
    )


@right(_thirteen_rows)
def unequal_batches_with_weights(seed: int) -> Record:
    return _thirteen_rows(seed)


@right(make=Dropped, steps=2)
def dropout_with_seeds_of_their_own(seed: int) -> Record:
    model = DistributedDataParallel(Dropped())
    torch.manual_seed(100 * seed + dist.get_rank())
    return train(model, seed, steps=2)


@right(steps=2, clip=0.05)
def clipped_by_the_global_norm(seed: int) -> Record:
    def clip(model: nn.Module) -> None:
        squares = squared_norm(model)
        dist.all_reduce(squares)
        scaled(model, torch.clamp(0.05 / (squares.sqrt() + 1e-6), max=1.0))

    return train(FullyShardedDataParallel(mlp()), seed, after=clip, steps=2)


# Right programs whose models return other things than one row of dimension 0 for each example.

TOKENS, VOCABULARY = 5, 11


@dataclass(frozen=True)
class Shaped:
    """A model that is called as ``model(*batch)``, the loss in what it returns, and its batch."""

    make: Callable[[], nn.Module]
    loss: Callable[[Any], Tensor]
    batch: Callable[..., Sequence[Tensor]] = batch
    dim: int = 0

    def train(
        self,
        seed: int = 0,
        strided: bool = False,
        micro: int = 1,
        sync: Callable[[nn.Module], None] = synchronized,
    ) -> Record:
        rank, world_size = rank_and_size()
        rows = torch.arange(B)
        rows = rows[rank::world_size] if strided else shard(rows, world_size, rank)
        return train(
            self.make(),
            data=lambda step: [t.index_select(self.dim, rows) for t in self.batch(step, B, seed)],
            loss=lambda model, *parts: self.loss(model(*parts)),
            after=sync if dist.is_initialized() else nothing,
            steps=2,
            micro=micro,
            dim=self.dim,
        )


def tokens(step: int = 0, rows: int = B, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1000 * seed + 200 + step)
    text = torch.randint(0, VOCABULARY, (rows, TOKENS + 1), generator=random)
    return text[:, :-1], text[:, 1:]


def sequences(step: int = 0, rows: int = B, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return sequences in dimension 0, and the batch in dimension 1."""
    random = torch.Generator().manual_seed(1000 * seed + 300 + step)
    return torch.randn(TOKENS, rows, 8, generator=random), torch.randn(1, rows, 4, generator=random)


class Language(nn.Module):
    """Tokens are flattened to (B·T, …), and the loss is returned with the logits, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = torch.tanh(self.mix(self.embed(x))).cumsum(1)
        logits = self.head(self.norm(hidden.flatten(0, 1)))
        loss = cross_entropy(logits, y.flatten())
        return {"logits": logits.view(*x.shape, -1), "loss": loss, "norm": logits.norm()}


class Recurrent(nn.Module):
    """h_n and c_n of an LSTM have shape (layers, B, …)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(8, 6, num_layers=2, dropout=0.5)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        outputs, (last, _) = self.lstm(x)
        output = self.out(last[-1])
        return outputs, output, mse_loss(output, y.view_as(output))


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
    "logits_and_loss": Shaped(Language, lambda out: out["loss"], tokens),
    "recurrent": Shaped(Recurrent, lambda out: out[2], sequences, dim=1),
    "rows_sent_to_experts": Shaped(Experts, lambda out: out),
}


def _register(name: str, shaped: Shaped, **options: Any) -> None:
    def step(seed: int) -> Record:
        return shaped.train(seed, **options)

    step.__name__ = name
    right(shaped.train)(step)


for _name, _shaped in SHAPED.items():
    _register(_name, _shaped)
    _register(f"{_name}_strided", _shaped, strided=True, micro=2)


class TermOfASum(nn.Module):
    """A layer of its own holds a term of a sum, which the layer around it adds up."""

    def __init__(self) -> None:
        super().__init__()
        rank, world_size = rank_and_size()
        torch.manual_seed(0)
        enter, leave = nn.Linear(8, 12), nn.Linear(12, 4, bias=False)
        self.enter = nn.Linear(8, 12 // world_size)
        self.leave = nn.Linear(12 // world_size, 4, bias=False)
        with torch.no_grad():
            self.enter.weight.copy_(shard(enter.weight, world_size, rank))
            self.enter.bias.copy_(shard(enter.bias, world_size, rank))
            self.leave.weight.copy_(shard(leave.weight.T.contiguous(), world_size, rank).T)
        self.reduce = reduce_from_ranks if world_size > 1 else lambda term: term

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.leave(torch.tanh(self.enter(x))))


@right(make=TermOfASum, steps=2)
def a_term_of_a_sum_in_a_layer(seed: int) -> Record:
    return train(TermOfASum(), data=partial(batch, seed=seed), steps=2)
