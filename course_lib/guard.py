"""The guard: parameters are still what they were when a wrapper took them.

    >>> from course_lib.guard import Guard
    >>> guard = Guard(model)
    >>> guard.verify()  # before each forward: an error if the model now has other parameters

A wrapper (DDP, a sharded optimizer, fully sharded parameters) has hooks on parameters, buffers for
their gradients, and often the memory in which they lie. Code between two steps does not know this.
It may replace a parameter, or its memory (`param.data = …`), convert it, freeze it, or give it one
more hook. In one process all of this is right. Behind a wrapper's back, replicas would become
different, or a weight would never be trained, without an error. So at each forward and each step a
wrapper compares:

    which parameters the modules have        `Guard`      others: an error
    what memory for it would look like       `form_of`    the wrapper makes its buffers again, or an
                                                          error
    whether it is trained, and its hooks     `use_of`     the wrapper hooks in again, as the last

Only the host looks, and only at what it knows, so a GPU never waits. It costs less than a hundredth
of a step: benchmarks/README.md has the numbers.
"""

from collections.abc import Collection
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


def rank_error(event: str, advice: str, pytorch: str = "") -> RuntimeError:
    """Return an error for the caller to raise: the rank, what happened, and what to do."""
    other = f' (PyTorch: "{pytorch}")' if pytorch else ""
    return RuntimeError(f"rank {dist.get_rank()}: {event}. {advice}{other}")


class Guard:
    """Notes the parameters of `module`, without those whose names are `ignored`."""

    def __init__(self, module: nn.Module, ignored: Collection[str] = ()) -> None:
        self._module, self._ignored = module, ignored
        self._wrapped = self._named()

    def _named(self) -> dict[str, nn.Parameter]:
        params = self._module.named_parameters(remove_duplicate=False)
        return {name: param for name, param in params if name not in self._ignored}

    def verify(self) -> None:
        """Raise RuntimeError, naming the parameter, if the module now has other parameters."""
        now = self._named()
        if list(map(id, now.values())) == list(map(id, self._wrapped.values())):
            return
        held, wrapped = set(now.values()), set(self._wrapped.values())
        for name, param in self._wrapped.items():
            if param not in held:
                raise replaced(name)
        for name, param in now.items():
            if param not in wrapped:
                raise rank_error(f"'{name}' was not there when the model was wrapped", _INSTEAD)


def replaced(name: str) -> RuntimeError:
    """Return an error for the caller to raise: modules have lost this parameter."""
    return rank_error(f"'{name}' is no longer the parameter that was wrapped", _INSTEAD)


_INSTEAD = (
    "Write values into the parameter (`with torch.no_grad(): param.copy_(values)`, or "
    "load_state_dict without assign=True), and change what the modules have before wrapping them. "
    "Otherwise wrap the module again, and make a new optimizer."
)


def form_of(param: Tensor) -> tuple[Any, ...]:
    """Return what the memory of a parameter's values and of its gradient looks like."""
    return tuple(param.shape), param.stride(), param.dtype, param.device


def use_of(param: Tensor) -> tuple[bool, int]:
    """Return whether a parameter is trained, and how many hooks wait for its gradient's sum."""
    return param.requires_grad, len(getattr(param, "_post_accumulate_grad_hooks", None) or ())


def verify_form(name: str, param: Tensor, form: tuple[Any, ...]) -> None:
    """Raise RuntimeError if the `form_of` the parameter is not `form`."""
    if form_of(param) != form:
        raise rank_error(
            f"{name} had the shape, strides, dtype and device {form}, and now {form_of(param)}",
            "First convert the model (`to`, `half`, a memory format), and then wrap it and make "
            "the optimizer.",
        )
