"""Mini-batch SGD: the algorithm that the rest of the course divides over K GPUs.

    >>> from course_lib.sgd import train_epoch
    >>> losses = train_epoch(model, loss_fn, x, y, batch_size=32, lr=0.1)  # one per step

The model w is to minimise the mean loss over N examples, F(w) = 1/N * sum_i f_i(w). Gradient
descent needs all N gradients for one step. Mini-batch SGD takes a batch of B examples and steps
along *their* mean gradient, with learning rate α:

    g_B = 1/B * sum_{i in batch} ∇f_i(w)          w ← w - α * g_B

On average over all draws of a batch, g_B is the full gradient ∇F(w), but a single draw misses it.
With σ² = 1/N * sum_i |∇f_i - ∇F|², the spread of single gradients, the mean squared error of a
batch drawn *without replacement* is

    E |g_B - ∇F|² = σ²/B * (N - B)/(N - 1)

(W. G. Cochran, "Sampling Techniques", 3rd ed., 1977, theorem 2.2). The first factor is the reason
to pay for large batches: B times the work gives a B-th of the variance. The second factor is the
finite population correction: it is close to 1 if B << N, and 0 for B = N, because nothing is random
then. Drawing *with* replacement would give just σ²/B.

The sum over the batch is also what makes data parallelism possible: it can be cut into K partial
sums, computed on K GPUs, and added up. The step stays the same (`gradient_sync`).

H. Robbins and S. Monro, "A Stochastic Approximation Method", 1951; L. Bottou, F. E. Curtis and
J. Nocedal, "Optimization Methods for Large-Scale Machine Learning", 2018.
"""

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""`loss_fn(prediction, target)`: a scalar, the *mean* over the examples of the batch."""


def minibatches(
    n: int,
    batch_size: int,
    generator: torch.Generator | None = None,
    drop_last: bool = False,
    device: torch.device | str | None = None,
) -> Iterator[Tensor]:
    """Yield one epoch of batches: index tensors, int64 of shape (batch_size,).

    A new permutation of 0 … n-1 is cut into consecutive pieces. So sampling within an epoch is
    without replacement, and every index occurs exactly once. If batch_size does not divide n, the
    last batch is shorter, or left out with `drop_last=True`.

    The permutation is drawn on the generator's device (the CPU by default) and moved once to
    `device`. So the same seed gives the same batches on every device, and indexing data on a GPU
    does not wait for a copy at every batch.

    Raises ValueError if batch_size < 1 or n < 0.
    """
    if batch_size < 1 or n < 0:
        raise ValueError(
            f"n must be 0 or more and batch_size 1 or more; got n={n}, batch_size={batch_size}"
        )
    drawn_on = generator.device if generator is not None else "cpu"
    order = torch.randperm(n, generator=generator, device=drawn_on).to(device or drawn_on)
    end = n - n % batch_size if drop_last else n
    # Return a generator expression, so that a wrong batch_size is reported at the call.
    return (order[start : start + batch_size] for start in range(0, end, batch_size))


@torch.no_grad()
def sgd_step(params: Iterable[Tensor], lr: float) -> None:
    """Update in place, w ← w - α * g, with g from `.grad` and α = `lr`.

    The result is equal bit for bit to `torch.optim.SGD(params, lr)` without momentum or weight
    decay. Parameters whose `.grad` is None took no part in the loss and are not changed. Gradients
    are kept: clear them with `zero_grad` before the next backward pass, which adds to them.
    """
    for param in params:
        if param.grad is not None:
            # One multiply-add: computing (lr * grad) separately would round once more.
            param.add_(param.grad, alpha=-lr)


def batch_gradient(model: nn.Module, loss_fn: LossFunction, x: Tensor, y: Tensor) -> list[Tensor]:
    """Return g = 1/B * sum_i ∇f_i for the batch `x`, `y` of B examples, without touching `.grad`.

    The list has one tensor for each trained parameter, of its shape, in the order of
    `model.parameters()`; zeros if the loss does not depend on the parameter. `loss_fn` must return
    the mean over the batch.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    return list(torch.autograd.grad(loss_fn(model(x), y), trained, materialize_grads=True))


def accumulate_gradients(
    model: nn.Module, loss_fn: LossFunction, x: Tensor, y: Tensor, micro_batch_size: int
) -> float:
    """Put the gradient of the mean loss over the B rows `x`, `y` into `.grad`; return that loss.

    The rows are taken in their order, `micro_batch_size` at a time; the last micro-batch may be
    shorter. Memory holds the activations of one micro-batch only. With b_j rows in micro-batch j,
    whose mean gradient is g_j,

        g = sum_j b_j/B * g_j           so a micro-batch counts as much as it has rows

    Earlier gradients in `.grad` are cleared. `loss_fn` must return the mean over its rows.
    """
    model.zero_grad()
    total = 0.0
    for start in range(0, len(x), micro_batch_size):
        rows, targets = x[start : start + micro_batch_size], y[start : start + micro_batch_size]
        share = loss_fn(model(rows), targets) * len(rows) / len(x)
        share.backward()  # type: ignore[no-untyped-call]
        total += share.item()
    return total


def learning_rate(
    rows_seen: int, batch: int, peak: float, warmup_rows: int, total_rows: int
) -> float:
    """Return α of a step that takes `batch` rows after `rows_seen` earlier ones.

    α is a curve over rows: it rises over W rows, then falls along half a cosine until row R. A step
    reads it at row r, in the middle of its batch:

        r = rows_seen + batch/2
        r < W:        α = peak * r/W
        W <= r < R:   α = peak * (1 + cos(π (r - W)/(R - W)))/2
        R <= r:       α = 0

    W is `warmup_rows` and R `total_rows`, with 0 <= W <= R. All are rows of all ranks together, so
    K ranks of b rows have the `batch` K b, and the curve of one rank. A schedule in steps would be
    another curve for every K b.

    The middle keeps what a run does with its rows: the sum of batch * α over the steps is the area
    peak * R/2 for every batch that divides W and R, and nearly for others. Read where the batch
    begins, the first step would do nothing; where it ends, the last one.

    P. Goyal et al., "Accurate, Large Minibatch SGD", 2017; I. Loshchilov and F. Hutter, "SGDR",
    2017.
    """
    row = rows_seen + batch / 2
    if row >= total_rows:
        return 0.0
    if row < warmup_rows:
        return peak * row / warmup_rows
    angle = math.pi * (row - warmup_rows) / (total_rows - warmup_rows)
    return peak * (1 + math.cos(angle)) / 2


def train_epoch(
    model: nn.Module,
    loss_fn: LossFunction,
    x: Tensor,
    y: Tensor,
    batch_size: int,
    lr: float,
    generator: torch.Generator | None = None,
) -> list[float]:
    """Pass once over the N examples `x`, `y` (both N long), a step per batch; return the losses.

    `losses[i]` is batch i's mean loss *before* its step. The last batch may be shorter, but its
    step counts as much as the others, because the gradient is a mean. Earlier gradients in `.grad`
    are cleared.

    Raises ValueError if batch_size < 1.
    """
    losses = []
    for batch in minibatches(len(x), batch_size, generator, device=x.device):
        model.zero_grad()
        loss = loss_fn(model(x[batch]), y[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        sgd_step(model.parameters(), lr)
        losses.append(loss.detach())
    # Read the losses at the end: reading a number from a GPU waits for all work queued before it.
    return [loss.item() for loss in losses]


def gradient_spread(model: nn.Module, loss_fn: LossFunction, x: Tensor, y: Tensor) -> float:
    """Return σ² = 1/N * sum_i |∇f_i - ∇F|²: how much single examples disagree at the current w.

    This takes N + 1 backward passes for the N >= 1 examples `x`, `y`: one for each example, and one
    for ∇F.
    """
    full = batch_gradient(model, loss_fn, x, y)
    distances = []
    for i in range(len(x)):
        gradient = batch_gradient(model, loss_fn, x[i : i + 1], y[i : i + 1])
        distances.append(
            sum((g - c).double().square().sum() for g, c in zip(gradient, full, strict=True))
        )
    return float(sum(distances) / len(distances))


def gradient_variance(
    model: nn.Module,
    loss_fn: LossFunction,
    x: Tensor,
    y: Tensor,
    batch_size: int,
    num_batches: int,
    generator: torch.Generator,
) -> float:
    """Return the mean of |g_B - ∇F|² over random batches, at the current w.

    Each of the `num_batches` batches is drawn anew, without replacement, from all N rows `x`, `y`.
    `.grad` is not touched. On average over all draws, the result is σ²/B * (N - B)/(N - 1); see the
    module and `gradient_spread`.
    """
    full = batch_gradient(model, loss_fn, x, y)
    total = 0.0
    for _ in range(num_batches):
        rows = next(minibatches(len(x), batch_size, generator, device=x.device))
        drawn = batch_gradient(model, loss_fn, x[rows], y[rows])
        total += sum((g - f).square().sum().item() for g, f in zip(drawn, full, strict=True))
    return total / num_batches
