"""Report what a function leaves behind; this runs on the rank and judges nothing.

The report comes from a process that belongs to the student's code, which may report anything. So it
contains facts and no verdicts: the input's tensors as they are now, addresses, states of random
generators, and what there was before and after the call. `side_effects`, where the verdict is made,
compares the facts with what was sent. To falsify tensors and states is as much work as to change
nothing: a student who sends back copies made before the call could have worked on copies. Counts,
such as those of hooks, only the rank can know. So a rank hides this package from the student's code
(`autograder.inside.examinee`), which is a hurdle and no proof.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from course_lib.checking.on_ranks.leaves import tensors_in
from course_lib.ranks.wire import NotPlainError, encode


class Watch:
    """Records the state before the student's function runs, and reports the state afterwards.

    Args:
        watched: name → the value that must not change. Its tensors are collected at once, so
            later changes of the containers do not matter.
        seed: seeds the generators of random numbers, so that their state after the call is known
            where the verdict is made; ``None`` to leave them as they are.

    """

    def __init__(self, watched: Mapping[str, Any], seed: int | None) -> None:
        # An earlier case may have changed these settings, and may have ended with an exception.
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        self._tensors = {name: list(tensors_in(value)) for name, value in watched.items()}
        self._parameters: dict[str, tuple[Sequence[Tensor], bool, dict[str, Any]]] = {}
        self._modules: dict[str, tuple[nn.Module, dict[str, Any]]] = {}
        if seed is not None:
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)

    def add_module(self, name: str, module: nn.Module) -> None:
        """Watch what a training step must not change: mode, structure, hooks."""
        self._modules[name] = module, aspects(module)

    def add_parameters(
        self, name: str, parameters: Sequence[Tensor], *, values: bool = True
    ) -> None:
        """Watch parameters. Their gradients may change; without `values`, they may change, too."""
        self._parameters[name] = parameters, values, _of_parameters(parameters, values)

    def report(self, output: Any) -> dict[str, Any]:
        """Return the state now, and partly the state before; `output` is what the program gave."""
        return {
            "inputs": {name: sent_back(tensors) for name, tensors in self._tensors.items()},
            "addresses": {
                "of the inputs": {name: _addresses(each) for name, each in self._tensors.items()},
                "of the output": _addresses(tensors_in(output)),
            },
            "parameters": {
                name: [before, _of_parameters(parameters, values)]
                for name, (parameters, values, before) in self._parameters.items()
            },
            "modules": {
                name: [before, aspects(module), any(map(_beyond_autograd, module.parameters()))]
                for name, (module, before) in self._modules.items()
            },
            "generators": {
                "torch": _digest(torch.get_rng_state()),
                "Python": _digest(random.getstate()),
                "NumPy": _digest(np.random.get_state()),
            },
            "history": any(tensor.requires_grad for tensor in tensors_in(output)),
            "gradients": torch.is_grad_enabled(),
            "dtype": str(torch.get_default_dtype()),
        }


def sent_back(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return copies of the tensors; ``None`` for a tensor that can no longer be sent."""
    return [_copy(tensor) for tensor in tensors]


def _copy(tensor: Tensor) -> Tensor | None:
    try:
        encode(tensor)
    except NotPlainError:
        return None
    return tensor.detach().clone()


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Return where the memory of each tensor begins; 0 for a tensor without numbers."""
    return [t.untyped_storage().data_ptr() if t.numel() else 0 for t in tensors]


def _of_parameters(parameters: Sequence[Tensor], values: bool) -> dict[str, Any]:
    return {
        "values": sent_back(parameters) if values else [],
        "requires_grad": [each.requires_grad for each in parameters],
        "hooks": sum(map(_hooks_on, parameters)),
        "inference": any(map(_beyond_autograd, parameters)),
    }


def aspects(module: nn.Module) -> dict[str, Any]:
    """Return what a function must not change of a module, by its code in `SENTENCES`."""
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


def states_from(seed: int) -> dict[str, str]:
    """Return name of a generator → the state that `Watch.report` gives if nobody has drawn."""
    return {
        "torch": _digest(torch.Generator().manual_seed(seed).get_state()),
        "Python": _digest(random.Random(seed).getstate()),
        "NumPy": _digest(np.random.RandomState(seed).get_state()),
    }


def _digest(state: Any) -> str:
    if isinstance(state, Tensor):
        state = [state.numpy()]
    words = [each.tobytes() if isinstance(each, np.ndarray) else each for each in state]
    return hashlib.sha256(repr(words).encode()).hexdigest()
