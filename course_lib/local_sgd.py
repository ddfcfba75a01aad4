"""Local SGD: each rank takes many steps alone, then the ranks average their weights.

    >>> from course_lib.local_sgd import LocalSGD
    >>> local = LocalSGD(optimizer, every=10)
    >>> loss_fn(model(x), y).backward()
    >>> local.step()  # the optimizer's; every tenth time, also the mean over the ranks

K ranks each take H steps with their own gradients, and then average their *weights*. With an
average after every step (H = 1) and plain SGD, this is synchronous SGD, because the mean of
w - γ g_i is w - γ times the mean gradient. With larger H, bytes and messages fall to 1/H, and the
ranks drift apart between two averages.

`DiLoCo` does not jump to the mean. It uses the way to the mean as a gradient for a second, outer
optimizer:

    Δ = w̃ - 1/K Σ_i w_i         how far the ranks moved away from w̃ (pseudo-gradient)
    w̃ ← outer step with Δ        SGD with Nesterov momentum 0.9 and learning rate 0.7
    w_i ← w̃                      then H more steps of the inner optimizer, such as AdamW

With outer learning rate 1 and no momentum this is `LocalSGD`. `diloco` is the plain form.

*Streaming* (`fragments` > 1): the weights are cut into F fragments, which take turns, so at most
one fragment is on its way at a time. The total number of bytes stays the same, but the peak falls
to 1/F. With `overlap` = τ a fragment may travel for τ more inner steps. The ranks continue to
train, and move to the mean when it arrives: the changes of this fragment in those τ steps are lost.
(In the paper, the ranks can also go only a part α of the way.) `finish` waits for the last
fragment.

`OneStepDelay` keeps all replicas equal, but updates them one step late: the gradients of step t
travel during step t + 1, and all ranks apply their mean at its end: w_{t+1} = w_t - γ ḡ(w_{t-1}).

**Checkpoints.** Between two averages every rank has other weights. So a run that stops there and
goes on is the same only if *every* rank saves and loads its own three states: the model's, the
optimizer's and that of `LocalSGD` or `DiLoCo`.

S. U. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; A. Douillard et al.,
"DiLoCo: Distributed Low-Communication Training of Language Models", 2023 (arXiv 2311.08105), and
"Streaming DiLoCo with overlapping communication", 2025 (arXiv 2501.18512).
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from course_lib.collectives import Group, place_in
from course_lib.compression import Compressor, compressed_all_reduce
from course_lib.guard import rank_error
from course_lib.sharding import shard_bounds


class LocalSGD:
    """Averages the weights over the ranks every H steps.

    Args:
        optimizer: this rank's optimizer. Its state (momentum) stays local.
        every: H, steps between two averages.
        group: None for all ranks.
        module: the model. Its floating-point buffers, such as BatchNorm's running statistics, are
            averaged with the weights. Other buffers, such as the count of batches, stay each
            rank's own, and so do all buffers if it is None.

    Raises ValueError on a rank outside `group`.

    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        every: int,
        group: Group = None,
        module: nn.Module | None = None,
    ) -> None:
        place_in(group)
        self.optimizer = optimizer
        self.every = every
        self.group = group
        self.module = module
        self.steps = 0

    def step(self) -> None:
        """Take the optimizer's step; every H-th time, also average the weights."""
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.every == 0:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Replace the weights by their mean over the ranks. Call it at the end of training, too."""
        average([*trained(self.optimizer), *statistics(self.module)], self.group)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the optimizer's state and the number of steps, of this rank."""
        return {"optimizer": copy.deepcopy(self.optimizer.state_dict()), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from this rank's `state_dict`, also between two averages."""
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.steps = state["steps"]


class DiLoCo:
    """Takes inner steps on each rank alone and outer steps together, fragment by fragment.

    If the weights of one rank are not finite, neither is the mean change. Then all ranks drop it,
    with a warning, and go on from the weights w̃ of the last outer step. Otherwise the momentum
    would never be finite again.

    Args:
        optimizer: the inner optimizer, for example AdamW. Its state stays local. Its weights and
            the buffers of `module` must be equal on all ranks at first, which is not checked: see
            `course_lib.ddp.broadcast_module_states`.
        every: H, inner steps between two outer steps of a fragment; a multiple of `fragments`.
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: its Nesterov momentum.
        fragments: F, the number of parts that take turns, H/F steps apart.
        overlap: τ, inner steps that a fragment's mean may take to arrive; fewer than H/F.
        compressor: compresses the pseudo-gradients, such as ``ErrorFeedback(TopK(0.03))``; None
            sends them uncompressed. It cannot be used with `overlap`.
        group: None for all ranks.
        module: as for `LocalSGD`. Its buffers are averaged in every outer step, uncompressed.

    Raises ValueError for arguments that do not fit, and on a rank outside `group`. `step` raises
    RuntimeError if a parameter group was added to the optimizer.

    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
        overlap: int = 0,
        compressor: Compressor | None = None,
        group: Group = None,
        module: nn.Module | None = None,
    ) -> None:
        if every % fragments:
            raise ValueError(f"every={every} must be a multiple of fragments={fragments}")
        if not 0 <= overlap < every // fragments:
            raise ValueError(
                f"overlap={overlap} must be 0 to {every // fragments - 1}: a fragment must arrive "
                f"before the next one leaves, {every // fragments} steps later"
            )
        if overlap and compressor is not None:
            raise ValueError(
                "overlap must be 0 with a compressor: a compressed exchange has two rounds"
            )
        _, self.world_size = place_in(group)
        self.optimizer = optimizer
        self.every = every
        self.overlap = overlap
        self.compressor = compressor
        self.group = group
        self.module = module
        self.params = trained(optimizer)
        self.steps = 0
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.global_weights = flatten(self.params)
        self.global_statistics = flatten(statistics(module))
        self.momentum = torch.zeros_like(self.global_weights)
        numel = self.global_weights.numel()
        self._cuts = [shard_bounds(numel, fragments, i) for i in range(fragments)]
        self._flight: tuple[int, int, Tensor] | None = None
        self._work: dist.Work | None = None

    @torch.no_grad()
    def step(self) -> None:
        """Take the inner optimizer's step, and the outer step of a fragment whose turn it is."""
        if list(map(id, trained(self.optimizer))) != list(map(id, self.params)):
            raise rank_error(
                "the optimizer has other parameters than those whose common weights DiLoCo keeps",
                "After add_param_group, make a new DiLoCo of this optimizer, on all ranks.",
            )
        self.optimizer.step()
        self.steps += 1
        between = self.every // len(self._cuts)
        if self.steps % between == 0:
            self._send((self.steps // between - 1) % len(self._cuts))
        if self.steps % between == self.overlap:
            self.finish()

    def _send(self, index: int) -> None:
        """Begin to average the pseudo-gradient of a fragment."""
        self.finish()  # loaded from a run with a longer overlap
        start, stop = self._cuts[index]
        change = (self.global_weights - flatten(self.params))[start:stop] / self.world_size
        if self.compressor is not None:
            compressed_all_reduce(change, self.compressor, self.group, ("fragment", index))
        else:
            self._work = dist.all_reduce(change, group=self.group, async_op=True)
        self._flight = start, stop, change

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._work = None

    @torch.no_grad()
    def finish(self) -> None:
        """Take the outer step of a fragment that is still on its way. Call it at the end, too."""
        if self._flight is None:
            return
        self._wait()
        start, stop, change = self._flight
        self._flight = None
        average(statistics(self.module), self.group)
        means = flatten(statistics(self.module))
        # All ranks see the same here. (A GPU is waited for.) A mask may be infinite all the time.
        still_finite = torch.equal(means.isfinite(), self.global_statistics.isfinite())
        if not (_is_finite(change) and still_finite):
            self._drop_round()
            return
        weights, momentum = self.global_weights[start:stop], self.momentum[start:stop]
        momentum.mul_(self.outer_momentum).add_(change)
        weights.add_(change.add(momentum, alpha=self.outer_momentum), alpha=-self.outer_lr)
        own_weights = flatten(self.params)
        own_weights[start:stop] = weights
        unflatten(own_weights, self.params)
        self.global_statistics = means

    def _drop_round(self) -> None:
        """Go back to the common weights; a part of the inner optimizer's state begins anew."""
        warnings.warn(
            f"rank {dist.get_rank()}: after step {self.steps} the weights or buffers of a rank are "
            "not finite (inf or NaN). All ranks drop the round, and go on from their last common "
            "weights. Clip the gradients, or use a GradScaler",
            RuntimeWarning,
            stacklevel=4,
        )
        unflatten(self.global_weights, self.params)
        unflatten(self.global_statistics, statistics(self.module))
        for state in self.optimizer.state.values():
            tensors = [value for value in state.values() if isinstance(value, Tensor)]
            if not all(map(_is_finite, tensors)):
                for tensor in tensors:
                    tensor.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's state: inner and outer steps, what travels, the compressor.

        A fragment that is on its way is waited for, but arrives when it would have arrived.
        """
        self._wait()
        state = {name: getattr(self, name) for name in _REMEMBERED}
        for name in ("optimizer", "compressor"):
            part = getattr(self, name)
            state[name] = None if part is None else part.state_dict()
        return copy.deepcopy(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from this rank's `state_dict`, also within a round.

        Raises ValueError if it is of other weights or buffers.
        """
        for name in ("global_weights", "global_statistics"):
            saved, expected = state[name].numel(), getattr(self, name).numel()
            if saved != expected:
                raise ValueError(
                    f"{name} has {saved} numbers in the state, but {expected} in this model"
                )
        device = self.global_weights.device
        moved = {name: value for name, value in state.items() if name != "optimizer"}
        moved = tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), moved)
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        if self.compressor is not None:
            self.compressor.load_state_dict(moved["compressor"])
        vars(self).update({name: moved[name] for name in _REMEMBERED})


_REMEMBERED = ("steps", "global_weights", "global_statistics", "momentum", "_flight")


def diloco(
    params: Iterable[Tensor],
    inner_step: Callable[[], object],
    every: int,
    outer_lr: float,
    momentum: float,
    group: Group = None,
) -> Callable[[], None]:
    """Return ``step()``, which is DiLoCo in its plain form: one all-reduce after every H steps.

    Each call of ``step()`` calls `inner_step`. Every H-th one then takes the outer step:

        Δ = w̃ - 1/K Σ_i w_i      m ← μ m + Δ      w̃ ← w̃ - η (Δ + μ m)      w_i ← w̃

    Args:
        params: the parameters, equal on all ranks at first. They keep their memory and ``.grad``.
        inner_step: takes a step of the inner optimizer.
        every: H, inner steps between two outer steps.
        outer_lr: η, the learning rate of the outer step.
        momentum: μ, its Nesterov momentum; m starts at 0.
        group: None for all ranks.

    """
    params, steps = list(params), 0
    weights = flatten(params)  # w̃
    buffer = torch.zeros_like(weights)  # m

    def step() -> None:
        nonlocal steps
        inner_step()
        steps += 1
        if steps % every == 0:
            outer_step()

    @torch.no_grad()
    def outer_step() -> None:
        change = (weights - flatten(params)) / dist.get_world_size(group)
        dist.all_reduce(change, group=group)
        buffer.mul_(momentum).add_(change)
        weights.sub_(change.add_(buffer, alpha=momentum), alpha=outer_lr)
        unflatten(weights, params)

    return step


class OneStepDelay:
    """Synchronous SGD whose gradients travel during the next step.

    Args:
        optimizer: the same on all ranks. Its weights must be equal, and then stay equal.
        group: None for all ranks.

    """

    def __init__(self, optimizer: torch.optim.Optimizer, group: Group = None) -> None:
        _, self.world_size = place_in(group)
        self.optimizer = optimizer
        self.group = group
        self._flight: tuple[list[Tensor], Tensor, dist.Work | None] | None = None

    @torch.no_grad()
    def step(self) -> None:
        """Send the gradients of this step, and update with the mean gradients of the last step.

        The first call only sends.
        """
        params = trained(self.optimizer)
        fresh = flatten(gradients_of(params)) / self.world_size
        self.finish()
        self._flight = params, fresh, dist.all_reduce(fresh, group=self.group, async_op=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Apply the gradients that are still on their way. Call it at the end of training, too."""
        if self._flight is None:
            return
        params, mean, work = self._flight
        self._flight = None
        if work is not None:
            work.wait()
        self.optimizer.zero_grad()  # a group that was added since has no mean yet
        give_gradients(params, mean)
        self.optimizer.step()


def trained(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer."""
    return [param for param_group in optimizer.param_groups for param in param_group["params"]]


def average(tensors: Sequence[Tensor], group: Group) -> None:
    """Replace the tensors, if there are any, by their means over the ranks, in one all-reduce."""
    if tensors:
        mean = flatten(tensors) / place_in(group)[1]
        dist.all_reduce(mean, group=group)
        unflatten(mean, tensors)


def statistics(module: nn.Module | None) -> list[Tensor]:
    """Return the floating-point buffers of `module`: those of which a mean makes sense."""
    buffers = () if module is None else module.buffers()
    return [buffer for buffer in buffers if buffer.is_floating_point()]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return a new vector with the elements of all tensors, one tensor after the other."""
    if not tensors:
        return torch.empty(0)
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten(vector: Tensor, into: Sequence[Tensor]) -> None:
    """Copy a vector made by `flatten` back into the tensors."""
    pieces = torch.split(vector, [tensor.numel() for tensor in into])
    for tensor, piece in zip(into, pieces, strict=True):
        tensor.detach().copy_(piece.view_as(tensor))


def gradients_of(params: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of `params`; zeros for one that is None."""
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in params]


def give_gradients(params: Sequence[Tensor], vector: Tensor) -> None:
    """Set every `.grad` to its part of a vector as `flatten` makes it, in its dtype."""
    pieces = torch.split(vector, [param.numel() for param in params])
    for param, piece in zip(params, pieces, strict=True):
        param.grad = piece.view_as(param).to(param.dtype, copy=True)


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())
