"""ZeRO-1: an optimizer whose state is divided over the ranks, one K-th on each.

    >>> from course_lib.ddp import DistributedDataParallel
    >>> from course_lib.sharded_optimizer import ShardedOptimizer
    >>> model = DistributedDataParallel(model)  # which averages the gradients
    >>> optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    >>> for x, y in loader:
    ...     optimizer.zero_grad()
    ...     loss_fn(model(x), y).backward()
    ...     optimizer.step()  # each rank steps on its pieces, with the gradients that it has there

With f the rule of the optimizer for one element, s its state and p(r) the elements of rank r:

    w[p(r)], s[p(r)] = f(w[p(r)], g[p(r)], s[p(r)])     on rank r only
    w = all-gather of w[p(0)], …, w[p(K-1)]

One rank updates each element and sends it to the others. So the replicas keep the same bits. The
argument `gradients` says how the gradients g are averaged over the ranks:

    "averaged"   DDP or `gradient_sync`, before the step          a rank sends 2Ψ + Ψ numbers
    "local"      the step: reduce-scatter, then all-gather                      Ψ + Ψ    ZeRO-1
    "sharded"    hooks, during backward: see `gradients`                        Ψ + Ψ    ZeRO-2

times (K-1)/K. An all-reduce sends every gradient to every rank, but a rank reads only one K-th of
them. So half of the all-reduce is not needed here, and "local" leaves that half out.

With "local" and "sharded" no rank has the whole mean gradient. So clip with the optimizer's own
`clip_grad_norm_`; PyTorch's raises an error. A `GradScaler` works as usual (`parts`).

S. Rajbhandari et al., "ZeRO", SC 2020, sections 5.1 and 7.2.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from course_lib.bucketing import Bucket, assign_buckets
from course_lib.collectives import Group, place_in
from course_lib.gradient_sync import copy_scaled, verify_first_order
from course_lib.guard import form_of, use_of, verify_form
from course_lib.parts import (
    GradientElsewhere,
    Part,
    as_part,
    clip_grad_norm_,
    gradient_elsewhere,
    gradient_norms,
    local_gradient,
)
from course_lib.sharded_optimizer.gradients import ShardedGradients, hook_gradients
from course_lib.sharded_optimizer.partition import (
    FlatChunks,
    all_gather_chunks,
    as_it_lies,
    reduce_scatter_chunks,
)
from course_lib.sharded_optimizer.states import gather_states, pieces_of_states

NOT_BY_ELEMENT = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}
"""PyTorch's optimizers that need whole tensors, and would see only pieces here."""
Who = Literal["averaged", "local", "sharded"]


class ShardedOptimizer(Optimizer):
    """Wrap `optimizer_cls(params, **kwargs)` so that each rank of `group` holds 1/K of its state.

    All ranks must construct it, with the same weights (wrap the model in DDP before). It moves the
    parameters into flat buffers, so convert the model (`to`, `double`) before. Schedulers,
    parameter groups and `zero_grad` work as usual, but all groups must be given to the constructor.
    Gradients that are None on this rank count as zero with "local" and "sharded", so weight decay
    and momentum still act, except on parameters that are frozen now. They are skipped with
    "averaged". With "sharded", `step` uses the gradients up: they are zero in a second `step`
    without a backward between the two. Parameters may be frozen and unfrozen, and get new values in
    any way, also by `param.data = …`: call `zero_grad` of the optimizer or `step` afterwards.

    Args:
        params: parameters or groups of them, as for `optimizer_cls`. Frozen ones are left out; tied
            ones occur once, as in `model.parameters()`.
        optimizer_cls: an optimizer that treats each element by itself (SGD, Adam, RMSprop, …).
        group: the process group; None for all ranks.
        gradients: how the gradients are averaged; see above.
        bucket_cap_mb: MiB of the buffers in which gradients are sent, with "sharded".
        **kwargs: for `optimizer_cls`.

    Raises:
        ValueError: this rank is not in `group`, `gradients` is none of the three, or the optimizer
            refuses its arguments.
        TypeError: the optimizer needs whole tensors, or a gradient is sparse.
        RuntimeError: a group is added later, or a parameter is converted later.

    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[Optimizer],
        group: Group = None,
        *,
        gradients: Who = "averaged",
        bucket_cap_mb: float = 25,
        **kwargs: Any,
    ) -> None:
        place_in(group)
        if optimizer_cls.__name__ in NOT_BY_ELEMENT:
            raise TypeError(
                f"{optimizer_cls.__name__} needs whole tensors, but a rank holds pieces of them: "
                "use an optimizer that treats each element by itself, such as AdamW"
            )
        if gradients not in ("averaged", "local", "sharded"):
            raise ValueError(
                f'gradients must be "averaged", "local" or "sharded", got "{gradients}"'
            )
        self._complete = False  # groups can be added until then
        unsharded = optimizer_cls(params, **kwargs)  # checks the arguments; it has no state yet
        super().__init__(unsharded.param_groups, unsharded.defaults)
        del unsharded
        self._complete = True
        self.group, self.gradients = group, gradients
        self._params = [p for param_group in self.param_groups for p in param_group["params"]]
        self._names = [f"parameter {index}" for index in range(len(self._params))]
        self._cap = bucket_cap_mb if gradients == "sharded" else float("inf")
        self._chunks: list[FlatChunks] = []
        self._forms: dict[int, Any] = {}  # of the parameters that are in a buffer
        self._gradients: list[Tensor] = []
        self._pieces = [
            as_part(param.new_empty(0), Part, param, group, name)
            for param, name in zip(self._params, self._names, strict=True)
        ]
        self._during = ShardedGradients(
            self._params, self._names, self._chunks, self._pieces, group
        )
        self._handles: list[RemovableHandle] = []
        self._shard([i for i, param in enumerate(self._params) if param.requires_grad])
        # One piece for each parameter, so that groups and numbers are the same as in one process.
        pieces = iter(self._pieces)
        groups = [
            {**options_of(param_group), "params": [next(pieces) for _ in param_group["params"]]}
            for param_group in self.param_groups
        ]
        self._make: Callable[[Any], Optimizer] = lambda groups: optimizer_cls(groups, **kwargs)
        self._local = self._make(groups)

    def _shard(self, indices: Sequence[int]) -> None:
        """Move these parameters into new buffers, and hook in."""
        for members in assign_buckets(self._params, self._cap, self._cap, indices[::-1]):
            chunks = FlatChunks(self._params, members, self.group)
            self._chunks.append(self._moved_into(chunks))
            # Keep this memory: allocating it in every step would cost more than filling it.
            if self.gradients == "local":
                self._gradients.append(torch.zeros_like(chunks.flat))
        self._hook_in()

    def _moved_into(self, chunks: FlatChunks) -> FlatChunks:
        """Make the parameters views of the buffer, and their pieces views of this rank's chunk."""
        for index, view in zip(chunks.indices, chunks.bucket.views, strict=True):
            self._params[index].data = view
            self._pieces[index].data = chunks.piece(index, chunks.chunk())
            self._forms[index] = form_of(view)
        return chunks

    def _hook_in(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self.gradients == "sharded":
            self._handles = self._during.hook_in()
        elif self.gradients == "local":
            self._handles = hook_gradients(
                self._params, self._forms, self._before_gradient, self._on_gradient
            )
        self._uses = [use_of(param) for param in self._params]

    def _follow_parameters(self) -> list[int]:
        """Take over what was done to the parameters since; return those that are no longer frozen.

        Raises RuntimeError if a parameter was converted.
        """
        thawed = [
            i
            for i, param in enumerate(self._params)
            if param.requires_grad and i not in self._forms
        ]
        if thawed:
            self._shard(thawed)
            new_states = self._make([self._pieces[i] for i in thawed]).state
            self._local.state.update(new_states)  # Adagrad begins with a state
        elif self._uses != [use_of(param) for param in self._params]:
            self._hook_in()
        for number, chunks in enumerate(self._chunks):
            moved = False
            for index, view in zip(chunks.indices, chunks.bucket.views, strict=True):
                verify_form(self._names[index], self._params[index], self._forms[index])
                moved |= self._params[index].data_ptr() != view.data_ptr()
            if moved:  # by `param.data = …`; somebody may have kept the old memory for later
                again = FlatChunks(self._params, chunks.indices, self.group)
                self._chunks[number] = self._moved_into(again)
        return thawed

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError: the buffers are cut only once, so give the constructor all groups."""
        if self._complete:
            raise RuntimeError(
                "groups cannot be added later: give all groups to ShardedOptimizer(…)"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's pieces, and gather the pieces of all ranks. All ranks must call.

        Returns the result of `closure`, which is called first, with gradients enabled.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(param.grad is not None and param.grad.is_sparse for param in self._params):
            raise TypeError("gradients must be dense: use nn.Embedding(…, sparse=False)")
        if self.gradients == "averaged":
            self._cut_gradients()
        else:
            self._average()
        for inner, group in zip(self._local.param_groups, self.param_groups, strict=True):
            inner.update(options_of(group))  # a scheduler changes our groups
        self._local.step()
        self._forget_means()
        for chunks in self._chunks:
            all_gather_chunks(chunks.flat, self.group)
        return loss

    def _cut_gradients(self) -> None:
        """Give every piece its part of the gradient, which is the mean already."""
        self._follow_parameters()
        for chunks in self._chunks:
            for index in chunks.indices:
                gradient = self._params[index].grad
                first, last = chunks.pieces[index]
                if gradient is not None and first < last:
                    flat = as_it_lies(gradient, self._params[index])
                    self._pieces[index].grad = flat[first:last]

    @torch.no_grad()
    def _average(self) -> None:
        """Give every piece its part of the mean gradient, unless it has it already."""
        thawed = self._follow_parameters()
        if self.gradients == "sharded":
            self._during.finish(thawed)
            return
        if any(isinstance(param.grad, GradientElsewhere) for param in self._params):
            return
        factor = 1 / place_in(self.group)[1]
        for chunks, flat in zip(self._chunks, self._gradients, strict=True):
            places = Bucket(self._params, chunks.indices, flat[: len(chunks.bucket.buffer)])
            for index, view in zip(chunks.indices, places.views, strict=True):
                copy_scaled(self._params[index].grad, factor, view)
            own_chunk = reduce_scatter_chunks(flat, self.group)
            for index in chunks.indices:
                param = self._params[index]
                not_frozen = param.requires_grad or param.grad is not None
                if not_frozen and self._pieces[index].numel():
                    self._pieces[index].grad = chunks.piece(index, own_chunk)

    def _before_gradient(self, index: int) -> None:
        if isinstance(self._params[index].grad, GradientElsewhere):
            raise RuntimeError(
                f"backward() reached {self._names[index]} after the gradients were averaged, for "
                "example to clip them: first call step() or zero_grad()"
            )

    def _on_gradient(self, index: int) -> None:
        gradient = self._params[index].grad
        assert gradient is not None
        verify_first_order(gradient)
        if not gradient.is_sparse:
            local_gradient(self._params[index], self.group, self.averaged_parameters)

    def _forget_means(self) -> None:
        self._local.zero_grad()
        self._during.forget()
        for param in self._params:
            if isinstance(param.grad, GradientElsewhere):
                param.grad = None

    def averaged_parameters(self) -> list[Tensor]:
        """Return tensors whose `.grad` holds the mean gradient: whole, or this rank's pieces.

        With "averaged" these are the parameters. Otherwise, the gradients are averaged now, so all
        ranks must call this. The elements of a piece are some of the parameter's, so use functions
        of each element, such as `torch.nn.utils.clip_grad_value_`.
        """
        if self.gradients == "averaged":
            return self._params
        self._average()
        for index, param in enumerate(self._params):
            if param.requires_grad:
                param.grad = gradient_elsewhere(param, self._pieces[index])
        return list(self._pieces)

    def gradient_norms(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of each parameter's mean gradient, shape (parameters,), in float64.

        All ranks must call, after backward and before step. A missing gradient counts as zero.
        """
        return gradient_norms(self.averaged_parameters(), norm_type)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the mean gradient of all parameters, as `torch.nn.utils.clip_grad_norm_` would.

        All ranks must call, after backward (and `GradScaler.unscale_`) and before step. Returns the
        norm before.
        """
        return clip_grad_norm_(self.averaged_parameters(), max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the parameters and of this rank's pieces."""
        self._forget_means()
        super().zero_grad(set_to_none)
        self._follow_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, on every rank, as `optimizer_cls` has it in one process.

        All ranks must call. The state can be loaded into a `ShardedOptimizer` on any number of
        ranks, or into an `optimizer_cls`.
        """
        groups = super().state_dict()["param_groups"]
        states = [self._local.state.get(piece, {}) for piece in self._pieces]
        gathered = gather_states(states, self._params, self._chunks, self.group)
        return {"state": gathered, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's pieces of a whole state, from `state_dict` on any number of ranks.

        Raises ValueError if the state's groups do not match ours.
        """
        self._follow_parameters()
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        own_states = pieces_of_states(state_dict["state"], self._params, self._chunks)
        groups = state_dict["param_groups"]
        self._local.load_state_dict({"state": own_states, "param_groups": groups})


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters and their names: learning rate and so on."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
