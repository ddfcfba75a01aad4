"""The ways to train: each of the course's algorithms as one step, in one registry.

`prepare(model, make_optimizer, backward)` sets up one rank, and returns its step: a function that
takes a batch and returns what `backward` does. All communication is imported; this module only
combines it:

    per parameter, flat       all-reduces after backward                 gradient_sync
    overlap                   all-reduces during backward                DistributedDataParallel
    8 bits, top-k, …          the same buckets, compressed               compression_hook
    local SGD, DiLoCo         a mean of the weights every 8 steps        local_sgd
    gossip                    a mean with one or two others' weights     Gossip
    1-bit Adam                momenta in one bit, after exact steps      OneBitAdam
    ZeRO-1, 2, 3              shards of state, gradients, weights        ShardedOptimizer, FSDP
    tensor, data × …          parts of the matrices, of the layers       mesh, Pipeline

`who_wins` races some of these steps on a problem of its own. A server needs one rank more, and its
workers do not take steps together: see `row`.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.compression import (
    CompressionState,
    Compressor,
    ErrorFeedback,
    OneBit,
    PowerSGD,
    TopK,
    Uniform8Bit,
    compression_hook,
)
from course_lib.ddp import DistributedDataParallel
from course_lib.decentralized import Gossip, Mixing, one_peer_mixing, ring_mixing
from course_lib.fully_sharded import FullyShardedDataParallel
from course_lib.gradient_sync import sync_flat, sync_per_parameter
from course_lib.local_sgd import DiLoCo, LocalSGD
from course_lib.mesh import average_gradients, batch_of, divide_tensors, make_mesh, next_word_loss
from course_lib.pipeline_parallel import Pipeline, one_forward_one_backward, split_layers
from course_lib.running_model.one_bit_adam import OneBitAdam
from course_lib.running_model.problem import WORLD_SIZE
from course_lib.sharded_optimizer import ShardedOptimizer

Optimize = Callable[[Iterable[Tensor]], Optimizer]
"""Makes an optimizer of parameters."""
Backward = Callable[[Callable[[Tensor], Tensor], Any], Any]
"""Computes the gradient of a batch with a model, or with what wraps it; returns the loss."""
Step = Callable[[Any], Any]
Prepare = Callable[[nn.Module, Optimize, Backward], Step]

BUCKET_MB = 50_000 / 2**20
"""MiB in a bucket: four buckets of 50 kB. DDP's default of 25 MiB would be one."""
EVERY = 8
"""Steps between two averages of local SGD, and between two outer steps of DiLoCo."""
EXACT_STEPS = 10
"""Steps of 1-bit Adam before it compresses, about a sixth of those to the target."""


def _step(
    optimizer: Optimizer | LocalSGD | DiLoCo | OneBitAdam,
    backward: Callable[[Any], Any],
    after_backward: Callable[[], object] = lambda: None,
    beside: AbstractContextManager[Any] | None = None,
) -> Step:
    """Return a step: clear the gradients, compute new ones (`beside` communication), update."""
    inner = optimizer if isinstance(optimizer, Optimizer) else optimizer.optimizer

    def step(batch: Any) -> Any:
        inner.zero_grad()
        with beside or nullcontext():
            loss = backward(batch)
        after_backward()
        optimizer.step()
        return loss

    return step


def one_rank(model: nn.Module, make_optimizer: Optimize, backward: Backward) -> Step:
    """Train alone."""
    return _step(make_optimizer(model.parameters()), lambda batch: backward(model, batch))


def synchronized(synchronize: Callable[[Iterable[Tensor]], object]) -> Prepare:
    """Average the gradients after backward, by `synchronize(parameters)`."""

    def prepare(model: nn.Module, make_optimizer: Optimize, backward: Backward) -> Step:
        optimizer = make_optimizer(model.parameters())
        return _step(
            optimizer, lambda batch: backward(model, batch), lambda: synchronize(model.parameters())
        )

    return prepare


def overlapped(
    bucket_cap_mb: float = BUCKET_MB, compressor: Callable[[], Compressor] | None = None
) -> Prepare:
    """Average the gradients in buckets, during backward; compressed, if there is a compressor."""

    def prepare(model: nn.Module, make_optimizer: Optimize, backward: Backward) -> Step:
        # The replicas are equal from the start, so DDP's first broadcast is skipped.
        wrapped = DistributedDataParallel(model, bucket_cap_mb, bucket_cap_mb, init_sync=False)
        if compressor is not None:
            wrapped.register_comm_hook(CompressionState(compressor()), compression_hook)
        optimizer = make_optimizer(model.parameters())
        return _step(optimizer, lambda batch: backward(wrapped, batch))

    return prepare


def averaged(meeting: type[LocalSGD] | type[DiLoCo], every: int = EVERY) -> Prepare:
    """Train alone, and average the weights every few steps."""

    def prepare(model: nn.Module, make_optimizer: Optimize, backward: Backward) -> Step:
        optimizer = meeting(make_optimizer(model.parameters()), every)
        return _step(optimizer, lambda batch: backward(model, batch))

    return prepare


def one_bit_adam(exact_steps: int = EXACT_STEPS) -> Prepare:
    """Average the gradients exactly at first, and then the momenta in one bit."""

    def prepare(model: nn.Module, make_optimizer: Optimize, backward: Backward) -> Step:
        optimizer = OneBitAdam(make_optimizer(model.parameters()), exact_steps)
        return _step(optimizer, lambda batch: backward(model, batch))

    return prepare


def gossip(mixing: Callable[[int], Mixing] = ring_mixing, *, after_update: bool = False) -> Prepare:
    """Mix the weights with others' while the gradient is computed, or after the update.

    `mixing` is a function of the number of ranks.
    """

    def prepare(model: nn.Module, make_optimizer: Optimize, backward: Backward) -> Step:
        optimizer = make_optimizer(model.parameters())
        mixer = Gossip(optimizer, mixing(dist.get_world_size()))
        if not after_update:
            return _step(optimizer, lambda batch: backward(model, batch), beside=mixer)
        alone = _step(optimizer, lambda batch: backward(model, batch))

        def step(batch: Any) -> Any:
            loss = alone(batch)
            with mixer:
                return loss

        return step

    return prepare


def _sharded_optimizer(**options: Any) -> Prepare:
    def prepare(model: nn.Module, make_optimizer: Optimize, backward: Backward) -> Step:
        # It calls what it is given as a class: with parameters, and again with its own pieces.
        optimizer = ShardedOptimizer(model.parameters(), make_optimizer, **options)  # type: ignore[arg-type]
        return _step(optimizer, lambda batch: backward(model, batch))

    return prepare


def _fully_sharded(model: nn.Module, make_optimizer: Optimize, backward: Backward) -> Step:
    wrapped = FullyShardedDataParallel(model)
    optimizer = make_optimizer(wrapped.parameters())
    return _step(optimizer, lambda batch: backward(wrapped, batch))


def _on_mesh(micro_batches: int = 1, **sizes: int) -> Prepare:
    def prepare(model: nn.Module, make_optimizer: Optimize, backward: Backward) -> Step:
        mesh = make_mesh(**sizes)
        divide_tensors(model, mesh["tensor"])
        if "pipeline" not in sizes:
            optimizer = make_optimizer(model.parameters())
            return _step(
                optimizer,
                lambda batch: backward(model, batch_of(batch, mesh)),
                lambda: average_gradients(model, mesh),
            )
        assert isinstance(model, nn.Sequential)
        stages = split_layers(model, sizes["pipeline"])
        schedule = one_forward_one_backward(len(stages), micro_batches)
        pipeline = Pipeline(stages, next_word_loss, schedule, group=mesh["pipeline"])

        def pass_through(batch: Tensor) -> Tensor | None:
            rows = batch_of(batch, mesh)
            return pipeline.step(rows[:, :-1], rows[:, 1:])

        optimizer = make_optimizer(pipeline.parameters())
        return _step(optimizer, pass_through, lambda: average_gradients(pipeline, mesh))

    return prepare


class Way(NamedTuple):
    """One way to train the running model.

    Attributes:
        prepare: see the module; None if a server keeps the weights.
        like: the way with the same weights after every step: its steps to the target count here.
        world_size: the number of ranks.
        whole_batch: whether each rank gets the whole batch, and cuts it itself.
        stage: the ZeRO stage; 0 if nothing is sharded.
        period: steps after which the pattern of messages repeats.
        warm_up: steps before the pattern begins; DDP cuts its buckets anew after the first.
        wait_for: how many gradients a server waits for; None: it does not wait.

    """

    prepare: Prepare | None
    like: str = ""
    world_size: int = WORLD_SIZE
    whole_batch: bool = False
    stage: int = 0
    period: int = 1
    warm_up: int = 2
    wait_for: int | None = None


def _mesh(micro_batches: int = 1, **sizes: int) -> Way:
    return Way(_on_mesh(micro_batches, **sizes), "one rank", whole_batch=True)


WAYS: dict[str, Way] = {
    "one rank": Way(one_rank, world_size=1),
    "per parameter": Way(synchronized(sync_per_parameter), "one rank"),
    "flat": Way(synchronized(sync_flat), "one rank"),
    "overlap": Way(overlapped(), "one rank"),
    "8 bits": Way(overlapped(compressor=Uniform8Bit)),
    "top-k 3 %": Way(overlapped(compressor=lambda: ErrorFeedback(TopK(0.03)))),
    "1 bit": Way(overlapped(compressor=lambda: ErrorFeedback(OneBit()))),
    "1-bit Adam": Way(one_bit_adam(), warm_up=EXACT_STEPS),
    "PowerSGD": Way(overlapped(compressor=lambda: ErrorFeedback(PowerSGD(2)))),
    "server, waits": Way(None, "one rank", world_size=WORLD_SIZE + 1, wait_for=WORLD_SIZE),
    "server": Way(None, world_size=WORLD_SIZE + 1, period=EVERY),
    "local SGD": Way(averaged(LocalSGD), period=EVERY),
    "one average": Way(one_rank),
    "DiLoCo": Way(averaged(DiLoCo), period=EVERY),
    "gossip": Way(gossip()),
    "gossip, one peer": Way(gossip(one_peer_mixing), period=2),
    "gossip after": Way(gossip(after_update=True)),
    "ZeRO-1": Way(_sharded_optimizer(gradients="local"), "one rank", stage=1),
    "ZeRO-2": Way(
        _sharded_optimizer(gradients="sharded", bucket_cap_mb=BUCKET_MB), "one rank", stage=2
    ),
    "ZeRO-3": Way(_fully_sharded, "one rank", stage=3),
    "tensor 4": _mesh(tensor=4),
    "data 2 × tensor 2": _mesh(data=2, tensor=2),
    "data 2 × pipeline 2": _mesh(4, data=2, pipeline=2),
    "pipeline 4": _mesh(4, pipeline=4),
}
"""The ways by name, in the order in which the lectures explain them."""
