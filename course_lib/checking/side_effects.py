"""Find what a function has changed and must not change; this runs where the verdict is made.

A rank reports the state that a call leaves behind (`effects`). This module compares the report with
what was sent to the rank, and with the state that the rank reports from before the call. Each
effect has a sentence. Most effects may explain a wrong value, so they are reported before it; the
effects of `LATE` cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checking.cases import Wrong
from course_lib.checking.on_ranks.effects import states_from
from course_lib.checking.on_ranks.leaves import tensors_in

SENTENCES = {
    "changed": (
        "the function changes {name}, which must stay as it is",
        "Work on a copy: x = x + 1 makes a new tensor, but x += 1 changes the caller's tensor.",
    ),
    "aliases": (
        "the result shares memory with {name}",
        "If one of them is written to, the other changes, too: return a copy (.clone()).",
    ),
    "history": (
        "the result carries the graph of its computation (requires_grad)",
        "Return a number (loss.item()), or a tensor without history (.detach()): the graph keeps "
        "all activations in memory.",
    ),
    "asks": ("after the call, a tensor of the input requires a gradient", ""),
    "overwritten": (
        "this call has changed the result of an earlier call",
        "Keep nothing from one call to the next: make new tensors.",
    ),
    "random": (
        "the function draws or seeds random numbers of the {name} generator",
        "Other code relies on the state of this generator. Draw random numbers only from the "
        "generator that the function gets, or from one that you make.",
    ),
    "mode": (
        "the function changes the mode of {name} (training or evaluation)",
        "Leave every module in the mode that it had before the call. If you need the other mode, "
        "save model.training first, and restore it.",
    ),
    "requires_grad": ("the function changes which parameters of {name} require a gradient", ""),
    "trainable": (
        "the function changes which of {name} require a gradient",
        "Use torch.no_grad(): autograd records nothing inside it.",
    ),
    "inference": (
        "the function puts tensors that were made in torch.inference_mode() into {name}",
        "Autograd cannot work with such tensors: use torch.no_grad() instead.",
    ),
    "hooks": (
        "the function leaves hooks on {name}",
        "Remove the hooks before you return: otherwise they run again in every later call.",
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
"""Names of the objects that programs watch in addition to their input."""


LATE = ("aliases", "history", "overwritten", "random")
"""Effects that cannot explain a wrong value, so a wrong value is reported before them. If dropout
draws random numbers, the mistake is a model in the wrong mode."""

Effect = tuple[str, Wrong]
"""The effect's code in `SENTENCES`, and the finding."""


def effects_of(
    report: Any, own: Any, value: Any, *, may_change: Sequence[str], rank: int, seed: int
) -> list[Effect]:
    """Return what the function on this rank changed and must not change, most helpful effect first.

    Args:
        report: the rank's report.
        own: the input that was sent to the rank.
        value: the value that the rank's program returned.
        may_change: the keys of `own` that the function may change or return.
        rank: the number of the rank.
        seed: the seed with which the rank's generators began.

    Raises:
        Wrong: `report` does not have the form of a rank's report.

    """
    watched = own if isinstance(own, dict) else {"its input": own}
    watched = {name: each for name, each in watched.items() if name not in may_change}
    try:
        found = list(_effects(report, watched, own, value, seed))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError):
        raise Wrong(f"rank {rank} gave an answer that cannot be read") from None
    made = []
    for code, name in found:
        sentence, hint = SENTENCES[code]
        made.append((code, Wrong(f"rank {rank}: {sentence.format(name=name)}", hint)))
    return made


def raise_first(effects: Sequence[Sequence[Effect]], *, explaining: bool) -> None:
    """Raise the first finding of the first rank that has one.

    Args:
        effects: the effects of each rank.
        explaining: whether to look at effects that may explain a wrong value; if not, look at the
            effects of `LATE`.

    """
    for of_one_rank in effects:
        for code, wrong in of_one_rank:
            if (code not in LATE) is explaining:
                raise wrong


def _effects(
    report: Any, watched: Mapping[str, Any], own: Any, value: Any, seed: int
) -> Iterator[tuple[str, str]]:
    """Yield the code of each effect, and the name of what the effect changed.

    Raises:
        ValueError: `report` does not have the form of a rank's report. Reading it may also raise
            other errors, such as KeyError.

    """
    sent = {name: list(tensors_in(each)) for name, each in watched.items()}
    if set(report["inputs"]) != set(sent):
        raise ValueError("other inputs")
    for name, tensors in sent.items():
        if not _all_same(tensors, report["inputs"][name]):
            yield "changed", name
    held = set(_as_many(report["addresses"]["of the output"], tensors_in(value))) - {0}
    for name, tensors in sent.items():
        if held & set(_as_many(report["addresses"]["of the inputs"][name], tensors)):
            yield "aliases", name
    for name, (before, after) in _named(report["parameters"]):
        if not _all_same(before["values"], after["values"]):
            yield "changed", name
        if before["requires_grad"] != after["requires_grad"]:
            yield "trainable", name
        if after["hooks"]:
            yield "hooks", name
        if after["inference"]:
            yield "inference", name
    for name, (before, after, inference) in _named(report["modules"]):
        for code in _ON_MODULES:
            if before[code] != after[code]:
                yield code, name
        if inference:
            yield "inference", name
    for name, state in states_from(seed).items():
        if report["generators"][name] != state:
            yield "random", name
    if report["gradients"] is not True:
        yield "grad_mode", "disabled"
    if report["dtype"] != "torch.float32":
        yield "dtype", ""
    if any(_as_many(report["asks"], tensors_in(own))):
        yield "asks", ""
    if report["history"] is not False:
        yield "history", ""
    before, after = report["kept"]
    if not _all_same(before, after):
        yield "overwritten", ""


def _named(report: Any) -> list[tuple[str, Any]]:
    pairs = list(report.items())
    if any(name not in NAMES for name, _ in pairs):
        raise ValueError("nothing that a program watches")
    return pairs


def _as_many(report: Any, tensors: Any) -> list[Any]:
    """Return the report about some tensors if it has one item per tensor, else raise ValueError."""
    if not isinstance(report, list) or len(report) != len(list(tensors)):
        raise ValueError("of other tensors")
    return report


def _all_same(tensors: Any, others: Any) -> bool:
    pairs = zip(tensors, _as_many(others, tensors), strict=True)
    return all(isinstance(a, Tensor) and isinstance(b, Tensor) and same(a, b) for a, b in pairs)


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and values; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point():
        a = a.detach()
        return torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    return torch.equal(a.detach(), b)
