"""Whole runs that sample, accumulate and step: inputs, program, and what one process computes.

A run of K ranks is replayed as K replicas in one process, right or with a mistake that people make.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from course_lib.checking.cases import Case
from course_lib.checking.judges import Judge, Oracle, equals
from course_lib.checking.on_ranks.given import Given
from course_lib.checking.sampling import ROWS, Batch, windows_of
from course_lib.checking.shared.averaging import MISTAKES, Matrix, mean, own
from course_lib.checking.shared.training import (
    CLASSES,
    FEATURES,
    SHAPES,
    looking_at,
    loss_of,
    make_model,
    mean_loss,
    targets_of,
    those,
)


class ScaledTanh(nn.Tanh):
    """tanh times a number that is no parameter but part of the model: a buffer."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", scale.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return scale · tanh(x)."""
        return torch.tanh(x) * self.scale


def scaled_model(weights: Sequence[Tensor], scale: Tensor, frozen: Sequence[int] = ()) -> nn.Module:
    """Return the small network with a buffer; parameters at the positions `frozen` stay fixed."""
    model = make_model(weights)
    model[1] = ScaledTanh(scale)  # type: ignore[operator]
    for i, param in enumerate(model.parameters()):
        param.requires_grad_(i not in frozen)
    return model


def epochs_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw the same rows for all ranks, and other weights for each.

    The case has ``length``, ``batch_size``, ``accumulate``, ``epochs`` (their numbers), ``seed``
    and ``lr``, and may have ``loss`` and ``frozen``, positions of parameters.
    """
    p = case.parameters
    x = torch.randn(p["length"], FEATURES, generator=generator)
    y = torch.randn(p["length"], CLASSES, generator=generator)
    loss = p.get("loss", "cross_entropy")
    return [
        {
            **p,
            "loss": loss,
            "frozen": list(p.get("frozen", ())),
            "x": x,
            "y": targets_of(loss, y),
            "weights": [0.3 * torch.randn(shape, generator=generator) for shape in SHAPES],
            "scale": 1 + torch.rand((), generator=generator),
        }
        for _ in range(case.world_size)
    ]


def epochs_program(call: Callable[..., Any]) -> Callable[[Callable[..., Any], Any, Given], Any]:
    """Return the program that trains a fresh model once, with ``call(train, model, …)``.

    What comes back are the replica's weights and buffer, the rows that it was given, and the losses
    if `call` returns any.
    """

    def program(train: Callable[..., Any], mine: Any, given: Given) -> Any:
        x, seen = mine["x"], set[int]()

        def note(_: nn.Module, arguments: Any) -> None:
            if not is_functorch_wrapped_tensor(rows := arguments[0]):
                seen.update((rows[:, None] == x).all(-1).nonzero()[:, 1].tolist())

        module = scaled_model(mine["weights"], mine["scale"], mine["frozen"])
        next(module.children()).register_forward_pre_hook(note)
        model = given.model(module)
        losses = call(train, model, loss_of(mine["loss"]), mine, given)
        weights = [param.detach() for param in model.parameters()]
        buffers = [buffer.clone() for buffer in model.buffers()]
        return {
            "parameter {} after training": weights,
            "buffer {} after training": buffers,
            ROWS: torch.tensor(sorted(seen), dtype=torch.int64),
            **({} if losses is None else {"loss of step {}": losses}),
        }

    return program


def with_epochs(
    mix: Matrix = mean,
    *,
    start: str = "first",
    buffers: str = "first",
    scale: str = "rows",
    loss: str = "all",
    carry: float = 0,
    **sampler: Any,
) -> Oracle:
    """Return the oracle of a training function, right or with a mistake.

    Args:
        mix: how gradients are mixed over the members.
        start: ``first``: all begin with the first member's weights; ``own``.
        buffers: whose buffer a member's model has, likewise.
        scale: what a row's gradient is divided by: ``rows`` of the window, the rows of its
            micro-batch and ``accumulate`` or ``micro`` (the micro-batches of the window), ``full``:
            the rows of a window without short ones, or ``none``: those of its micro-batch only.
        loss: of a step that is returned: ``all`` rows, this rank's ``own`` or its ``part`` of the
            mean, their ``sum``, or the mean of the micro-batches' means, ``micro``.
        carry: how much of the last step's gradient is still in it.
        **sampler: mistakes of `windows_of`.

    """

    def run(case: Case, inputs: Sequence[Any]) -> _Run:
        p, k = {**case.parameters, **sampler}, len(inputs)
        models = [_replica(inputs, i if start == "own" else 0, i, buffers) for i in range(k)]
        matrix = mix(torch.ones(k, dtype=torch.float64))
        last = [[torch.zeros(()).double() for _ in SHAPES] for _ in models]
        steps = []
        for window in windows_of(p, k):
            shares = [
                _share(model, inputs[j], [micro[j] for micro in window], scale, p)
                for j, model in enumerate(models)
            ]
            for i, model in enumerate(models):
                for n, param in enumerate(model.parameters()):
                    if n in inputs[0]["frozen"]:
                        continue
                    mixture = sum(matrix[i, j] * shares[j][1][n] for j in range(k))
                    last[i][n] = mixture + carry * last[i][n]
                    param.data -= p["lr"] * last[i][n]
            steps.append([share[2] if loss == "micro" else share[0] for share in shares])
        return models, steps

    replayed = _once(run)

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
        models, steps = replayed(case, inputs)
        parts = 1 if loss == "sum" else len(inputs)
        mine = [theirs[me] / (parts if loss == "part" else 1) for theirs in steps]
        dtype = inputs[me]["weights"][0].dtype
        return {
            "parameter {} after training": [p.detach().to(dtype) for p in models[me].parameters()],
            "buffer {} after training": [b.to(dtype) for b in models[me].buffers()],
            "loss of step {}": (
                mine if loss in ("own", "part") else [sum(theirs) / parts for theirs in steps]
            ),
        }

    return oracle


_Run = tuple[list[nn.Module], list[list[float]]]
"""The replicas at the end, and for each step what every member says of its loss."""


def _once(run: Callable[[Case, Sequence[Any]], _Run]) -> Callable[[Case, Sequence[Any]], _Run]:
    """Return `run`, made once for all members of a group: each of them asks what came out."""
    kept: list[tuple[Case, list[Any], _Run]] = []

    def replayed(case: Case, inputs: Sequence[Any]) -> _Run:
        for known, theirs, made in kept:
            same = len(theirs) == len(inputs) and all(map(operator.is_, theirs, inputs))
            if known is case and same:
                return made
        kept[:] = [(case, list(inputs), run(case, inputs))]
        return kept[0][2]

    return replayed


def _replica(inputs: Sequence[Any], first: int, me: int, buffers: str) -> nn.Module:
    weights = [weight.double() for weight in inputs[first]["weights"]]
    return scaled_model(weights, inputs[me if buffers == "own" else 0]["scale"].double())


def _share(
    model: nn.Module, mine: Any, window: list[Batch], scale: str, p: Mapping[str, Any]
) -> tuple[float, list[Tensor], float]:
    """Return a member's mean loss in a window, its sum of gradients, and the mean of means."""
    rows = sum(map(len, window))
    total: Any = 0.0
    shown = plain = 0.0
    for batch in window:
        loss = mean_loss(model, mine["loss"], mine["x"][batch], mine["y"][batch])
        factors = {
            "rows": len(batch) / rows,
            "full": len(batch) / (p["batch_size"] * p["accumulate"]),
            "accumulate": 1 / p["accumulate"],
            "micro": 1 / len(window),
            "none": 1,
        }
        total += loss * factors[scale]
        shown += loss.item() * len(batch) / rows
        plain += loss.item() / len(window)
    return shown, list(torch.autograd.grad(total, list(model.parameters()))), plain


EPOCHS_MISTAKES: dict[str, Oracle] = {
    "a run whose epochs all have the order of epoch 0: tell the sampler (set_epoch)": with_epochs(
        tell=False
    ),
    "a run that counts its epochs from 0: take the numbers in `epochs`": with_epochs(from_0=True),
    "a run that leaves out a last, incomplete window: it makes a step, too": with_epochs(
        keep_last=False
    ),
    "a run whose windows go on in the next epoch: it begins a new one": with_epochs(
        carry_over=True
    ),
    "a run that drops rows (drop_last)": with_epochs(drop_last=True),
    "a run that drops the last, short micro-batch": with_epochs(short=False),
    "a run without shuffling": with_epochs(shuffle=False),
    "a run in which a short micro-batch counts as much as a full one": with_epochs(scale="micro"),
    "a run that divides by `accumulate` also where a window has fewer micro-batches": with_epochs(
        scale="accumulate"
    ),
    "a run that divides by batch_size · accumulate also where a window has fewer rows": with_epochs(
        scale="full"
    ),
    "a run that adds up the means of a window's micro-batches: divide": with_epochs(scale="none"),
    "a run with this rank's own gradients: nothing was averaged": with_epochs(own),
    "a run with the sum of the ranks' gradients, not their mean": with_epochs(
        MISTAKES["the sum over the ranks, not the mean"]
    ),
    "a run with gradients divided by the number of ranks once more": with_epochs(
        MISTAKES["the mean divided by the number of ranks once more"]
    ),
    "a run in which each rank began with weights of its own": with_epochs(start="own"),
    "a run in which each rank began with weights of its own, and buffers": with_epochs(
        start="own", buffers="own"
    ),
    "a run in which each rank kept the buffers that it began with": with_epochs(buffers="own"),
    "the weights before training: no step was taken (an iterable may be walked once only)": (
        with_epochs(lambda rows: 0 * own(rows))
    ),
    "a run whose gradients are never cleared: zero_grad is missing": with_epochs(carry=1),
    "the loss of this rank's own rows: average it as well": with_epochs(loss="own"),
    "the sum of the ranks' losses, not their mean": with_epochs(loss="sum"),
    "this rank's part of the loss: reduce gives the sum to one rank, all_reduce to all": (
        with_epochs(loss="part")
    ),
    "the mean of the micro-batches' losses, a short one counted like a full one": with_epochs(
        loss="micro"
    ),
}


def equals_run(*keys: str, **options: Any) -> Judge:
    """Judge what begins with these keys by a run of one process.

    Args:
        *keys: first words of the values' keys: ``parameter``, ``buffer``, ``loss``.
        **options: of `equals`.

    """

    def some(oracle: Oracle) -> Oracle:
        def told(case: Case, inputs: Sequence[Any], me: int) -> Any:
            return those(oracle(case, inputs, me), keys)

        return told

    mistakes = {words: some(oracle) for words, oracle in EPOCHS_MISTAKES.items()}
    return looking_at(keys, equals(some(with_epochs()), mistakes, **options))
