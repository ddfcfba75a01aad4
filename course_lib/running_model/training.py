"""Train the running model on one rank, in one way of the registry."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from course_lib.asynchronous import ParameterServer, serve
from course_lib.mesh import next_word_loss
from course_lib.running_model.problem import WORLD_SIZE, batches, new_model
from course_lib.running_model.ways import WAYS, Optimize, Way

Train = Callable[[int], Any]
"""`train(steps)`: what a rank runs; it returns its losses, or a tuple with its losses last."""
RATE = 1e-2
"""AdamW's learning rate where steps are measured; `steps` has the tuned one of each way."""


def backward(forward: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """Compute the gradient of a batch, (rows, length + 1); return its loss."""
    loss = next_word_loss(forward(batch[:, :-1]), batch[:, 1:])
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def train_one_way(
    name: str,
    steps: int,
    rate: float = RATE,
    seed: int = 0,
    after_step: Callable[[nn.Module], bool] = lambda model: False,
) -> list[Tensor]:
    """Train on this rank in one way of `WAYS`, with AdamW; return the losses of its rows.

    `after_step(model)` is called after every step, and says whether it was the last; on a server,
    which does not stop, after every `WORLD_SIZE` gradients.
    """

    def make_optimizer(params: Iterable[Tensor]) -> Optimizer:
        return AdamW(params, lr=rate)

    way, model = WAYS[name], new_model(seed)
    if way.prepare is None:
        return _train_with_server(way, steps, model, make_optimizer, seed, after_step)
    step = way.prepare(model, make_optimizer, backward)
    part = slice(None) if way.whole_batch else slice(dist.get_rank(), None, dist.get_world_size())
    losses = []
    for batch in islice(batches(seed), steps):
        losses.append(step(batch[part]))
        if after_step(model):
            break
    return [loss for loss in losses if loss is not None]


def _train_with_server(
    way: Way,
    steps: int,
    model: nn.Module,
    make_optimizer: Optimize,
    seed: int,
    after_step: Callable[[nn.Module], bool],
) -> list[Tensor]:
    """Rank 0 serves; each other rank computes gradients, of its part of each batch."""
    if dist.get_rank() == 0:
        updates_per_step = WORLD_SIZE if way.wait_for is None else 1

        def after_update(updates: int) -> None:
            if updates % updates_per_step == 0:
                after_step(model)

        serve(
            make_optimizer(model.parameters()),
            updates_per_step * steps,
            wait_for=way.wait_for,
            after_update=after_update,
        )
        return []
    rows = batches(seed)
    losses = []
    with ParameterServer(model.parameters()) as server:
        while server.pull():
            losses.append(backward(model, next(rows)[dist.get_rank() - 1 :: WORLD_SIZE]))
            server.push()
    return losses
