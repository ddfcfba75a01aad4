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

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from course_lib.collectives import Group, place_in
from course_lib.ddp import broadcast_module_states, verify_same_model
from course_lib.fully_sharded.unit import Place, Unit
from course_lib.parts import clip_grad_norm_, gradient_norms


class FullyShardedDataParallel(nn.Module):
    """Wrap `module` so that each rank of `group` keeps 1/K of its parameters.

    All ranks must construct it, with modules of the same structure; it uses the first rank's
    weights. `parameters()` are this rank's pieces, vectors that may be empty, under the names of
    the whole parameters. Make an optimizer for them *after* wrapping; it must treat each element by
    itself. All ranks must run the same layers in the same order. A rank has a piece of each
    gradient: clip with `clip_grad_norm_` of the wrapper. PyTorch's function raises an error, and a
    `GradScaler` works as usual (see `parts`).

    Args:
        module: any module except PyTorch's recurrent ones, which keep their weights elsewhere.
        compute_dtype: dtype of the gathered weights and of the gradients that are sent. The pieces
            and their gradients keep the dtype of the parameters (fp32: master weights). None: all
            have this dtype.
        group: the process group; None for all ranks.
        unit_types: types of modules whose parameters, and those of modules inside, are gathered
            together, for example `(Block,)`. By default each module with its own parameters is a
            unit.
        prefetch: gather the next unit's weights while a unit runs. The order of the units is known
            from the second forward on.

    Raises:
        ValueError: this rank is not in `group`, or a unit mixes dtypes or devices.
        TypeError: the module has recurrent layers of PyTorch.
        RuntimeError: the ranks' models differ.

    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        group: Group = None,
        *,
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
        owners = _owners(module, unit_types)
        self._units: list[Unit] = []
        self._order: list[Unit] = []
        self._root: Unit | None = None
        self._in_backward = False
        for owner, members in owners.items():
            places = list(members.values())
            unit = Unit(list(members), places, compute_dtype, group)
            self._units.append(unit)
            if owner is module:
                self._root = unit  # used in the whole forward, so the wrapper gathers it
            else:
                owner.register_forward_pre_hook(lambda _, __, unit=unit: self._before(unit))
                owner.register_forward_hook(lambda _, __, out, unit=unit: self._after(unit, out))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; each unit's weights are gathered while the unit runs."""
        if self._in_backward:  # an error interrupted the last backward
            self._end_backward()
        if self._root is not None:
            self._before(self._root)
        outputs = self.module(*args, **kwargs)
        if self._root is not None:
            self._after(self._root, outputs)
        return outputs

    def _before(self, unit: Unit) -> None:
        """Gather `unit` before its forward, and begin to gather the next one."""
        unit.start_gathering()
        if unit not in self._order:
            self._order.append(unit)
        elif not self._in_backward:
            self._fetch(self._order.index(unit) + 1)
        unit.use()

    def _after(self, unit: Unit, outputs: Any) -> None:
        """Free `unit` after its forward, and register a hook for its backward."""
        if self._in_backward:
            return  # forward runs again to recompute activations: its backward comes next
        unit.free()
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.register_hook(lambda _: self._before_backward(unit))  # type: ignore[no-untyped-call]

    def _before_backward(self, unit: Unit) -> None:
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        unit.start_gathering()
        self._fetch(self._order.index(unit) - 1)
        unit.use()

    def _fetch(self, place: int) -> None:
        if self._prefetch and 0 <= place < len(self._order):
            self._order[place].start_gathering()

    def _end_backward(self) -> None:
        self._in_backward = False
        self.finish_gradient_synchronization()
        for unit in self._units:
            unit.free()

    def finish_gradient_synchronization(self) -> None:
        """Wait until the gradients of the pieces are ready. Backward does this when it ends."""
        for unit in self._units:
            unit.finish()

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

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole `module.state_dict()`, on every rank, in the parameters' own dtype.

        All ranks must call. The result can be loaded into the plain module, which can then be
        wrapped again on any number of ranks.
        """
        whole: dict[Place, Tensor] = {}
        for unit in self._units:
            for places, tensor in unit.whole_parameters():
                whole.update(dict.fromkeys(places, tensor))
        state = self.module.state_dict()
        for name in self._names:
            owner, _, attribute = name.rpartition(".")
            place = self.module.get_submodule(owner), attribute
            state[name] = whole[place] if place in whole else state[name].clone()
        return state


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
    found: dict[nn.Module, dict[nn.Parameter, list[Place]]] = {}
    for param, uses in users.items():
        units = {unit for unit, _ in uses}
        owner = units.pop() if len(units) == 1 else module
        found.setdefault(owner, {})[param] = [place for _, place in uses]
    return found


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
