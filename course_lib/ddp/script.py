"""What a training script needs around DDP, by hand: right on every number of ranks.

    >>> from course_lib.ddp.script import train
    >>> losses = train(model, loss_fn, x, y, 0.1, 32, accumulate=4, epochs=range(3), seed=0)

Batches, accumulation, evaluation, a checkpoint, the mean over tokens. Nothing here wraps the model:
gradients are averaged after backward (`gradient_sync`), so that every message can be read in the
code. With DDP the same messages are sent during the last backward of a step.

The ranks compute the step that one process computes with all rows. Two rules are enough: every row
has the weight 1/B, where B counts the rows of *all* ranks; and the ranks start from equal states.
"""

from collections.abc import Iterable, Sequence
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler

from course_lib.collectives import Group, library_all_reduce, place_in
from course_lib.ddp.buffers import broadcast_module_states, broadcast_tensors
from course_lib.gradient_sync import sync_per_parameter
from course_lib.sgd import LossFunction, sgd_step
from course_lib.sharding import ShardedSampler, shard_bounds

UNLABELLED = -100
"""The label of a token that counts in no loss."""


def own_batches(
    length: int, batch_size: int, epoch: int, seed: int, group: Group = None
) -> list[list[int]]:
    """Return this rank's batches of row numbers of range(length) in an epoch; the last is short.

    All ranks have equally many rows: up to K - 1 rows occur twice.
    """
    rank, world_size = place_in(group)
    sampler = ShardedSampler(range(length), world_size, rank, seed=seed)
    sampler.set_epoch(epoch)
    return list(BatchSampler(sampler, batch_size, drop_last=False))


def train(
    model: nn.Module,
    loss_fn: LossFunction,
    x: Tensor,
    y: Tensor,
    lr: float,
    batch_size: int,
    accumulate: int,
    epochs: Iterable[int],
    seed: int,
    group: Group = None,
) -> list[float]:
    """Train with plain SGD, a step per window of `accumulate` batches; return the steps' losses.

    All ranks hold all rows `x`, `y`, and start from the states of the group's first rank. A window
    may be short at the end of an epoch. With B rows in a window, of all ranks together,

        w ← w - lr 1/B Σ_rows ∇f(w; row)
    """
    broadcast_module_states(model, 0, group)
    losses = []
    for epoch in epochs:
        batches = own_batches(len(x), batch_size, epoch, seed, group)
        for start in range(0, len(batches), accumulate):
            window = [(x[rows], y[rows]) for rows in batches[start : start + accumulate]]
            losses.append(_window_step(model, loss_fn, window, lr, group))
    return losses


def _window_step(
    model: nn.Module,
    loss_fn: LossFunction,
    window: Sequence[tuple[Tensor, Tensor]],
    lr: float,
    group: Group,
) -> float:
    rows = sum(len(x) for x, _ in window)  # the same on all ranks
    total = torch.zeros((), dtype=torch.float64, device=window[0][0].device)
    model.zero_grad()
    for x, y in window:
        loss = loss_fn(model(x), y) * (len(x) / rows)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    sync_per_parameter(model.parameters(), group)
    sgd_step(model.parameters(), lr)
    library_all_reduce(total, group)
    return total.item() / place_in(group)[1]


def evaluate(
    model: nn.Module,
    loss_fn: LossFunction,
    x: Tensor,
    y: Tensor,
    batch_size: int,
    group: Group = None,
) -> tuple[float, float]:
    """Return mean loss and accuracy over all rows `x`, `y`, which each rank holds.

    A rank's model sees its contiguous part of the rows, at most `batch_size` at once. Nothing is
    padded, so each row counts once, and a rank may have no rows.
    """
    rank, world_size = place_in(group)
    start, stop = shard_bounds(len(x), world_size, rank)
    sums = torch.zeros(2, dtype=torch.float64, device=x.device)
    training = model.training
    model.eval()
    with torch.no_grad():
        for first in range(start, stop, batch_size):
            rows = slice(first, min(first + batch_size, stop))
            outputs, labels = model(x[rows]), y[rows]
            sums[0] += loss_fn(outputs, labels) * len(labels)
            sums[1] += (outputs.argmax(1) == labels).sum()
    model.train(training)
    library_all_reduce(sums, group)
    loss, right = (sums / len(x)).tolist()
    return loss, right


def save_checkpoint(
    file: IO[bytes],
    ddp: nn.Module,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    group: Group = None,
) -> None:
    """Write the state of model and optimizer, and the next epoch, from the group's first rank.

    `ddp` wraps the model as ``ddp.module``. Nothing in the file depends on the number of ranks.
    """
    if place_in(group)[0] == 0:
        model = ddp.get_submodule("module").state_dict()
        torch.save({"model": model, "optimizer": optimizer.state_dict(), "epoch": epoch}, file)


def load_checkpoint(
    file: IO[bytes] | None, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group = None
) -> int:
    """Load what `save_checkpoint` wrote, on all ranks; return the epoch to begin with.

    Only the group's first rank has the `file`: its content is sent to the others.
    """
    content: list[Any] = [None if file is None else torch.load(file, weights_only=True)]
    dist.broadcast_object_list(content, group_src=0, group=group)
    (state,) = content
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["epoch"])


def token_mean_step(
    ddp: nn.Module, micro_batches: Sequence[tuple[Tensor, Tensor]], group: Group = None
) -> float:
    """Leave in ``.grad`` the gradient of the mean over all labels, clipped to norm 1.

    `micro_batches` are this rank's pairs of tokens, (rows, features), and labels, (rows,); a token
    that has no label is `UNLABELLED`. Returns the mean loss of the N labels of all ranks. Each loss
    is divided by N before backward: the sum of all gradients may be too large for float16.
    """
    _, world_size = place_in(group)
    counts = [(labels != UNLABELLED).sum() for _, labels in micro_batches]
    count = torch.stack(counts).sum()
    library_all_reduce(count, group)
    total = torch.zeros((), dtype=torch.float64, device=count.device)
    ddp.zero_grad()
    with ddp.no_sync():  # type: ignore[operator]
        for tokens, labels in micro_batches:
            loss = F.cross_entropy(ddp(tokens), labels, reduction="sum") * (world_size / int(count))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
    sync_per_parameter(ddp.parameters(), group)
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    library_all_reduce(total, group)
    return total.item() / world_size


def train_on_batches(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[tuple[Tensor, Tensor]],
    lr: float,
    group: Group = None,
) -> None:
    """Take one SGD step per batch, with the mean of the ranks' gradients.

    The ranks have equal weights, and equally many rows in a batch. A parameter that this rank's
    rows do not use has the gradient zero here.
    """
    for x, y in batches:
        model.zero_grad()
        loss_fn(model(x), y).backward()  # type: ignore[no-untyped-call]
        sync_per_parameter(model.parameters(), group)
        sgd_step(model.parameters(), lr)


def train_and_predict(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[tuple[Tensor, Tensor]],
    x_test: Tensor,
    lr: float,
    group: Group = None,
) -> Tensor:
    """Train as `train_on_batches`; then take the first rank's buffers, and predict for `x_test`.

    BatchNorm uses each rank's own rows in training, so its running means differ until they are
    broadcast. The predictions are those of evaluation mode.
    """
    train_on_batches(model, loss_fn, batches, lr, group)
    broadcast_tensors(list(model.buffers()), 0, group)
    training = model.training
    model.eval()
    with torch.no_grad():
        predicted: Tensor = model(x_test)
    model.train(training)
    return predicted
