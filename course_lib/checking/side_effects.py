"""What a right function leaves as it was: compared where the verdict is made.

A rank tells what it has left behind (`effects`). Here that is compared with what the rank was sent,
and with what it told before. The first effect that is found is the verdict's, with a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checking.cases import Wrong
from course_lib.checking.on_ranks.effects import GENERATORS, tensors_in

SENTENCES = {
    "changed": (
        "the function changes {name}, which must stay as it is",
        "Work on a copy: x = x + 1 makes a new tensor, x += 1 writes into the one that came in.",
    ),
    "aliases": (
        "what comes back shares memory with {name}",
        "Writing into one of them changes the other: return a copy (.clone()).",
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


_ON_MODULES = ("mode", "structure", "requires_grad", "hooks")
NAMES = ("the model", "the parameters", "the matrix")
"""What programs watch beside their input."""


def expect_no_effects(
    told: Any, own: Any, value: Any, *, may_change: Sequence[str], rank: int
) -> None:
    """Raise `Wrong` for the first thing that the function on this rank did not leave as it was.

    Args:
        told: by the rank.
        own: what it was sent.
        value: what its program returned.
        may_change: the keys of `own` that the function may change or return.
        rank: which it is.

    Raises:
        Wrong: something is changed, or `told` is not what a rank tells.

    """
    watched = own if isinstance(own, dict) else {"its input": own}
    watched = {name: each for name, each in watched.items() if name not in may_change}
    try:
        found = _first_effect(told, watched, own, value)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise Wrong(f"rank {rank} answered nonsense") from None
    if found is not None:
        sentence, hint = SENTENCES[found[0]]
        raise Wrong(f"rank {rank}: {sentence.format(name=found[1])}", hint)


def _first_effect(
    told: Any, watched: Mapping[str, Any], own: Any, value: Any
) -> tuple[str, str] | None:
    """Return the most telling effect and the name of what it befell.

    Raises:
        ValueError: `told` is not what a rank tells; also the other errors of looking into it.

    """
    sent = {name: list(tensors_in(each)) for name, each in watched.items()}
    if set(told["inputs"]) != set(sent):
        raise ValueError("other inputs")
    for name, tensors in sent.items():
        if not _all_same(tensors, told["inputs"][name]):
            return "changed", name
    held = set(_as_many(told["addresses"]["of the output"], tensors_in(value))) - {0}
    for name, tensors in sent.items():
        if held & set(_as_many(told["addresses"]["of the inputs"][name], tensors)):
            return "aliases", name
    for name, (before, after) in _named(told["parameters"]):
        if not _all_same(before["values"], after["values"]):
            return "changed", name
        if before["requires_grad"] != after["requires_grad"]:
            return "trainable", name
        if after["hooks"]:
            return "hooks", name
        if after["inference"]:
            return "inference", name
    for name, (before, after, inference) in _named(told["modules"]):
        for code in _ON_MODULES:
            if before[code] != after[code]:
                return code, name
        if inference:
            return "inference", name
    for name in GENERATORS:
        before, after = told["generators"][name]
        if before != after:
            return "random", name
    if told["gradients"] is not True:
        return "grad_mode", "disabled"
    if told["dtype"] != "torch.float32":
        return "dtype", ""
    if any(_as_many(told["asks"], tensors_in(own))):
        return "asks", ""
    before, after = told["kept"]
    return None if _all_same(before, after) else ("overwritten", "")


def _named(told: Any) -> list[tuple[str, Any]]:
    pairs = list(told.items())
    if any(name not in NAMES for name, _ in pairs):
        raise ValueError("nothing that a program watches")
    return pairs


def _as_many(told: Any, tensors: Any) -> list[Any]:
    """Return what was told of some tensors, if it is as many."""
    if not isinstance(told, list) or len(told) != len(list(tensors)):
        raise ValueError("of other tensors")
    return told


def _all_same(tensors: Any, others: Any) -> bool:
    pairs = zip(tensors, _as_many(others, tensors), strict=True)
    return all(isinstance(a, Tensor) and isinstance(b, Tensor) and same(a, b) for a, b in pairs)


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same bits of the same form; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point():
        a = a.detach()
        return torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    return torch.equal(a.detach(), b)
