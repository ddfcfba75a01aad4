"""The reducer's errors when backward did something that would make the replicas differ.

Each function returns a RuntimeError, for the caller to raise. The message names the rank and, if
there is one, the parameter, and says what to do. It ends with the message of PyTorch's DDP for the
same mistake, so that a web search finds other people's questions.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from course_lib.gradient_sync import verify_first_order

_SHOWN = 8


def nothing_to_train() -> RuntimeError:
    """Return the error for a module without a parameter that needs a gradient."""
    return _error(
        "no parameter of this module needs a gradient, so there is nothing to synchronise",
        "Use the module without a wrapper.",
        "DistributedDataParallel is not needed when a module doesn't have any parameter that "
        "requires a gradient.",
    )


def unfinished_backward() -> RuntimeError:
    """Return the error for a forward after a backward that an exception ended half-way."""
    return _error(
        "the last backward() did not end, so some buckets were sent and others not",
        "After an exception in backward, build the model and its wrapper again.",
    )


def second_backward(name: str) -> RuntimeError:
    """Return the error for a gradient of `name` that arrives after it has been averaged."""
    return _error(
        f"backward() reached '{name}' a second time after one forward; its gradient was already "
        "averaged",
        "Call the wrapped model before each backward(), and not its .module. To add up gradients, "
        "put all but the last forward and backward in `with model.no_sync():`. If reentrant "
        "checkpointing uses shared weights several times, in the same way in every step, wrap "
        "the model with static_graph=True.",
        "Expected to mark a variable ready only once.",
    )


def sparse_gradient(name: str) -> RuntimeError:
    """Return the error for a sparse gradient of `name`."""
    return _error(
        f"the gradient of '{name}' is sparse",
        "Buckets are dense: use nn.Embedding(…, sparse=False).",
    )


def changed_parameter(name: str, gradient: Tensor, view: Tensor) -> RuntimeError:
    """Return the error for a gradient whose dtype or shape differs from its bucket view."""
    return _error(
        f"'{name}' has a gradient of {tuple(gradient.shape)} {gradient.dtype}, but the parameter "
        f"was {tuple(view.shape)} {view.dtype} when it was wrapped",
        "Change dtype or shape first (with model.half(), for example), and then wrap the model.",
    )


def changed_layout(name: str, now: Sequence[int], then: Sequence[int]) -> RuntimeError:
    """Return the error for a parameter whose memory order has changed since it was wrapped."""
    return _error(
        f"'{name}' has the strides {tuple(now)}, but had {tuple(then)} when it was wrapped",
        "Change the memory format first (model.to(memory_format=…)), and then wrap the model.",
    )


def join_of_several() -> NotImplementedError:
    """Return the error for a wrapper that is passed to PyTorch's `Join`."""
    return NotImplementedError(
        "the course's DistributedDataParallel does not support Join([model, …]): a rank that has "
        "finished takes part in the communication of the others' forwards and backwards, but not "
        "in other communication of a step. Use `with model.join():` and an optimizer whose step() "
        "does not communicate, or PyTorch's DistributedDataParallel."
    )


def wrapped_anew() -> RuntimeError:
    """Return the error for a forward of a wrapper whose module was wrapped again later."""
    return _error(
        "this module, or a part of it, has been wrapped again, and gradients now go to the newer "
        "wrapper",
        "Call that wrapper, or wrap this module again.",
    )


def unused_parameters(names: Sequence[str]) -> RuntimeError:
    """Return the error for parameters that got no gradient, although the wrapper expected one."""
    shown = ", ".join(f"'{name}'" for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return _error(
        f"backward() gave no gradient to {shown}{more}",
        "If the loss should not depend on them, wrap the model with find_unused_parameters=True "
        "(zeros are averaged in their place), or freeze them before wrapping it. If you call "
        "backward() several times after one forward, add up the losses and call it once.",
        "Expected to have finished reduction in the prior iteration before starting a new one.",
    )


def changed_graph(name: str, seldom: bool) -> RuntimeError:
    """Return the error for more or (`seldom`) fewer additions to a gradient than in step one."""
    return _error(
        f"backward() added to the gradient of '{name}' {'less' if seldom else 'more'} often than "
        "in the first step, but the model is wrapped with static_graph=True",
        "If the loss depends on different parameters in every step, wrap the model with "
        "find_unused_parameters=True instead.",
        "Your training graph has changed in this iteration",
    )


def verify_gradient(name: str, param: Tensor, strides: Sequence[int], view: Tensor) -> None:
    """Raise the error for a gradient of `param` that cannot be copied to its place, `view`.

    `strides` are the parameter's strides when it was wrapped.
    """
    gradient = param.grad
    assert gradient is not None
    verify_first_order(gradient, f"'{name}'")
    if gradient.is_sparse:
        raise sparse_gradient(name)
    if gradient.dtype != view.dtype or gradient.shape != view.shape:
        raise changed_parameter(name, gradient, view)
    now = param.stride()
    # The stride of a dimension of size 1 has no meaning.
    if now != tuple(strides) and any(
        a != b for a, b, size in zip(now, strides, view.shape, strict=True) if size > 1
    ):
        raise changed_layout(name, now, strides)


def _error(what: str, advice: str, pytorch: str = "") -> RuntimeError:
    other = f' (PyTorch: "{pytorch}")' if pytorch else ""
    return RuntimeError(f"rank {dist.get_rank()}: {what}. {advice}{other}")
