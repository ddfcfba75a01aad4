"""One small transformer, trained in every way of the course, with one row of a table for each way.

    >>> from course_lib.running_model import measure, table
    >>> rows = [measure("one rank", steps=1), measure("data parallel", steps=1)]
    >>> print(table(rows))  # doctest: +ELLIPSIS
    way              ranks  ms a step  kB sent  kB state  kB saved    loss
    one rank             1 ...
    data parallel        4 ...

A lecture adds the rows of the ways that it explains. Model, data, global batch, optimizer and
network are the same in all rows. So a row shows what its way changes: the time of a step, the bytes
that a rank sends, the memory that it needs. The loss should change only by rounding, except with
8 bits, which change the sum itself.

The ranks are simulated, so times are virtual and the same on every machine. A device with 1 GFLOP/s
and links of 10 MB/s stand for a fast device and a fast network. Only the ratio matters: how long
the gradient travels (26 ms for a ring of four) compared with how long its computation takes.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from course_lib.compression import CompressionState, Uniform8Bit, compression_hook
from course_lib.ddp import DistributedDataParallel
from course_lib.fully_sharded import FullyShardedDataParallel
from course_lib.gradient_sync import sync_flat
from course_lib.mesh import Shape, divide_tensors, next_word_loss, transformer
from course_lib.ranks import Device, Network, Ranks, clock
from course_lib.sharded_optimizer import ShardedOptimizer, model_state_bytes
from course_lib.train.datasets import documentation_text

SHAPE = Shape(words=256, length=32, width=32, heads=4, hidden=128, layers=2)
"""42,880 weights, 171.5 kB of gradients; the words are the bytes of a text."""
ROWS = 16
"""Texts in a global batch, of `SHAPE.length` bytes each."""
WORLD_SIZE = 4
STEPS = 12
NETWORK = Network(latency=20e-6, bandwidth=10e6)
DEVICE = Device(flops=1e9, memory_bandwidth=2e9)
RATE = 3e-3
BUCKET_MB = 0.05


class Prepared(NamedTuple):
    """A way of training, prepared on one rank.

    Attributes:
        model: call it with tokens to get scores.
        optimizer: the optimizer of this rank's parameters.
        after_backward: called between backward and the optimizer's step.
        whole_batch: whether every rank computes with the whole batch instead of its part.
        stage: the ZeRO stage; 0 if nothing is sharded.

    """

    model: nn.Module
    optimizer: Optimizer
    after_backward: Callable[[], None] = lambda: None
    whole_batch: bool = False
    stage: int = 0


def _adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=RATE)


def _one_rank(model: nn.Module) -> Prepared:
    return Prepared(model, _adamw(model))


def _data_parallel(model: nn.Module) -> Prepared:
    return Prepared(model, _adamw(model), lambda: sync_flat(model.parameters()))


def _overlap(model: nn.Module) -> Prepared:
    return Prepared(DistributedDataParallel(model, BUCKET_MB), _adamw(model))


def _eight_bits(model: nn.Module) -> Prepared:
    wrapped = DistributedDataParallel(model, BUCKET_MB)
    wrapped.register_comm_hook(CompressionState(Uniform8Bit()), compression_hook)
    return Prepared(wrapped, _adamw(model))


def _zero_1(model: nn.Module) -> Prepared:
    sharded = ShardedOptimizer(model.parameters(), AdamW, gradients="local", lr=RATE)
    return Prepared(model, sharded, stage=1)


def _zero_2(model: nn.Module) -> Prepared:
    sharded = ShardedOptimizer(
        model.parameters(), AdamW, gradients="sharded", bucket_cap_mb=BUCKET_MB, lr=RATE
    )
    return Prepared(model, sharded, stage=2)


def _zero_3(model: nn.Module) -> Prepared:
    sharded = FullyShardedDataParallel(model)
    return Prepared(sharded, _adamw(sharded), stage=3)


def _tensor_parallel(model: nn.Module) -> Prepared:
    world = dist.group.WORLD
    assert world is not None
    divide_tensors(model, world)
    return Prepared(model, _adamw(model), whole_batch=True)


WAYS: dict[str, Callable[[nn.Module], Prepared]] = {
    "one rank": _one_rank,
    "data parallel": _data_parallel,
    "overlap": _overlap,
    "8 bits": _eight_bits,
    "ZeRO-1": _zero_1,
    "ZeRO-2": _zero_2,
    "ZeRO-3": _zero_3,
    "tensor parallel": _tensor_parallel,
}
"""The ways by name, in the order in which the lectures explain them."""


class Row(NamedTuple):
    """One row of the table.

    Attributes:
        way: its name in `WAYS`.
        ranks: how many ranks take a step together.
        step_ms: virtual milliseconds of the last step.
        sent: bytes that rank 0 sends in the last step.
        state: bytes of weights, gradients and AdamW's state on rank 0, *derived* from the number of
            weights by `model_state_bytes`.
        saved: bytes of activations that rank 0's forward saves for backward.
        loss: the loss over the global batch of the last step, in nats per byte.

    """

    way: str
    ranks: int
    step_ms: float
    sent: int
    state: int
    saved: int
    loss: float


_text = cache(documentation_text)


def batch_of(step: int) -> Tensor:
    """Return the global batch of a step: (ROWS, length + 1) bytes of Python's documentation."""
    length = SHAPE.length + 1
    text = _text()[step * ROWS * length :][: ROWS * length]
    return text.view(ROWS, length).long()


def measure(way: str, steps: int = STEPS) -> Row:
    """Train in one way for `steps`, on simulated ranks, and return its row.

    Raises ValueError if there is no such way.
    """
    if way not in WAYS:
        raise ValueError(f"way must be one of {', '.join(WAYS)}; got {way!r}")
    world_size = 1 if way == "one rank" else WORLD_SIZE
    batches = [batch_of(step) for step in range(steps)]
    torch.set_num_threads(1)
    with Ranks(world_size, on="simulated", network=NETWORK, device=DEVICE) as ranks:
        taken = ranks.run(_train, WAYS[way], batches)
        begin = taken[0].begin
        sent = ranks.trace.between(begin).bytes_sent(0)
    seconds = max(each.end for each in taken) - begin
    loss = sum(each.loss for each in taken) / world_size
    return Row(way, world_size, 1e3 * seconds, sent, taken[0].state, taken[0].saved, loss)


class _Taken(NamedTuple):
    """The measurements of a rank's last step."""

    begin: float
    end: float
    loss: float
    state: int
    saved: int


def _train(prepare: Callable[[nn.Module], Prepared], batches: Sequence[Tensor]) -> _Taken:
    torch.manual_seed(0)
    model = transformer(SHAPE)
    whole = sum(param.numel() for param in model.parameters())
    way = prepare(model)
    kept = whole if way.stage else sum(param.numel() for param in way.model.parameters())
    state = model_state_bytes(kept, dist.get_world_size(), way.stage, 4, 4, 8)
    rank, world_size = (0, 1) if way.whole_batch else (dist.get_rank(), dist.get_world_size())
    for batch in batches:
        mine = batch[rank::world_size]
        begin, saved = clock(), _Saved(way.model)
        way.optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor):
            loss = next_word_loss(way.model(mine[:, :-1]), mine[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        way.after_backward()
        way.optimizer.step()
    return _Taken(begin, clock(), loss.item(), round(state), saved.bytes)


class _Saved:
    """Counts the bytes that autograd saves: each piece of memory once, without weights.

    It keeps the pieces alive: otherwise a later piece could get the address of a freed one, and the
    two would look like one. ZeRO-3 frees gathered weights after use, so they count as nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = {param.untyped_storage()._cdata for param in model.parameters()}
        self._pieces: dict[int, torch.UntypedStorage] = {}

    def keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pieces[storage._cdata] = storage
        return tensor

    @property
    def bytes(self) -> int:
        return sum(p.nbytes() for at, p in self._pieces.items() if at not in self._weights)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, one line each, below a line of headings."""
    lines = ["way              ranks  ms a step  kB sent  kB state  kB saved    loss"]
    for row in rows:
        kilobytes = f"{row.sent / 1e3:7.0f}  {row.state / 1e3:8.0f}  {row.saved / 1e3:8.0f}"
        lines.append(
            f"{row.way:16} {row.ranks:5}  {row.step_ms:9.1f}  {kilobytes}  {row.loss:6.4f}"
        )
    return "\n".join(lines)
