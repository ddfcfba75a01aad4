"""Replicas: data parallelism in one process, without a communication library.

    >>> from course_lib.replicas import data_parallel_step, replicate
    >>> replicas = replicate(model, ["cpu"] * 4)
    >>> loss = data_parallel_step(replicas, loss_fn, x, y, lr=0.1)

The gradient of a batch is a mean over its B examples, so it can be computed in K pieces. With B_k
examples in shard k and g_k the mean gradient over that shard,

    1/B * sum_{i in batch} ∇f_i  =  sum_k B_k/B * g_k        B = B_1 + … + B_K

Each GPU holds a *replica* of the model and computes g_k from its own shard. Then all replicas take
the same step with the average. If they start equal, they stay equal, and take the same steps as one
machine with batch size B: data parallelism changes where the work is done, not the result.

The weights B_k/B matter. If K divides B they are all 1/K, and the plain average is right. If it
does not, the plain average gives more weight to the examples of a smaller shard. For B = 5 on
K = 2, the shards hold 3 and 2 examples, which count with 1/6 and 1/4 instead of 1/5.

A quantity that is *not* a sum over examples cannot be split like this. Batch normalization uses the
mean and variance of the batch, but a replica sees only its shard. The result is a different (not
necessarily worse) algorithm, and the running statistics of the replicas drift apart. Dropout draws
different masks.

Here the average is taken *centrally*: the CPU fetches K gradients and sends K copies back, so it
moves 2KD numbers for D parameters and is the bottleneck as K grows. All-reduce removes this
bottleneck. The scheme is as old as distributed deep learning: J. Dean et al., "Large Scale
Distributed Deep Networks", NeurIPS 2012; `torch.nn.DataParallel` is today's one-process form.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from course_lib.sgd import LossFunction, sgd_step
from course_lib.sharding import shard_bounds


def replicate(model: nn.Module, devices: Sequence[torch.device | str]) -> list[nn.Module]:
    """Return one deep copy of `model` on each of `devices`; `model` itself is not among them.

    A device may occur several times: `["cpu"] * 4` gives four replicas on a laptop. Parameters,
    buffers and train/eval mode are copied, gradients are not; tied parameters stay tied.

    Raises ValueError if there are no devices.
    """
    if not devices:
        raise ValueError('no devices: give one for each replica, such as ["cpu"] * 4')
    return [copy.deepcopy(model).to(device) for device in devices]


def data_parallel_gradients(
    replicas: Sequence[nn.Module], loss_fn: LossFunction, x: Tensor, y: Tensor
) -> float:
    """Leave the batch's mean gradient in `.grad` of every replica; return the batch's mean loss.

    The batch `x`, `y` (both B long, on any device) is cut by `shard_bounds` over the replicas. Each
    replica runs forward and backward on its own shard, and the results are averaged with weights
    B_k/B. A replica whose shard is empty (B < K) runs nothing, has weight 0, and gets the same
    average.

    `loss_fn` must return the mean over its examples. For models that treat examples independently,
    the gradient equals `batch_gradient` of the whole batch, up to rounding.

    Raises ValueError if the batch is empty, x and y differ in length, or there are no replicas.
    """
    if not replicas:
        raise ValueError("no replicas: make some with replicate(model, devices)")
    if len(x) != len(y) or len(x) == 0:
        raise ValueError(
            f"x holds {len(x)} examples and y {len(y)}: a batch needs one target for each "
            "example, and at least one example"
        )
    weights: list[float] = []
    losses: list[tuple[float, Tensor]] = []
    for rank, replica in enumerate(replicas):
        start, stop = shard_bounds(len(x), len(replicas), rank)
        weight = (stop - start) / len(x)
        weights.append(weight)
        replica.zero_grad()
        if start == stop:
            continue  # the mean over no examples would be 0/0
        device = next(replica.parameters()).device
        shard_x = x[start:stop].to(device, non_blocking=True)
        shard_y = y[start:stop].to(device, non_blocking=True)
        loss = loss_fn(replica(shard_x), shard_y)
        loss.backward()  # type: ignore[no-untyped-call]
        # Leave it on its device: reading it here would make GPU k + 1 wait until GPU k is done.
        losses.append((weight, loss.detach()))
    average_gradients(replicas, weights)
    return sum(weight * loss.item() for weight, loss in losses)


def average_gradients(replicas: Sequence[nn.Module], weights: Sequence[float]) -> None:
    """Replace each replica's gradients by sum_k weights[k] * g_k, added up on the CPU.

    Parameters are matched by their order. A gradient that is None counts as zero. If it is None in
    all replicas (a frozen or unused parameter), it stays None. The sum is computed once, in rank
    order, and copied to all replicas, so their gradients are equal bit for bit.

    Raises ValueError if there is not one weight for each replica, or a replica has fewer parameters
    than another.
    """
    if len(weights) != len(replicas):
        raise ValueError(
            f"there must be one weight for each of the {len(replicas)} replicas, got {len(weights)}"
        )
    for params in zip(*(replica.parameters() for replica in replicas), strict=True):
        if all(param.grad is None for param in params):
            continue
        average = torch.zeros_like(params[0], device="cpu")
        for param, weight in zip(params, weights, strict=True):
            if param.grad is not None:
                average.add_(param.grad.cpu(), alpha=weight)
        for param in params:
            # copy=True: two replicas on the CPU must not share one gradient tensor.
            param.grad = average.to(param.device, copy=True)


def data_parallel_step(
    replicas: Sequence[nn.Module], loss_fn: LossFunction, x: Tensor, y: Tensor, lr: float
) -> float:
    """Take one step of mini-batch SGD on all replicas with the batch `x`, `y` (B examples each).

    w ← w - α * sum_k B_k/B * g_k with α = `lr`. Returns the batch's mean loss before the step.
    Equal replicas stay equal, bit for bit if they are on devices of one kind. (A CPU and a GPU may
    round the same update differently in the last bit.)

    Raises ValueError as `data_parallel_gradients` does.
    """
    loss = data_parallel_gradients(replicas, loss_fn, x, y)
    for replica in replicas:
        sgd_step(replica.parameters(), lr)
    return loss
