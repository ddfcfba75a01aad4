"""Recording: save what a step computes, by name.

    weight → input → output of each layer → gradient → option → state → update → buffer

This is the order of execution. `record` saves the tensors with hooks, so the step itself does not
change. Names are those of `model.named_parameters()` and `model.named_modules()`, without the
prefixes of wrappers (``module.``). Every tensor is copied to the CPU.

Two things are different while a step is recorded:

- **Dropout drops nothing.** Ranks cannot draw the masks that one rank draws. So dropout
  returns its input. Its masks are recorded, and `compare` checks them separately. Dropout inside
  attention and of an LSTM is off. The step itself must turn off functions such as
  `dropout`.
- **`trusted_run` disturbs some of its runs** by a rounding of each weight, input, output and
  gradient. The tolerance is how far these disturbances spread.

Both ideas are from Y. Jiang et al., "TTrace: Lightweight Error Checking and Diagnosis for
Distributed Training", 2025 (arXiv 2506.09280): a source of random numbers that does not depend on
the layout, and tolerances from disturbed runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from course_lib.parts import PartialGradient
from course_lib.pipeline_parallel import Pipeline

_IN_FRONT = re.compile(r"^((module|_orig_mod|_fsdp_wrapped_module)(\.|$))+")
_INSIDE = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(\.|$)")
_STAGE = re.compile(r"^stages\.\d+\.")  # of a Pipeline
REPEATS = 4
"""How many disturbed runs the tolerances come from."""
OF_ROWS = ("input", "output", "mask", "dropout")
"""The kinds that have a part for each row of the batch."""


class Key(NamedTuple):
    """The key of a tensor: the step (0, 1, …), the kind, and the name."""

    step: int
    kind: str
    name: str


@dataclass
class Record:
    """The tensors that one rank computed. It can be pickled, so ranks can send it.

    Attributes:
        tensors: the recorded tensors, in the order of execution. An output has one tensor for each
            run of the layer; other kinds have one. For gradients there is also the kind "share":
            what each backward of this rank added, before anything was communicated.
        options: for each parameter in the optimizer: its learning rate and so on. Under
            the kind "mode", each layer that differs in training says whether it is in training.
        frozen: the parameters that need no gradient.
        noise: for a trusted run: the records of the disturbed runs.
        dtype: for a trusted run: the dtype whose rounding disturbed the runs; None: each value's
            own.

    """

    rank: int = 0
    world_size: int = 1
    tensors: dict[Key, list[Tensor]] = field(default_factory=dict)
    options: dict[Key, dict[str, Any]] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    noise: list[Record] = field(default_factory=list)
    dtype: torch.dtype | None = None

    def coarsest(self) -> float:
        """Return the largest relative rounding of the model's results: 1.2e-7 for float32."""
        kinds = ("output", "gradient", "share", "weight")
        dtypes = {t.dtype for key, ts in self.tensors.items() if key.kind in kinds for t in ts}
        return max((torch.finfo(d).eps for d in dtypes if d.is_floating_point), default=0.0)

    def value(self, key: Key) -> Tensor | None:
        """Return a tensor of all its runs; for an update, return the change of the weight."""
        values = self.tensors.get(key)
        if values is None:
            return None
        if key.kind == "update":
            (before,) = self.tensors.get(Key(key.step, "weight", key.name), [None])
            return None if before is None else values[0].double() - before.double()
        if len(values) == 1:
            return values[0]
        if values[0].dim() and len({value.shape[1:] for value in values}) == 1:
            return torch.cat(values)
        return torch.cat([value.flatten() for value in values])


class _Disturbance(NamedTuple):
    seed: int
    dtype: torch.dtype | None


_disturbance: ContextVar[_Disturbance | None] = ContextVar("_disturbance", default=None)


@contextmanager
def record(model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[Record]:
    """Record the steps that are taken in this block, on this rank.

    A step ends with `optimizer.step()`. Without an `optimizer`, or if it took no step, the block is
    one step. Enter the block after wrapping the model, before ``zero_grad()`` and forward.

    Args:
        model: the model that the step calls, wrapped or not.
        optimizer: the optimizer that the step calls.

    """
    recorder = _Recorder(model, optimizer)
    try:
        yield recorder.record
        if not recorder.step:
            recorder.before_step()
            recorder.after_step()
    finally:
        for handle in recorder.handles:
            handle.remove()
        for module, dropout in recorder.dropouts:
            module.dropout = dropout


def trusted_run(step: Callable[[], Record], dtype: torch.dtype | None = None) -> Record:
    """Return the record of `step()` on one rank, with disturbed runs for the tolerances.

    `step` builds model, optimizer and batch, runs inside ``with record(…) as recorded``, and
    returns `recorded`. It is called ``1 + REPEATS`` times with the same random numbers, and must
    build everything again each time. In all calls except the first, every value is disturbed by a
    rounding of its dtype. Give `dtype` if the ranks compute in a coarser dtype than the trusted run
    (bfloat16): the disturbance is then a rounding of `dtype`. If the ranks use ``torch.autocast``,
    use it in `step` as well, and give its dtype.

    Raises ValueError if `step` does not start from the same weights each time.
    """
    state = torch.get_rng_state()
    trusted = step()
    trusted.dtype = dtype
    for seed in range(REPEATS):
        torch.set_rng_state(state)
        token = _disturbance.set(_Disturbance(seed, dtype))
        try:
            trusted.noise.append(step())
        finally:
            _disturbance.reset(token)
    for key, tensors in trusted.tensors.items():
        if key.kind == "weight" and key.step == 0 and tensors[0].is_floating_point():
            first, again = tensors[0].double(), trusted.noise[0].tensors[key][0].double()
            eps = torch.finfo(dtype or tensors[0].dtype).eps
            if float((again - first).abs().max()) > 4 * eps * float(first.abs().max()):
                raise ValueError(
                    f"{key.name} does not begin with the same values each time that the step is "
                    "called: build the model inside the step, from a seed"
                )
    return trusted


class _Recorder:
    """The hooks of one `record`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        started = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if started else (0, 1)
        self.record, self.model, self.optimizer = Record(rank, world_size), model, optimizer
        self.step = 0
        self.began = False
        self.disturb = _disturb(_disturbance.get())
        self.handles: list[Any] = []
        self.names: dict[nn.Parameter, list[str]] = {}  # a tied parameter has several
        for name, param in self._parameters():
            self.names.setdefault(param, []).append(name)
            with torch.no_grad():
                param.copy_(self.disturb(param))
            if not param.requires_grad:
                self.record.frozen.add(name)
        for param, names in self.names.items():
            if param.requires_grad and param.is_leaf:
                hook = self._on_gradient(names)
                self.handles.append(param.register_hook(hook))  # type: ignore[no-untyped-call]
        # If a wrapper and its module have the same name, the last one wins.
        modules = {self._plain(name): module for name, module in model.named_modules()}
        for name, module in modules.items():
            before, after = self._before(name), self._after(name)
            self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self.handles.append(module.register_forward_hook(after))
        inside = (nn.MultiheadAttention, nn.RNNBase)
        self.dropouts = [(m, m.dropout) for m in model.modules() if isinstance(m, inside)]
        for module, _ in self.dropouts:
            module.dropout = 0.0
        if optimizer is not None:
            before_step = optimizer.register_step_pre_hook(lambda *_: self.before_step())
            after_step = optimizer.register_step_post_hook(lambda *_: self.after_step())
            self.handles += [before_step, after_step]

    def _plain(self, name: str) -> str:
        """Return a name without the prefixes of wrappers."""
        name = _INSIDE.sub("", _IN_FRONT.sub("", name))
        return _STAGE.sub("", name) if isinstance(self.model, Pipeline) else name

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        params = self.model.named_parameters(remove_duplicate=False)
        return [(self._plain(name), param) for name, param in params]

    def _save(self, kind: str, name: str, tensor: Tensor, *, append: bool = False) -> None:
        """Save a copy of this rank's part, on the CPU."""
        key = Key(self.step, kind, name)
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        earlier = self.record.tensors.get(key, []) if append else []
        self.record.tensors[key] = [*earlier, local.detach().to("cpu", copy=True)]

    def begin(self) -> None:
        """Record the weights, at the first forward of a step."""
        if self.began:
            return
        self.began = True
        for name, param in self._parameters():
            self._save("weight", name, param)

    def _before(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if _in_backward():
                return None  # forward runs again to recompute activations
            self.begin()
            if isinstance(module, _DropoutNd | _NormBase):
                key = Key(self.step, "mode", name)
                self.record.options[key] = {"training": module.training}
            if name:
                return None
            for place, tensor in enumerate(_tensors_in((args, kwargs))):
                self._save("input", f"input {place}" if place else "input", tensor, append=True)
            return tree_map(self.disturb, (args, kwargs))

        return hook

    def _after(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            drops = isinstance(module, _DropoutNd) and module.training and module.p > 0
            if _in_backward():  # disturbed again, so that it saves as many tensors as forward did
                return args[0] if drops else tree_map(self.disturb, output)
            if drops:
                self._save("dropout", name, args[0], append=True)
                self._save("mask", name, output != 0, append=True)
                return args[0]
            for place, tensor in enumerate(_tensors_in(output)):
                if tensor.is_floating_point():
                    label = f"{name or 'the model'}{f'[{place}]' if place else ''}"
                    self._save("output", label, tensor, append=True)
            return tree_map(self.disturb, output)

        return hook

    def _on_gradient(self, names: list[str]) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            for name in names:
                self._save("share", name, gradient, append=True)
            disturbed: Tensor = self.disturb(gradient)
            return disturbed

        return hook

    @torch.no_grad()
    def before_step(self) -> None:
        """Record the gradients as the optimizer sees them, in the order of backward."""
        self.begin()
        params = dict(self._parameters())
        with_share = [key.name for key in self.record.tensors if key[:2] == (self.step, "share")]
        for name in dict.fromkeys([*with_share, *reversed(params)]):
            gradient = params[name].grad
            if isinstance(gradient, PartialGradient):
                gradient = gradient.held()
            if gradient is not None:
                self._save("gradient", name, gradient)
        for group in self.optimizer.param_groups if self.optimizer else ():
            options = {k: v for k, v in group.items() if isinstance(v, bool | int | float | tuple)}
            for param in group["params"]:
                for name in self.names.get(param, ()):
                    self.record.options[Key(self.step, "option", name)] = options

    @torch.no_grad()
    def after_step(self) -> None:
        """Record the results of the step: optimizer state, parameters, buffers."""
        for name, value in self._state():
            self._save("state", name, value)
        for name, param in self._parameters():
            self._save("update", name, param)
        for name, buffer in self.model.named_buffers():
            self._save("buffer", self._plain(name), buffer)
        self.began, self.step = False, self.step + 1

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield ``name.exp_avg`` and its tensor; for a sharded optimizer as on one rank."""
        if self.optimizer is None:
            return
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        state: dict[Any, Any] = dict(self.optimizer.state)
        if not state:
            try:
                by_number = self.optimizer.state_dict()["state"]
            except RuntimeError:
                return  # PyTorch's ZeRO: the state would have to be gathered first
            state = {params[number]: values for number, values in by_number.items()}
        for param in params:
            for label, value in state.get(param, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    for name in self.names.get(param, ()):
                        yield f"{name}.{label}", value


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _in_backward() -> bool:
    return int(torch._C._current_graph_task_id()) != -1


def _disturb(disturbance: _Disturbance | None) -> Callable[[Any], Any]:
    """Return a function that moves each number and its gradient up or down by a rounding."""
    if disturbance is None:
        return lambda value: value
    random = torch.Generator().manual_seed(disturbance.seed)

    def moved(value: Tensor) -> Tensor:
        eps = torch.finfo(disturbance.dtype or value.dtype).eps
        signs = torch.randint(0, 2, value.shape, generator=random).to(value) * 2 - 1
        return value * (1 + max(eps, torch.finfo(value.dtype).eps) * signs)

    def disturb(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        result = moved(value)
        if result.requires_grad and result.grad_fn is not None:
            result.register_hook(moved)  # type: ignore[no-untyped-call]
        return result

    return disturb
