"""Gradient synchronisation: three ways to average gradients over the ranks after backward.

    >>> from course_lib.gradient_sync import sync_bucketed
    >>> loss_fn(model(x), y).backward()
    >>> sync_bucketed(model.parameters())  # every rank's .grad is then the mean

Every rank has computed the gradients g_k of its own shard of the batch. Replicas stay equal if all
take their step with the mean, 1/K * sum_k g_k. With D parameters of b bytes each, in P tensors, a
latency of α s and a bandwidth of β bytes/s, rings take

    sync_per_parameter   P all-reduces                       2(K-1) (P α + D b/(Kβ))
    sync_flat            1, of a copy of all gradients       2(K-1) (α + D b/(Kβ))
    sync_bucketed        about D b / cap, of copies          between the two

All three are blocking: communication begins when backward is over, and the GPU is idle meanwhile.
`ddp` works like `sync_bucketed`, but starts each bucket during backward.

The gradients are divided by K *before* the sum: in float16 the sum of K gradients could overflow
even if their mean does not. The all-reduce may be any of `collectives`, such as `ring_all_reduce`.

All ranks must make the same calls on the same tensors, or they would wait for one another. So if a
parameter's gradient is None on this rank, because the loss does not depend on it, the gradient
counts as zero, and is a tensor afterwards. Parameters that need no gradient (frozen) are left out.
Sparse gradients are refused with a TypeError, and gradients with a graph (`create_graph=True`)
with a RuntimeError.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from course_lib.bucketing import Bucket, assign_buckets
from course_lib.collectives import AllReduce, Group, library_all_reduce, place_in
from course_lib.sgd import LossFunction


@torch.no_grad()
def sync_per_parameter(
    params: Iterable[Tensor], group: Group = None, all_reduce: AllReduce = library_all_reduce
) -> None:
    """Replace every gradient by its mean over the ranks, one all-reduce per parameter.

    It works in place; None becomes zeros first (see the module). It is slow for models of many
    small tensors, because each pays the latency. Raises ValueError on a rank outside `group`.
    """
    _, world_size = place_in(group)
    for param in _trained(params):
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        param.grad.mul_(1 / world_size)
        all_reduce(param.grad, group)


@torch.no_grad()
def sync_flat(
    params: Iterable[Tensor], group: Group = None, all_reduce: AllReduce = library_all_reduce
) -> None:
    """Replace every gradient by its mean over the ranks, one all-reduce for all of them.

    (One for each dtype and device that occurs.) The gradients are copied one after the other into a
    vector. Afterwards they *are* views into it, so nothing is copied back. Raises ValueError on a
    rank outside `group`.
    """
    sync_bucketed(params, float("inf"), float("inf"), group, all_reduce)


@torch.no_grad()
def sync_bucketed(
    params: Iterable[Tensor],
    bucket_cap_mb: float = 25,
    first_bucket_mb: float = 1,
    group: Group = None,
    all_reduce: AllReduce = library_all_reduce,
) -> None:
    """Replace every gradient by its mean over the ranks, one all-reduce per bucket.

    `assign_buckets` makes the buckets, with caps in MiB; gradients are views into them afterwards.
    Without overlap, buckets only limit the extra memory: a gradient is freed as soon as it has been
    copied. Raises ValueError on a rank outside `group`, and as `assign_buckets`.
    """
    _, world_size = place_in(group)
    trained = _trained(params)
    for indices in assign_buckets(trained, bucket_cap_mb, first_bucket_mb):
        bucket = Bucket(trained, indices)
        for index, view in zip(indices, bucket.views, strict=True):
            copy_scaled(trained[index].grad, 1 / world_size, view)
            trained[index].grad = view
        all_reduce(bucket.buffer, group)


def data_parallel_step(
    model: nn.Module, loss_fn: LossFunction, x: Tensor, y: Tensor, lr: float, group: Group = None
) -> float:
    """Take one SGD step on the rows of all ranks; return the mean loss over all rows.

    Each rank calls it with an equal replica of the model and with its own rows `x`, `y`, at least
    one; `loss_fn` is a mean over rows. With B_k rows on rank k and B = Σ_k B_k,

        w ← w - lr Σ_k B_k/B g_k        so a rank counts as much as it has rows

    It takes an all-reduce for each parameter, and one for the loss and the count.
    """
    model.zero_grad()
    total = loss_fn(model(x), y) * len(x)
    total.backward()  # type: ignore[no-untyped-call]
    sums = torch.stack([total.detach().double(), total.new_tensor(len(x), dtype=torch.float64)])
    library_all_reduce(sums, group)
    with torch.no_grad():
        for param in _trained(model.parameters()):
            assert param.grad is not None
            library_all_reduce(param.grad, group)
            param -= lr / sums[1] * param.grad
    return float(sums[0] / sums[1])


def copy_scaled(gradient: Tensor | None, factor: float, view: Tensor) -> None:
    """Write factor * gradient to `view`, of its shape and dtype, in one pass; None gives zeros."""
    if gradient is None:
        view.zero_()
    elif factor == 1:
        view.copy_(gradient)
    else:
        torch.mul(gradient, factor, out=view)


def verify_first_order(gradient: Tensor, name: str = "a parameter") -> None:
    """Raise RuntimeError if `gradient` has a graph, as after `backward(create_graph=True)`.

    The mean over the ranks would not have it, so a backward through the mean would silently lack
    the second derivatives.
    """
    if gradient.requires_grad:
        raise RuntimeError(
            f"the gradient of {name} has a graph, as after backward(create_graph=True), but the "
            "average over the ranks would not have one. Compute a loss of gradients with "
            "torch.autograd.grad(loss, params, create_graph=True), and call backward() for the sum "
            "of all losses"
        )


def _trained(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that need gradients, each once: a tied one is in several modules."""
    trained = list(dict.fromkeys(param for param in params if param.requires_grad))
    gradients = [param.grad for param in trained if param.grad is not None]
    if any(gradient.is_sparse for gradient in gradients):
        raise TypeError("gradients must be dense: use nn.Embedding(…, sparse=False)")
    for gradient in gradients:
        verify_first_order(gradient)
    return trained
