"""Recording: save what a step computes, by name.

    weight → input → output of each layer → gradient → option → state → update → buffer

This is the order of execution. `record` saves the tensors with hooks, so the step itself does not
change. Names are those of `model.named_parameters()` and `model.named_modules()`, without the
prefixes of wrappers (``module.``). Every tensor is copied to the CPU.

Two things are different while a step is recorded:

- **Dropout drops nothing.** Ranks cannot draw the masks that one rank draws. So `nn.Dropout`
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
from collections.abc import Callable, Iterable, Iterator
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
        passes: for outputs: during which forward of the model (0, 1, …) each was computed.
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
    passes: dict[Key, list[int]] = field(default_factory=dict)
    options: dict[Key, dict[str, Any]] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    noise: list[Record] = field(default_factory=list)
    dtype: torch.dtype | None = None

    def coarsest(self) -> float:
        """Return the largest relative rounding of the model's results: 1.2e-7 for float32."""
        kinds = ("output", "gradient", "share", "weight")
        seen = [t.dtype for key, ts in self.tensors.items() if key.kind in kinds for t in ts]
        return max((torch.finfo(d).eps for d in set(seen) if d.is_floating_point), default=0.0)


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
        if not recorder.stepped:
            recorder.before_step()
            recorder.after_step()
    finally:
        for handle in recorder.handles:
            handle.remove()
        for module, dropout in recorder.dropouts:
            module.dropout = dropout


def trusted_run(
    step: Callable[[], Record], repeats: int = 4, dtype: torch.dtype | None = None
) -> Record:
    """Return the record of `step()` on one rank, with disturbed runs for the tolerances.

    `step` builds model, optimizer and batch, runs inside ``with record(…) as recorded``, and
    returns `recorded`. It is called ``1 + repeats`` times with the same random numbers, and must
    build everything again each time. In all calls except the first, every value is disturbed by a
    rounding of its dtype. Give `dtype` if the ranks compute in a coarser dtype than the trusted run
    (bfloat16): the disturbance is then a rounding of `dtype`. If the ranks use ``torch.autocast``,
    use it in `step` as well, and give its dtype.

    Raises ValueError if `step` does not start from the same weights each time.
    """
    state = torch.get_rng_state()
    trusted = step()
    trusted.dtype = dtype
    for seed in range(repeats):
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


def _plain(model: nn.Module) -> Callable[[str], str]:
    """Return a function that removes the prefixes of wrappers from a name."""
    stage = re.compile(r"^stages\.\d+\.") if isinstance(model, Pipeline) else None

    def plain(name: str) -> str:
        name = _INSIDE.sub("", _IN_FRONT.sub("", name))
        return stage.sub("", name) if stage else name

    return plain


def _here(tensor: Tensor) -> Tensor:
    """Return a copy of this rank's part, on the CPU."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().to("cpu", copy=True)


class _Recorder:
    """The hooks of one `record`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        started = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if started else (0, 1)
        self.record, self.model, self.optimizer = Record(rank, world_size), model, optimizer
        self.name, self.step, self.stepped = _plain(model), 0, False
        self.depth, self.began = 0, False
        self.runs: dict[str, int] = {}  # how often the module at the top ran in this step
        self.count = 0
        self.disturb = _disturb(_disturbance.get())
        self.handles: list[Any] = []
        for each, param in self._parameters():
            with torch.no_grad():
                param.copy_(self.disturb(param))
            if not param.requires_grad:
                self.record.frozen.add(each)
        for params in _by_identity(self._parameters()).values():
            if params[0][1].requires_grad and params[0][1].is_leaf:
                hook = self._on_gradient([each for each, _ in params])
                self.handles.append(params[0][1].register_hook(hook))  # type: ignore[no-untyped-call]
        # If a wrapper and its module have the same name, the last one wins.
        self.modules = {self.name(each): module for each, module in model.named_modules()}
        for each, module in self.modules.items():
            before, after = self._before(each), self._after(each)
            self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self.handles.append(module.register_forward_hook(after, always_call=True))
        inside = (nn.MultiheadAttention, nn.RNNBase)
        self.dropouts = [(m, m.dropout) for m in model.modules() if isinstance(m, inside)]
        for module, _ in self.dropouts:
            module.dropout = 0.0
        if optimizer is not None:
            before_step = optimizer.register_step_pre_hook(lambda *_: self.before_step())
            after_step = optimizer.register_step_post_hook(lambda *_: self.after_step())
            self.handles += [before_step, after_step]

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        named = self.model.named_parameters(remove_duplicate=False)
        return [(self.name(each), param) for each, param in named]

    def _keep(self, kind: str, name: str, tensor: Tensor, *, more: bool = False) -> None:
        key = Key(self.step, kind, name)
        kept = self.record.tensors.setdefault(key, []) if more else []
        kept.append(_here(tensor))
        self.record.tensors[key] = kept
        if kind in ("input", "output", "mask", "dropout"):
            self.record.passes.setdefault(key, []).append(self.count)

    def begin(self) -> None:
        """Record the weights, at the first forward of a step."""
        if self.began:
            return
        self.began, self.runs = True, {}
        for each, param in self._parameters():
            self._keep("weight", each, param)
            sharded = isinstance(param.grad, PartialGradient)
            if param.grad is not None and not sharded and self.step == 0:
                self._keep("left over", each, param.grad)

    def _before(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if _in_backward():
                return None  # forward runs again to recompute activations
            self.begin()
            if self.depth == 0:
                self.count = self.runs[name] = self.runs.get(name, -1) + 1
            self.depth += 1
            if isinstance(module, _DropoutNd | _NormBase):
                key = Key(self.step, "mode", name)
                self.record.options[key] = {"training": module.training}
            if name:
                return None
            leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            for place, tensor in enumerate(leaves):
                self._keep("input", f"input {place}" if place else "input", tensor, more=True)
            return tree_map(self.disturb, (args, kwargs)) if self.disturb is not _as_it_is else None

        return hook

    def _after(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if _in_backward():  # disturbed again, so that it saves as many tensors as forward did
                output = args[0] if _is_dropout(module) else tree_map(self.disturb, output)
                return output
            self.depth -= 1
            if output is None:
                return None
            if _is_dropout(module):
                self._keep("dropout", name, args[0], more=True)
                self._keep("mask", name, output != 0, more=True)
                return args[0]
            leaves = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
            for place, tensor in enumerate(leaves):
                if tensor.is_floating_point():
                    each = f"{name or 'the model'}{f'[{place}]' if place else ''}"
                    self._keep("output", each, tensor, more=True)
            return None if self.disturb is _as_it_is else tree_map(self.disturb, output)

        return hook

    def _on_gradient(self, names: list[str]) -> Callable[[Tensor], Tensor | None]:
        def hook(gradient: Tensor) -> Tensor | None:
            for each in names:
                self._keep("share", each, gradient, more=True)
            return None if self.disturb is _as_it_is else self.disturb(gradient)

        return hook

    @torch.no_grad()
    def before_step(self) -> None:
        """Record the gradients as the optimizer sees them, in the order of backward."""
        self.begin()
        params = dict(self._parameters())
        first = [key.name for key in self.record.tensors if key[:2] == (self.step, "share")]
        for each in dict.fromkeys([*first, *reversed(params)]):
            gradient = params[each].grad
            if isinstance(gradient, PartialGradient):
                gradient = gradient.held()
            if gradient is not None:
                self._keep("gradient", each, gradient)
        for group in self.optimizer.param_groups if self.optimizer else ():
            plain = {k: v for k, v in group.items() if _is_option(v)}
            for each in self._names(group["params"]):
                self.record.options[Key(self.step, "option", each)] = plain

    @torch.no_grad()
    def after_step(self) -> None:
        """Record the results of the step: optimizer state, parameters, buffers."""
        for each, value in self._state():
            self._keep("state", each, value)
        for each, param in self._parameters():
            self._keep("update", each, param)
        for each, buffer in self.model.named_buffers():
            self._keep("buffer", self.name(each), buffer)
        self.stepped, self.began, self.step = True, False, self.step + 1

    def _names(self, params: Iterable[Tensor]) -> list[str]:
        known = _by_identity(self._parameters())
        return [each for param in params for each, _ in known.get(id(param), [])]

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield ``name.exp_avg`` and its tensor; for a sharded optimizer as on one rank."""
        if self.optimizer is None:
            return
        groups = self.optimizer.param_groups
        state: dict[Any, Any] = {id(param): value for param, value in self.optimizer.state.items()}
        if not state:
            try:
                kept = self.optimizer.state_dict()["state"]
            except RuntimeError:
                return  # PyTorch's ZeRO: the state would have to be gathered first
            params = [param for group in groups for param in group["params"]]
            state = {id(params[number]): value for number, value in kept.items()}
        for group in groups:
            for param in group["params"]:
                for what, value in state.get(id(param), {}).items():
                    if isinstance(value, Tensor) and value.dim() > 0:
                        for each in self._names([param]):
                            yield f"{each}.{what}", value


def _by_identity(
    named: Iterable[tuple[str, nn.Parameter]],
) -> dict[int, list[tuple[str, nn.Parameter]]]:
    found: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, param in named:
        found.setdefault(id(param), []).append((name, param))
    return found


def _is_option(value: Any) -> bool:
    return isinstance(value, bool | int | float | tuple) and not isinstance(value, Tensor)


def _is_dropout(module: nn.Module) -> bool:
    return isinstance(module, _DropoutNd) and module.training and module.p > 0


def _in_backward() -> bool:
    return int(torch._C._current_graph_task_id()) != -1


def _as_it_is(value: Any) -> Any:
    return value


def _disturb(how: _Disturbance | None) -> Callable[[Any], Any]:
    """Return a function that moves each number and its gradient up or down by a rounding."""
    if how is None:
        return _as_it_is
    random = torch.Generator().manual_seed(how.seed)

    def moved(value: Tensor) -> Tensor:
        eps = torch.finfo(how.dtype or value.dtype).eps
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
