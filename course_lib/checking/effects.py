"""What a right function leaves as it was: noted before, compared after, on the rank itself.

An effect is a code and the name of what it befell: both come from a rank that nobody trusts, so
where the verdict is made they only choose among the sentences of `SENTENCES`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Effect = tuple[str, str]

SENTENCES = {
    "changed": (
        "the function changes {name}, which is not its to change",
        "Work on a copy: x = x + 1 makes a new tensor, x += 1 writes into the one that came in.",
    ),
    "aliases": (
        "what comes back shares memory with {name}",
        "Whoever writes into the one changes the other: return a copy (.clone()).",
    ),
    "asks": ("a tensor that came in requires a gradient after the call: it did not before", ""),
    "overwritten": (
        "this call has changed what an earlier one returned",
        "Keep nothing from one call to the next: make new tensors.",
    ),
    "random": (
        "the function draws or seeds random numbers of the {name} generator",
        "Others rely on the state of the generators; where a task needs random numbers, draw them "
        "from a generator of your own.",
    ),
    "mode": (
        "{name} came in one mode and is left in another",
        "Do not call .train() or .eval(): the caller has chosen.",
    ),
    "requires_grad": ("the function changes which parameters of {name} require a gradient", ""),
    "trainable": (
        "the function changes which of {name} require a gradient",
        "torch.no_grad() is enough: inside it nothing is recorded.",
    ),
    "inference": (
        "the function puts what was made in torch.inference_mode() into {name}",
        "Autograd can never work with it again: torch.no_grad() is enough.",
    ),
    "hooks": (
        "the function leaves hooks on {name}",
        "They would run once more at every further call: remove them.",
    ),
    "structure": ("the function adds, removes or replaces parameters or buffers of {name}", ""),
    "grad_mode": (
        "gradients are {name} after the call",
        "Use torch.no_grad() as a context: with torch.no_grad(): …",
    ),
    "dtype": ("the function changes torch's default dtype", ""),
}


class Watch:
    """Notes what is there before the student's function runs; says afterwards what has changed."""

    def __init__(self, watched: Mapping[str, Any]) -> None:
        self._tensors = {name: list(tensors_in(value)) for name, value in watched.items()}
        self._before = {
            name: [tensor.detach().clone() for tensor in tensors]
            for name, tensors in self._tensors.items()
        }
        self._parameters: dict[str, tuple[Sequence[Tensor], list[tuple[Tensor | None, bool]]]] = {}
        self._modules: dict[str, tuple[nn.Module, dict[str, Any]]] = {}
        self._states = {name: take() for name, take in _GENERATORS.items()}
        self._grad_mode, self._dtype = torch.is_grad_enabled(), torch.get_default_dtype()

    def add_module(self, name: str, module: nn.Module) -> None:
        """Watch what is not for a training step to change: mode, structure, hooks."""
        self._modules[name] = module, aspects(module)

    def add_parameters(
        self, name: str, parameters: Sequence[Tensor], *, values: bool = True
    ) -> None:
        """Watch parameters whose gradients, and without `values` they too, may be changed."""
        self._parameters[name] = (
            parameters,
            [
                (each.detach().clone() if values else None, each.requires_grad)
                for each in parameters
            ],
        )

    def effects(self, output: Any) -> list[Effect]:
        """Return what is not as it was, the most telling first. `output`: of the program."""
        found: list[Effect] = []
        for name, tensors in self._tensors.items():
            if any(not same(a, b) for a, b in zip(tensors, self._before[name], strict=True)):
                found.append(("changed", name))
        held = {t.untyped_storage().data_ptr() for t in tensors_in(output) if t.numel()}
        for name, tensors in self._tensors.items():
            if any(t.numel() and t.untyped_storage().data_ptr() in held for t in tensors):
                found.append(("aliases", name))
        for name, (parameters, values) in self._parameters.items():
            pairs = list(zip(parameters, values, strict=True))
            if any(not (value is None or same(each, value)) for each, (value, _) in pairs):
                found.append(("changed", name))
            if any(each.requires_grad != needed for each, (_, needed) in pairs):
                found.append(("trainable", name))
            if any(_hooks_on(each) for each in parameters):
                found.append(("hooks", name))
            if any(map(_beyond_autograd, parameters)):
                found.append(("inference", name))
        for name, (module, before) in self._modules.items():
            after = aspects(module)
            found += [(code, name) for code in before if before[code] != after[code]]
            if any(map(_beyond_autograd, module.parameters())):
                found.append(("inference", name))
        for name, state in self._states.items():
            if state != _GENERATORS[name]():
                found.append(("random", name))
        if torch.is_grad_enabled() != self._grad_mode:
            found.append(("grad_mode", "enabled" if torch.is_grad_enabled() else "disabled"))
            torch.set_grad_enabled(self._grad_mode)
        if torch.get_default_dtype() != self._dtype:
            found.append(("dtype", ""))
            torch.set_default_dtype(self._dtype)
        return found


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a plain value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same bits of the same form; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point():
        a = a.detach()
        return torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    return torch.equal(a.detach(), b)


def aspects(module: nn.Module) -> dict[str, Any]:
    """Return what of a module is not for a function to change, by its code in `SENTENCES`."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    parameters = dict(module.named_parameters())
    return {
        "mode": [each.training for each in module.modules()],
        "structure": [(name, id(p)) for name, p in parameters.items()]
        + [name for name, _ in module.named_buffers()],
        "requires_grad": [p.requires_grad for p in parameters.values()],
        "hooks": [len(getattr(each, name)) for each in module.modules() for name in names]
        + [_hooks_on(parameter) for parameter in parameters.values()],
    }


def _hooks_on(parameter: Tensor) -> int:
    after = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return len(parameter._backward_hooks or ()) + len(after or ())


def _beyond_autograd(parameter: Tensor) -> bool:
    gradient = parameter.grad
    return parameter.is_inference() or (gradient is not None and gradient.is_inference())


def _numpy_state() -> tuple[Any, ...]:
    state: tuple[Any, ...] = np.random.get_state()  # type: ignore[assignment]
    return *state[:1], state[1].tobytes(), *state[2:]


# Each returns what `==` compares at once.
_GENERATORS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.get_rng_state().numpy().tobytes(),
    "Python": random.getstate,
    "NumPy": _numpy_state,
}
