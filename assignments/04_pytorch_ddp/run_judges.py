"""Training runs of K ranks, replayed in one process: inputs, programs, judges.

A replay has K replicas. It is right, or it makes a common mistake. If a wrong answer equals a
replay with a mistake, the report can name the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.utils.data.distributed import DistributedSampler

from course_lib.checking import Case, Given, Wrong, equals
from course_lib.checking.answers import VECTOR, WHOLE, Judge, Kind, sees
from course_lib.checking.judges import Oracle
from course_lib.checking.shared.averaging import Matrix, mean, own
from course_lib.checking.shared.training import (
    CLASSES,
    FEATURES,
    SHAPES,
    fill,
    looking_at,
    loss_of,
    make_model,
    mean_loss,
    targets_of,
    those,
)

# The batches of an epoch, and the windows of a run ------------------------------------------------

# PyTorch's `DistributedSampler` decides which rank gets which rows. The mistakes are wrong settings
# of it, so each mistake is a few keys here.

Batch = list[int]
ROWS = "rows that the model was given"
PASSES = "forward passes"


def batches_of(p: Mapping[str, Any], epoch: int) -> list[Batch]:
    """Return the batches of row numbers of member ``p["me"]`` of ``p["k"]`` in an epoch.

    ``p`` has ``length``, ``batch_size`` and ``seed``. Mistakes change ``tell`` (whether the
    sampler knows the epoch), ``drop_last``, ``short`` (whether a short last batch is kept).
    """
    sampler: DistributedSampler[int] = DistributedSampler(
        range(p["length"]),
        *(p["k"], p["me"], True, p["seed"], p.get("drop_last", False)),
    )
    if p.get("tell", True):
        sampler.set_epoch(epoch)
    rows, size = list(sampler), p["batch_size"]
    cut = [rows[at : at + size] for at in range(0, len(rows), size)]
    return [batch for batch in cut if p.get("short", True) or len(batch) == size]


def windows_of(p: Mapping[str, Any], k: int) -> list[list[list[Batch]]]:
    """Return the windows of a run: a window is a list of micro-batches, each the members' rows.

    ``p`` has ``epochs`` (their numbers) and ``accumulate`` as well.
    """
    size, runs = p["accumulate"], []
    for epoch in p["epochs"]:
        theirs = [batches_of({**p, "k": k, "me": me}, epoch) for me in range(k)]
        runs.append([list(each) for each in zip(*theirs, strict=True)])
    return [run[at : at + size] for run in runs for at in range(0, len(run), size)]


_EXPECTED = "expected a list of lists of row numbers"


def my_batches_program(my_batches: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``my_batches(length, batch_size, epoch, seed, group=group)`` for several epochs."""
    length, size, seed = mine["length"], mine["batch_size"], mine["seed"]
    found = [my_batches(length, size, epoch, seed, group=given.group) for epoch in mine["epochs"]]
    for batches in found:
        if not isinstance(batches, list | tuple):
            raise TypeError(f"my_batches returns {type(batches).__name__}, {_EXPECTED}")
        if any(isinstance(batch, int) for batch in batches):
            raise TypeError(f"my_batches returns {batches!r:.40}, {_EXPECTED}")
    return {
        f"batches of epoch {epoch}": str([[int(row) for row in batch] for batch in batches])
        for epoch, batches in zip(mine["epochs"], found, strict=True)
    }


SAMPLER_MISTAKES: dict[str, dict[str, Any]] = {
    "the order of epoch 0: tell the sampler the epoch (set_epoch)": {"tell": False},
    "the batches of a sampler with drop_last=True, but no row may be lost": {"drop_last": True},
    "batches without the last, short one": {"short": False},
}


def with_sampler(**changes: Any) -> Oracle:
    """Return the oracle of `my_batches_program`, right or with a mistake of `batches_of`."""

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
        asked = {**case.parameters, "k": len(inputs), "me": me, **changes}
        return {f"batches of epoch {n}": str(batches_of(asked, n)) for n in asked["epochs"]}

    return oracle


right_batches = equals(
    with_sampler(), {words: with_sampler(**changes) for words, changes in SAMPLER_MISTAKES.items()}
)


_SEEN = Kind(
    "the rows that the model saw",
    lambda value: (
        isinstance(value, dict) and VECTOR.test(value.get(ROWS)) and WHOLE.test(value.get(PASSES))
    ),
)


@sees(_SEEN)
def own_rows_only(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge whether each rank's model saw the rows of its own batches, each once an epoch."""
    p = case.parameters
    for members in case.groups:
        for me, rank in enumerate(members):
            asked = {**p, "k": len(members), "me": me}
            batches = [batch for epoch in p["epochs"] for batch in batches_of(asked, epoch)]
            own = {row for batch in batches for row in batch}
            if others := sorted(set(values[rank][ROWS].tolist()) - own):
                raise Wrong(
                    f"rank {rank}: the model was given row {others[0]}, which is in none of this "
                    "rank's batches",
                    "The ranks share the work: each takes only its own batches, and gets from the "
                    "others only their gradients.",
                )
            if values[rank][PASSES] > len(batches):
                raise Wrong(
                    f"rank {rank}: the model made {values[rank][PASSES]} forward passes, expected "
                    f"one for each of {len(batches)} micro-batches",
                    "Take the loss from the forward pass that you call backward for: with "
                    "BatchNorm, a second one would change the running means.",
                )


# Runs that sample, accumulate and step ------------------------------------------------------------


class ScaledTanh(nn.Tanh):
    """tanh times a number that is a buffer: part of the model, but no parameter."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", scale.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return scale · tanh(x)."""
        return torch.tanh(x) * self.scale


def scaled_model(weights: Sequence[Tensor], scale: Tensor, frozen: Sequence[int] = ()) -> nn.Module:
    """Return the small network with a buffer; parameters at the positions `frozen` stay fixed."""
    model = make_model(weights, frozen)
    model[1] = ScaledTanh(scale)
    return model


def epochs_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw the same rows for all ranks, and different weights for each.

    The case has ``length``, ``batch_size``, ``accumulate``, ``epochs`` (their numbers), ``seed``
    and ``lr``. It may have ``loss``, ``frozen`` (positions of parameters), ``filled`` (whether
    every ``.grad`` has a value at the start, the same on all ranks) and ``large`` (the factor of
    the targets).
    """
    p = case.parameters
    filled = p.get("filled", False)
    before = [torch.randn(shape, generator=generator) for shape in SHAPES] if filled else None
    x = torch.randn(p["length"], FEATURES, generator=generator)
    y = p.get("large", 1) * torch.randn(p["length"], CLASSES, generator=generator)
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
            "before": before,
        }
        for _ in range(case.world_size)
    ]


def epochs_program(call: Callable[..., Any]) -> Callable[[Callable[..., Any], Any, Given], Any]:
    """Return the program that trains a fresh model once, with ``call(train, model, …)``.

    The program returns the replica's weights and buffer, the rows that it got, and the losses if
    `call` returns any.
    """

    def program(train: Callable[..., Any], mine: Any, given: Given) -> Any:
        x, seen, passes = mine["x"], set[int](), 0

        def note(_: nn.Module, arguments: Any) -> None:
            nonlocal passes
            passes += 1
            if not _functorch.is_functorch_wrapped_tensor(rows := arguments[0]):
                seen.update((rows[:, None] == x).all(-1).nonzero()[:, 1].tolist())

        module = scaled_model(mine["weights"], mine["scale"], mine["frozen"])
        fill(module, mine["before"])
        next(module.children()).register_forward_pre_hook(note)
        model = given.model(module)
        losses = call(train, model, loss_of(mine["loss"]), mine, given)
        weights = [param.detach() for param in model.parameters()]
        buffers = [buffer.clone() for buffer in model.buffers()]
        return {
            "parameter {} after training": weights,
            "buffer {} after training": buffers,
            ROWS: torch.tensor(sorted(seen), dtype=torch.int64),
            PASSES: passes,
            **({} if losses is None else {"loss of step {}": losses}),
        }

    return program


def with_epochs(mix: Matrix = mean, *, scale: str = "rows", **sampler: Any) -> Oracle:
    """Return the oracle of a training function, right or with a mistake.

    Args:
        mix: how gradients are mixed over the members.
        scale: the divisor of a row's gradient. ``rows``: the number of rows of the window.
            ``accumulate``: this number times the rows of the row's micro-batch.
        **sampler: mistakes of `windows_of`.

    """

    @_once
    def run(case: Case, inputs: Sequence[Any]) -> _Run:
        mine, k = inputs[0], len(inputs)
        weights = [weight.double() for weight in mine["weights"]]
        models = [scaled_model(weights, mine["scale"].double()) for _ in inputs]
        windows = windows_of({**case.parameters, **sampler}, k)
        steps = [
            [[(mine["x"][micro[j]], mine["y"][micro[j]]) for micro in window] for j in range(k)]
            for window in windows
        ]
        return models, replay(models, steps, mine, mix, scale=scale)

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
        models, steps = run(case, inputs)
        dtype = inputs[me]["weights"][0].dtype
        return {
            "parameter {} after training": [p.detach().to(dtype) for p in models[me].parameters()],
            "buffer {} after training": [b.to(dtype) for b in models[me].buffers()],
            "loss of step {}": [sum(theirs) / len(inputs) for theirs in steps],
        }

    return oracle


_Run = tuple[list[nn.Module], list[list[float]]]
"""The replicas at the end, and for each step the loss on every member's rows."""


def _once(run: Callable[[Case, Sequence[Any]], _Run]) -> Callable[[Case, Sequence[Any]], _Run]:
    """Return `run` with a cache, because the oracle calls it for each member of a group."""
    known: list[Any] = []

    def replayed(case: Case, inputs: Sequence[Any]) -> _Run:
        if not known or known[0] is not inputs:
            known[:] = inputs, run(case, inputs)
        made: _Run = known[1]
        return made

    return replayed


def replay(
    models: Sequence[nn.Module],
    steps: Sequence[Any],
    mine: Mapping[str, Any],
    mix: Matrix = mean,
    *,
    scale: str = "rows",
    averages: str = "gradients",
) -> list[list[float]]:
    """Train the members' models; return for each step the mean loss on each member's rows.

    Args:
        models: a float64 model for each member.
        steps: for each step, for each member, the pairs ``(x, y)`` of its micro-batches.
        mine: ``loss``, ``lr``, ``frozen``, and ``accumulate`` if `scale` needs it.
        mix: how gradients are mixed over the members.
        scale: see `with_epochs`.
        averages: ``gradients``, or ``parameters``, which are averaged before each rank's own step.

    """
    matrix, losses = mix(torch.ones(len(models), dtype=torch.float64)), []
    for step in steps:
        shares = [_share(*pair, scale, mine) for pair in zip(models, step, strict=True)]
        columns = zip(*(list(model.parameters()) for model in models), strict=True)
        for n, params in enumerate(columns):
            middle = torch.stack([param.detach() for param in params]).mean(0)
            for i, param in enumerate(params if n not in mine["frozen"] else ()):
                if averages == "parameters":
                    param.data = middle - mine["lr"] * shares[i][1][n]
                else:
                    mixture = sum(m * each[1][n] for m, each in zip(matrix[i], shares, strict=True))
                    param.data -= mine["lr"] * mixture
        losses.append([share[0] for share in shares])
    return losses


def _share(
    model: nn.Module, window: Sequence[Any], scale: str, mine: Mapping[str, Any]
) -> tuple[float, Sequence[Tensor]]:
    """Return a member's mean loss in a window, and its sum of gradients."""
    rows = sum(len(x) for x, _ in window)
    total: Any = 0.0
    shown = 0.0
    for x, y in window:
        loss = mean_loss(model, mine["loss"], x, y)
        total += loss * (len(x) / rows if scale == "rows" else 1 / mine["accumulate"])
        shown += loss.item() * len(x) / rows
    params = list(model.parameters())
    return shown, torch.autograd.grad(total, params, allow_unused=True, materialize_grads=True)


EPOCHS_MISTAKES: dict[str, Oracle] = {
    "a run whose epochs all have the order of epoch 0: tell the sampler the epoch (set_epoch)": (
        with_epochs(tell=False)
    ),
    "a run that divides by `accumulate` also where a window has fewer micro-batches": with_epochs(
        scale="accumulate"
    ),
    "a run with this rank's own gradients: nothing was averaged": with_epochs(own),
}


def equals_run(*keys: str, **options: Any) -> Judge:
    """Compare the values whose keys begin with these words with a run of one process.

    Args:
        *keys: first words of the values' keys: ``parameter``, ``buffer``, ``loss``.
        **options: options of `equals`.

    """

    def some(oracle: Oracle) -> Oracle:
        def chosen(case: Case, inputs: Sequence[Any], me: int) -> Any:
            return those(oracle(case, inputs, me), keys)

        return chosen

    mistakes = {words: some(oracle) for words, oracle in EPOCHS_MISTAKES.items()}
    return looking_at(keys, equals(some(with_epochs()), mistakes, **options))


# Scripts that are given their batches -------------------------------------------------------------

# Each batch makes one step.


class Experts(nn.Module):
    """Two linear experts; the sign of a row's first feature decides to which expert it goes."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES, device="meta") for _ in range(2))
        for expert, w, b in zip(self.experts, weights[::2], weights[1::2], strict=True):
            expert.weight, expert.bias = nn.Parameter(w.clone()), nn.Parameter(b.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return each row's output from its own expert; an expert may have no rows."""
        out = x.new_zeros(len(x), CLASSES)
        for i, expert in enumerate(self.experts):
            rows = (x[:, 0] > 0) == bool(i)
            if rows.any():
                out = out.index_put((rows.nonzero()[:, 0],), expert(x[rows]))
        return out


def model_of_kind(kind: str, weights: Sequence[Tensor], frozen: Sequence[int] = ()) -> nn.Module:
    """Return the network of this kind: ``plain``, with ``norm`` (BatchNorm), or ``experts``."""
    if kind == "experts":
        model: nn.Module = Experts(weights)
    else:
        model = make_model(weights)
        if kind == "norm":
            model[1] = nn.BatchNorm1d(SHAPES[0][0]).to(weights[0].dtype)
    for i, param in enumerate(model.parameters()):
        param.requires_grad_(i not in frozen)
    return model


def script_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw the same weights for all ranks, and different batches for each.

    The case has ``kind`` (of model), ``steps``, ``rows`` (of a rank's batch) and ``lr``. It may
    have ``loss``, ``frozen`` (positions of parameters) and ``large`` (the factor of the targets).
    For ``experts``, rank r's batch t has rows for only one expert if r + t is even.
    """
    p = case.parameters
    kind, loss = p["kind"], p.get("loss", "cross_entropy")
    shapes = ((CLASSES, FEATURES), (CLASSES,)) * 2 if kind == "experts" else SHAPES

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    weights, test = [0.3 * randn(*shape) for shape in shapes], randn(p["rows"] + 2, FEATURES)
    drawn = []
    for rank in range(case.world_size):
        x = [randn(p["rows"], FEATURES) + 0.5 * rank for _ in range(p["steps"])]
        y = [p.get("large", 1) * randn(p["rows"], CLASSES) for _ in x]
        if kind == "experts":
            for t, rows in enumerate(x):
                rows[:, 0] = rows[:, 0].abs() if (rank + t) % 2 == 0 else rows[:, 0]
        y = [targets_of(loss, each) for each in y]
        own = {"weights": weights, "x": x, "y": y, "kind": kind, "lr": p["lr"], "loss": loss}
        drawn.append({**own, "frozen": list(p.get("frozen", ())), "test": test})
    return drawn


def script_program(script: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Train with the script; return the replica's weights, and with ``norm`` more values.

    A script of the kind ``norm`` also gets test rows, and returns its predictions for them.
    """
    model = given.model(model_of_kind(mine["kind"], mine["weights"], mine["frozen"]))
    batches = given.iterable(list(zip(mine["x"], mine["y"], strict=True)))
    tested = [mine["test"]] if mine["kind"] == "norm" else []
    loss_fn = loss_of(mine["loss"])
    shown = script(model, loss_fn, batches, *tested, mine["lr"], group=given.group)
    found: dict[str, Any] = {
        "parameter {} at the end": [param.detach() for param in model.parameters()]
    }
    if tested:
        found["prediction"] = shown.detach() if isinstance(shown, Tensor) else shown
        found["buffer {} at the end"] = [buffer.clone() for buffer in model.buffers()]
    return found


def with_script(
    mix: Matrix = mean, *, averages: str = "gradients", buffers: str = "first"
) -> Oracle:
    """Return the oracle of a script that takes one step per batch, right or with a mistake.

    Args:
        mix: see `replay`.
        averages: see `replay`.
        buffers: the buffers at the end: the ``first`` member's, or each model's ``own``.

    """

    @_once
    def run(case: Case, inputs: Sequence[Any]) -> _Run:
        mine = inputs[0]
        weights = [weight.double() for weight in mine["weights"]]
        models = [model_of_kind(mine["kind"], weights).train(case.form.training) for _ in inputs]
        pairs = [zip(each["x"], each["y"], strict=True) for each in inputs]
        steps = [[[pair] for pair in step] for step in zip(*pairs, strict=True)]
        losses = replay(models, steps, mine, mix, averages=averages)
        for model in models[1:] if buffers == "first" else ():
            for theirs, first in zip(model.buffers(), models[0].buffers(), strict=True):
                theirs.copy_(first)
        return models, losses

    return lambda case, inputs, me: _shown(run(case, inputs)[0][me], inputs[me])


def _shown(model: nn.Module, mine: Any) -> dict[str, Any]:
    """Return the result of `script_program` for a model that was trained in float64."""
    dtype = mine["weights"][0].dtype

    def plain(tensor: Tensor) -> Tensor:
        return tensor.detach().to(dtype) if tensor.is_floating_point() else tensor

    found: dict[str, Any] = {"parameter {} at the end": [plain(p) for p in model.parameters()]}
    if mine["kind"] == "norm":
        with torch.no_grad():
            found["prediction"] = plain(model.eval()(mine["test"].double()))
        found["buffer {} at the end"] = [plain(buffer) for buffer in model.buffers()]
    return found


SCRIPT_MISTAKES: Mapping[str, Oracle] = {
    "a run with this rank's own gradients: nothing was averaged": with_script(own),
    "a run that averages the parameters, and then takes a step with this rank's own gradient": (
        with_script(averages="parameters")
    ),
    "the result with this rank's own running means: the buffers differ between the ranks": (
        with_script(buffers="own")
    ),
}
