"""What a call leaves behind and must not change: a rank reports it, the grader compares.

`Watch` runs on the rank and judges nothing. Its report comes from a process that belongs to the
student's code, which may report anything. So it contains facts and no verdicts: the input's tensors
as they are now, addresses, states of random generators, and what there was before and after the
call. `effects_of` runs where the verdict is made, and compares these facts with what was sent.

To falsify tensors and states is as much work as to change nothing: a student who sends back copies
made before the call could have worked on copies. Counts, such as those of hooks, only the rank can
know. So a rank hides this package from the student's code (`autograder.inside.examinee`), which is
a hurdle and no proof.

A new effect needs its facts in `Watch`, its comparison in `_found`, and its words in `SENTENCES`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from course_lib.checking.on_ranks.leaves import same, tensors_in
from course_lib.ranks.wire import NotPlainError, encode

SENTENCES = {
    "changed": (
        "the function changes {name}, which must stay as it is",
        "Work on a copy: x = x + 1 makes a new tensor, but x += 1 changes the caller's tensor.",
    ),
    "trainable": (
        "the function changes which of {name} require a gradient",
        "Use torch.no_grad(): autograd records nothing inside it.",
    ),
    "mode": (
        "the function changes the mode of {name} (training or evaluation)",
        "Leave every module in the mode that it had before the call. If you need the other mode, "
        "save model.training first, and restore it.",
    ),
    "structure": ("the function adds, removes or replaces parameters or buffers of {name}", ""),
    "requires_grad": ("the function changes which parameters of {name} require a gradient", ""),
    "hooks": (
        "the function leaves hooks on {name}",
        "Remove the hooks before you return: otherwise they run again in every later call.",
    ),
    "inference": (
        "the function puts tensors that were made in torch.inference_mode() into {name}",
        "Autograd cannot work with such tensors: use torch.no_grad() instead.",
    ),
    "grad_mode": (
        "gradients are {name} after the call",
        "Use torch.no_grad() as a context: with torch.no_grad(): …",
    ),
    "dtype": ("the function changes torch's default dtype", ""),
    "asks": ("after the call, a tensor of the input requires a gradient", ""),
    "moved": (
        "{name} after the call: expected 'kept', got 'replaced: write into the old memory, with "
        "p.data.copy_(new)'",
        "",
    ),
    "aliases": (
        "the result shares memory with {name}",
        "If one of them is written to, the other changes, too: return a copy (.clone()).",
    ),
    "random": (
        "the function draws or seeds random numbers of the {name} generator",
        "Other code relies on the state of this generator. Draw random numbers only from the "
        "generator that the function gets, or from one that you make.",
    ),
    "history": (
        "the result carries the graph of its computation (requires_grad)",
        "Return a number (loss.item()), or a tensor without history (.detach()): the graph keeps "
        "all activations in memory.",
    ),
    "overwritten": (
        "this call has changed the result of an earlier call",
        "Keep nothing from one call to the next: make new tensors.",
    ),
}
"""Code of an effect → its sentence and a hint, the most helpful effect first."""

LATE = ("moved", "aliases", "random", "history", "overwritten")
"""Effects that cannot explain a wrong value, so a wrong value is reported before them. If dropout
draws random numbers, the mistake is a model in the wrong mode."""

MEMORY, RESULTS = "the memory of the parameters", "the earlier result"
NAMES = ("the model", "the parameters", "the matrix", MEMORY, RESULTS)
"""Names of the objects that are watched in addition to the input."""


# On the rank --------------------------------------------------------------------------------------


class Watch:
    """Records the state before the student's function runs, and reports the state afterwards.

    Args:
        inputs: the rank's input. Its tensors are collected at once, so later changes of the
            containers do not matter.
        may_change: keys of `inputs` that the function may change or return.
        seed: seeds the generators of random numbers, so that their state after the call is known
            where the verdict is made; ``None`` to leave them as they are.

    """

    def __init__(
        self, inputs: Any, may_change: Sequence[str] = (), seed: int | None = None
    ) -> None:
        # An earlier case may have changed these settings, and may have ended with an exception.
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        self._own = list(tensors_in(inputs))
        self._fixed = _fixed(inputs, may_change)
        self._objects: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any]]] = {}
        self._seed = seed
        self.seed_generators()

    def seed_generators(self) -> None:
        """Seed the generators; a program whose function may draw numbers calls this at its end."""
        if self._seed is not None:
            torch.manual_seed(self._seed)
            random.seed(self._seed)
            np.random.seed(self._seed)

    def add_module(self, name: str, module: nn.Module) -> None:
        """Watch what a training step must not change: mode, structure, hooks."""
        self._add(name, lambda: {**aspects(module), "inference": _inference(module.parameters())})

    def add_parameters(
        self, name: str, parameters: Sequence[Tensor], *, values: bool = True
    ) -> None:
        """Watch parameters. Their gradients may change; without `values`, they may change, too."""
        self._add(
            name,
            lambda: {
                "changed": _copies(parameters) if values else [],
                "trainable": [parameter.requires_grad for parameter in parameters],
                "hooks": [_hooks_on(parameter) for parameter in parameters],
                "inference": _inference(parameters),
            },
        )

    def add_memory(self, parameters: Sequence[Tensor]) -> None:
        """Watch where the parameters' numbers are in memory, from now on."""
        self._add(MEMORY, lambda: {"moved": [param.data_ptr() for param in parameters]})

    def add_results(self, tensors: Sequence[Tensor]) -> None:
        """Watch what an earlier call has returned."""
        self._add(RESULTS, lambda: {"overwritten": _copies(tensors)})

    def _add(self, name: str, look: Callable[[], dict[str, Any]]) -> None:
        self._objects[name] = look, look()

    def report(self, output: Any) -> dict[str, Any]:
        """Return the state now, and partly the state before; `output` is what the program gave."""
        return {
            "inputs": {name: _copies(tensors) for name, tensors in self._fixed.items()},
            "addresses": {
                "of the inputs": {
                    name: _addresses(tensors) for name, tensors in self._fixed.items()
                },
                "of the output": _addresses(tensors_in(output)),
            },
            "objects": {name: [before, look()] for name, (look, before) in self._objects.items()},
            "generators": _digests(torch.get_rng_state(), random.getstate(), np.random.get_state()),
            "history": any(tensor.requires_grad for tensor in tensors_in(output)),
            "asks": [tensor.requires_grad for tensor in self._own],
            "gradients": torch.is_grad_enabled(),
            "dtype": str(torch.get_default_dtype()),
        }


def _copies(tensors: Sequence[Tensor]) -> list[Tensor | None]:
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


def aspects(module: nn.Module) -> dict[str, Any]:
    """Return what a function must not change of a module, by its code in `SENTENCES`."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    parameters = dict(module.named_parameters())
    return {
        "mode": [child.training for child in module.modules()],
        "structure": [(name, id(p)) for name, p in parameters.items()]
        + [name for name, _ in module.named_buffers()],
        "requires_grad": [p.requires_grad for p in parameters.values()],
        "hooks": [len(getattr(child, name)) for child in module.modules() for name in names]
        + [_hooks_on(parameter) for parameter in parameters.values()],
    }


def _hooks_on(parameter: Tensor) -> int:
    after = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return len(parameter._backward_hooks or ()) + len(after or ())


def _inference(parameters: Iterable[Tensor]) -> bool:
    """Return whether a parameter or its gradient was made in inference mode."""
    return any(
        parameter.is_inference() or (parameter.grad is not None and parameter.grad.is_inference())
        for parameter in parameters
    )


def _digests(*states: Any) -> dict[str, str]:
    return dict(zip(("torch", "Python", "NumPy"), map(_digest, states), strict=True))


def _digest(state: Any) -> str:
    if isinstance(state, Tensor):
        state = [state.numpy()]
    parts = [part.tobytes() if isinstance(part, np.ndarray) else part for part in state]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


# Where the verdict is made ------------------------------------------------------------------------


class Effect(NamedTuple):
    """Something that a function changed and must not change."""

    code: str
    sentence: str
    hint: str


def effects_of(
    report: Any, inputs: Any, value: Any, *, may_change: Sequence[str], seed: int
) -> list[Effect]:
    """Return what the function on a rank changed and must not change, most helpful effect first.

    Args:
        report: the rank's report.
        inputs: the input that was sent to the rank.
        value: the value that the rank's program returned.
        may_change: the keys of `inputs` that the function may change or return.
        seed: the seed with which the rank's generators began.

    Raises:
        ValueError: `report` does not have the form of a rank's report.

    """
    try:
        effect_names = list(_found(report, inputs, value, may_change, seed))
    except (KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise ValueError("not a report") from error
    order = list(SENTENCES)
    effects = []
    for code, name in sorted(effect_names, key=lambda effect_name: order.index(effect_name[0])):
        sentence, hint = SENTENCES[code]
        effects.append(Effect(code, sentence.format(name=name), hint))
    return effects


def _found(
    report: Any, inputs: Any, value: Any, may_change: Sequence[str], seed: int
) -> Iterator[tuple[str, str]]:
    """Yield the code of each effect, and the name of what the effect changed.

    Raises:
        ValueError: `report` does not have the form of a rank's report. Reading it may also raise
            other errors, such as KeyError.

    """
    sent = _fixed(inputs, may_change)
    if set(report["inputs"]) != set(sent):
        raise ValueError("other inputs")
    held = set(_as_many(report["addresses"]["of the output"], tensors_in(value))) - {0}
    for name, tensors in sent.items():
        if not _all_same(tensors, report["inputs"][name]):
            yield "changed", name
        if held & set(_as_many(report["addresses"]["of the inputs"][name], tensors)):
            yield "aliases", name
    for name, (before, after) in report["objects"].items():
        if name not in NAMES:
            raise ValueError("nothing that is watched")
        for code in SENTENCES:
            if not _unchanged(before.get(code), after.get(code)):
                yield code, name
    for name, state in states_from(seed).items():
        if report["generators"][name] != state:
            yield "random", name
    if report["gradients"] is not True:
        yield "grad_mode", "disabled"
    if report["dtype"] != "torch.float32":
        yield "dtype", ""
    if any(_as_many(report["asks"], tensors_in(inputs))):
        yield "asks", ""
    if report["history"] is not False:
        yield "history", ""


def _fixed(inputs: Any, may_change: Sequence[str]) -> dict[str, list[Tensor]]:
    """Return name → tensors, of the parts of an input that the function must not change."""
    parts: Mapping[str, Any] = inputs if isinstance(inputs, dict) else {"its input": inputs}
    return {name: list(tensors_in(v)) for name, v in parts.items() if name not in may_change}


def _unchanged(before: Any, after: Any) -> bool:
    if isinstance(before, list) and any(isinstance(tensor, Tensor) for tensor in before):
        return _all_same(before, after)
    return bool(before == after)


def _as_many(report: Any, tensors: Any) -> list[Any]:
    """Return the report about some tensors if it has one item per tensor, else raise ValueError."""
    if not isinstance(report, list) or len(report) != len(list(tensors)):
        raise ValueError("of other tensors")
    return report


def _all_same(tensors: Any, reported: Any) -> bool:
    pairs = zip(tensors, _as_many(reported, tensors), strict=True)
    return all(isinstance(a, Tensor) and isinstance(b, Tensor) and same(a, b) for a, b in pairs)


def states_from(seed: int) -> dict[str, str]:
    """Return name of a generator → the state that `Watch.report` gives if nobody has drawn."""
    torch_state = torch.Generator().manual_seed(seed).get_state()
    return _digests(
        torch_state, random.Random(seed).getstate(), np.random.RandomState(seed).get_state()
    )
