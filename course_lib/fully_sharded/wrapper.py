"""FSDP: when to gather and free weights, so that the network is one layer ahead.

    >>> from course_lib.fully_sharded import FullyShardedDataParallel
    >>> model = FullyShardedDataParallel(model, compute_dtype=torch.bfloat16)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # fp32, this rank's pieces
    >>> for x, y in loader:
    ...     optimizer.zero_grad()
    ...     loss_fn(model(x.bfloat16()), y.bfloat16()).backward()
    ...     optimizer.step()
    >>> weights = model.full_state_dict()  # the whole model, on every rank

Each layer's weights are all-gathered before its forward, and again before its backward. Its
gradient is reduce-scattered after its backward. While a layer runs, the weights of the next one are
gathered:

    network   gather 1 | gather 2 | gather 3 |          gather 2 | reduce 3 | gather 1 | reduce 2 …
    compute            | forward 1 | forward 2 | forward 3 | backward 3    | backward 2 | …

A rank sends Ψ numbers for forward, Ψ for backward and Ψ for gradients, each times (K-1)/K. These
are 3Ψ, 1.5 times as many as DDP. It holds 1/K of the weights, gradients and optimizer state, and
the whole weights of two layers at a time.

S. Rajbhandari et al., "ZeRO", SC 2020, section 7.3; Y. Zhao et al., "PyTorch FSDP", VLDB 2023.
"""

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from course_lib.collectives import Group, place_in
from course_lib.ddp import EndOfBackward, broadcast_module_states, verify_same_model
from course_lib.fully_sharded.unit import Place, Unit, WholeUnit
from course_lib.guard import Guard, rank_error
from course_lib.parts import clip_grad_norm_, gradient_norms
from course_lib.sharded_optimizer import gather_states, pieces_of_states


class FullyShardedDataParallel(nn.Module):
    """Wrap `module` so that each rank of `group` keeps 1/K of its parameters.

    All ranks must construct it, with modules of the same structure; it uses the first rank's
    weights. `parameters()` are this rank's pieces, vectors that may be empty, under the names of
    the whole parameters. Make an optimizer for them *after* wrapping; it must treat each element by
    itself. All ranks must run the same layers in the same order. Only `backward()` computes the
    gradients of pieces: `torch.autograd.grad` and `backward(inputs=…)` do not find them. A rank has
    a piece of each gradient: clip with `clip_grad_norm_` of the wrapper. PyTorch's function raises
    an error, and a `GradScaler` works as usual (see `parts`).

    Parameters may be frozen and unfrozen, and get new values in any way. A hook that is set on a
    parameter before wrapping gets this rank's gradient of the whole parameter. One that is set
    afterwards gets this rank's piece of the mean gradient, when backward ends.

    Args:
        module: any module except PyTorch's recurrent ones, which keep their weights elsewhere.
        compute_dtype: dtype of the gathered weights and of the gradients that are sent. The pieces
            and their gradients keep the dtype of the parameters (fp32: master weights). None: all
            have this dtype.
        group: the process group; None for all ranks.
        keep_whole: types of modules, and names, whose parameters stay whole on each rank, for
            example `(nn.LayerNorm, "bias")`. They are not gathered, and their gradients are
            averaged by an all-reduce. A name is that of a module (`"blocks.0.norm"`), of a
            parameter (`"head.bias"`), or a part of such a name (`"norm"`, `"bias"`).
        unit_types: types of modules whose parameters, and those of modules inside, are gathered
            together, for example `(Block,)`. By default each module with its own parameters is a
            unit.
        prefetch: gather the next unit's weights while a unit runs. The order of the units is known
            from the second forward on.

    Raises:
        ValueError: this rank is not in `group`, a unit mixes dtypes or devices, or a name in
            `keep_whole` names nothing.
        TypeError: the module has recurrent layers of PyTorch.
        RuntimeError: the ranks' models differ; later, the module has other parameters than those
            that were wrapped.

    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        group: Group = None,
        *,
        keep_whole: Sequence[type[nn.Module] | str] = (),
        unit_types: tuple[type[nn.Module], ...] | None = None,
        prefetch: bool = True,
    ) -> None:
        super().__init__()
        place_in(group)
        if any(isinstance(inner, nn.RNNBase) for inner in module.modules()):
            raise TypeError(
                "nn.RNN, nn.LSTM and nn.GRU cannot be sharded: they keep their weights in a list "
                "of their own"
            )
        verify_same_model(module, group)
        broadcast_module_states(module, 0, group)
        self.module, self._prefetch = module, prefetch
        self._names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        self._group = group
        self._units: list[Unit] = []
        self._order: list[Unit] = []
        self._roots: list[Unit] = []
        self._in_forward = False
        unsharded = _kept_whole(module, keep_whole)
        names = {param: name for name, param in module.named_parameters()}
        for owner, members in _owners(module, unit_types).items():
            for kind in (Unit, WholeUnit):
                params = [param for param in members if (param in unsharded) == (kind is WholeUnit)]
                if not params:
                    continue
                places = [members[param] for param in params]
                unit = kind(params, [names[p] for p in params], places, compute_dtype, group)
                self._units.append(unit)
                if owner is module:
                    self._roots.append(unit)  # used in the whole forward: the wrapper gathers it
                else:
                    owner.register_forward_pre_hook(partial(self._before, unit))
                    owner.register_forward_hook(partial(self._after, unit))
        self._watch()

    @property
    def _sharded(self) -> list[Unit]:
        return [unit for unit in self._units if not isinstance(unit, WholeUnit)]

    def _watch(self) -> None:
        self._end = EndOfBackward(self._end_backward)
        self._guard = Guard(self.module)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FullyShardedDataParallel":
        """Return a copy with pieces of its own, in the same group, without communication."""
        twin = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self._group)] = self._group
        state = {name: v for name, v in self.__dict__.items() if name not in ("_end", "_guard")}
        twin.__dict__.update(copy.deepcopy(state, memo))
        twin._watch()
        return twin

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; each unit's weights are gathered while the unit runs.

        Raises RuntimeError if the module has other parameters than those that were wrapped.
        """
        if not self._end.requested:  # else activations are computed again, for a backward
            self._follow_parameters()
            self._forget_backward()
            for unit in self._units:
                unit.free()  # an exception may have ended the last forward
        outer, self._in_forward = self._in_forward, True
        try:
            for unit in self._roots:
                self._before(unit)
            outputs = self.module(*args, **kwargs)
            for unit in self._roots:
                self._after(unit, self.module, args, outputs)
        finally:
            self._in_forward = outer
        if not self._end.requested:
            for unit in self._units:
                unit.free()  # one may have been gathered ahead, but not used
        return outputs

    @_disable_dynamo  # torch.compile sees only the module
    def _follow_parameters(self) -> None:
        self._guard.verify()
        with torch._C.DisableTorchFunctionSubclass():  # else each look at a piece takes 5 µs
            for unit in self._units:
                unit.verify_pieces()
                unit.follow_pieces()

    @_disable_dynamo
    def _before(self, unit: Unit, *_: Any) -> None:
        """Gather `unit` before its forward, and begin to gather the next one."""
        in_backward = self._end.requested
        if not in_backward and not self._in_forward:
            unit.free()  # a layer is called by itself: what is gathered may be old
        unit.start_gathering()
        if unit not in self._order:
            self._order.append(unit)
        elif self._in_forward and not in_backward:
            self._fetch(self._order.index(unit) + 1)
        unit.use()

    @_disable_dynamo
    def _after(self, unit: Unit, _: nn.Module, __: Any, outputs: Any) -> None:
        """Free `unit` after its forward, and register a hook for its backward."""
        if not self._end.requested:  # else activations are computed again: backward comes next
            unit.free()
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.register_hook(lambda _: self._before_backward(unit))  # type: ignore[no-untyped-call]

    def _before_backward(self, unit: Unit) -> None:
        if not self._end.requested:
            self._forget_backward()
            self._end.ask()
            self._again = torch.is_grad_enabled()  # create_graph=True: another backward will come
        place = self._order.index(unit)
        unit.start_gathering()
        self._fetch(place - 1)
        unit.use()
        for sent in self._order[place + 2 :]:  # before this unit was gathered, so they are over
            sent.free_sent()

    def _fetch(self, place: int) -> None:
        if self._prefetch and 0 <= place < len(self._order):
            self._order[place].start_gathering()

    def _end_backward(self) -> None:
        for unit in self._units:
            if not self._again:
                unit.free()
        for unit in self._units:
            unit.finish()

    def _forget_backward(self) -> None:
        """Drop what the last backward left behind, if it did not end."""
        self._end.forget()
        for unit in self._units:
            unit.forget_backward()

    def finish_gradient_synchronization(self) -> None:
        """Do nothing: when backward returns, the gradients of the pieces are ready.

        It is here so that a script runs with DDP and with this class.
        """

    def gradient_norms(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of each parameter's whole gradient, shape (parameters,), in float64.

        All ranks must call, after backward and before the optimizer's step. The order is that of
        `parameters()`. A missing gradient counts as zero.
        """
        return gradient_norms(self.parameters(), norm_type)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradient of all parameters, as `torch.nn.utils.clip_grad_norm_` would.

        All ranks must call, after backward (and `GradScaler.unscale_`) and before the optimizer's
        step. Returns the norm before.
        """
        return clip_grad_norm_(self, max_norm, norm_type)

    @property
    def bytes_held(self) -> int:
        """Bytes of weights on this rank now: all chunks, and the gathered weights."""
        return sum(unit.bytes_held for unit in self._units)

    def get_extra_state(self) -> Tensor:
        """Return this rank and the number of ranks, for `state_dict()`, which has the pieces."""
        return torch.tensor(place_in(self._group))

    def set_extra_state(self, state: Tensor) -> None:
        """Raise RuntimeError if a `state_dict()` is from another rank, or of other ranks."""
        place, own_place = state.tolist(), list(place_in(self._group))
        if place != own_place:
            raise rank_error(
                f"this state_dict() has the pieces of rank {place[0]} of {place[1]}, but here is "
                f"rank {own_place[0]} of {own_place[1]}",
                "Load each rank's own, or save full_state_dict() and load it into the plain module "
                "before wrapping it.",
            )

    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of the optimizer of this model's parameters, on every rank.

        All ranks must call. It is what `optimizer.state_dict()` would be in one process, and can
        be loaded there, or on any number of ranks.
        """
        numbers, state_dict = _numbers(optimizer), optimizer.state_dict()
        for unit in self._sharded:
            states = [optimizer.state.get(p, {}) if p.numel() else {} for p in unit.pieces]
            full_states = gather_states(states, unit.like, [unit.chunks], self._group)
            state_dict["state"] |= {
                numbers[unit.pieces[i]]: state for i, state in full_states.items()
            }
        return state_dict

    def load_full_optimizer_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Load this rank's pieces of a whole state, from any number of ranks or one process.

        Raises ValueError if it is the state of one rank, or its groups do not match.
        """
        numbers, state = _numbers(optimizer), dict(state_dict["state"])
        for unit in self._sharded:
            full_states = {i: state.pop(numbers.get(p), {}) for i, p in enumerate(unit.pieces)}
            own_states = pieces_of_states(full_states, unit.like, [unit.chunks])
            state |= {numbers[unit.pieces[i]]: cut for i, cut in own_states.items()}
        optimizer.load_state_dict({**state_dict, "state": state})

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole `module.state_dict()`, on every rank, in the parameters' own dtype.

        All ranks must call. The result can be loaded into the plain module, which can then be
        wrapped again on any number of ranks.
        """
        self._follow_parameters()
        full_tensors: dict[Place, Tensor] = {}
        for unit in self._sharded:
            for places, tensor in unit.whole_parameters():
                full_tensors.update(dict.fromkeys(places, tensor))
        state = self.module.state_dict()
        for name in self._names:
            owner, _, attribute = name.rpartition(".")
            place = self.module.get_submodule(owner), attribute
            state[name] = full_tensors[place] if place in full_tensors else state[name].clone()
        return state


def _numbers(optimizer: Optimizer) -> dict[Tensor, int]:
    """Return parameter → its number in the optimizer's `state_dict()`."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {param: number for number, param in enumerate(params)}


def _kept_whole(module: nn.Module, entries: Sequence[type[nn.Module] | str]) -> set[nn.Parameter]:
    """Return the parameters that stay whole. Raises ValueError if a name names nothing."""
    types = tuple(entry for entry in entries if not isinstance(entry, str))
    inside = [inner for inner in module.modules() if isinstance(inner, types)]
    params = {param for inner in inside for param in inner.parameters()}
    named_params = list(module.named_parameters(remove_duplicate=False))
    for name in (entry for entry in entries if isinstance(entry, str)):
        matches = {param for full, param in named_params if f".{name}." in f".{full}."}
        if not matches:
            raise ValueError(f"keep_whole: there is no parameter or module '{name}'")
        params |= matches
    return params


def _owners(
    module: nn.Module, unit_types: tuple[type[nn.Module], ...] | None
) -> dict[nn.Module, dict[nn.Parameter, list[Place]]]:
    """Return unit → its parameters → where modules have each of them.

    If several units use a parameter, it belongs to the root, whose weights stay gathered for the
    whole forward.
    """
    users: dict[nn.Parameter, list[tuple[nn.Module, Place]]] = {}
    for unit, inner in _with_unit(module, module, unit_types):
        for name, param in inner._parameters.items():
            if param is not None:
                users.setdefault(param, []).append((unit, (inner, name)))
    params_by_unit: dict[nn.Module, dict[nn.Parameter, list[Place]]] = {}
    for param, uses in users.items():
        units = {unit for unit, _ in uses}
        owner = units.pop() if len(units) == 1 else module
        params_by_unit.setdefault(owner, {})[param] = [place for _, place in uses]
    return params_by_unit


def _with_unit(
    inner: nn.Module, unit: nn.Module, unit_types: tuple[type[nn.Module], ...] | None
) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield `(its unit, module)` for `inner` and all modules inside; shared ones more than once."""
    is_unit = bool(inner._parameters) if unit_types is None else isinstance(inner, unit_types)
    unit = inner if is_unit else unit
    yield unit, inner
    # Attention reads the weights of its `out_proj` without calling it: no hook would gather them.
    inside = () if isinstance(inner, nn.MultiheadAttention) else unit_types
    for child in inner.children():
        yield from _with_unit(child, unit, inside)
