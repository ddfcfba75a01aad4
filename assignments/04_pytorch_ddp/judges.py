"""Evaluation and checkpoints: inputs, programs, judges."""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from course_lib.checking import Case, Given, Wrong, equals, same_on_all_ranks
from course_lib.checking.answers import NUMBER, WHOLE, Kind, ListOf, sees
from course_lib.checking.judges import Oracle
from course_lib.checking.shared.training import (
    CLASSES,
    FEATURES,
    SHAPES,
    looking_at,
    loss_of,
    make_model,
)

from .run_judges import scaled_model

# Evaluation that counts each row once -------------------------------------------------------------

NUMBERS = ("mean loss", "accuracy")
MODE = "the model was given rows in training mode"


class Watched(nn.Module):
    """A classifier with BatchNorm and dropout that records how many rows it gets, and when."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        net = make_model(weights)
        first, _, last = net.children()
        norm = nn.BatchNorm1d(SHAPES[0][0])
        norm.running_mean, norm.running_var = weights[1].clone(), 1 + weights[1].square()
        self.layers = nn.Sequential(first, norm, last, nn.Dropout()).to(weights[0].dtype)
        self.rows: list[int] = []
        self.trained = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of these rows."""
        self.rows.append(len(x))
        self.trained |= any(module.training for module in self.layers)
        return self.layers(x)


def evaluate_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw the same model and the same rows for all ranks of a group.

    The case has ``length`` and ``batch_size``. It may have ``loss``, and ``labels``, the labels'
    dtype.
    """
    p = case.parameters
    weights = [0.5 * torch.randn(shape, generator=generator) for shape in SHAPES]
    drawn: dict[int, dict[str, Any]] = {}
    for members in case.groups:
        y = torch.randint(CLASSES, (p["length"],), generator=generator)
        own = {
            "weights": weights,
            "x": torch.randn(p["length"], FEATURES, generator=generator),
            "y": y.to(getattr(torch, p.get("labels", "int64"))),
            "loss": p.get("loss", "cross_entropy"),
            "batch_size": p["batch_size"],
        }
        drawn |= dict.fromkeys(members, own)
    return [drawn[rank] for rank in range(case.world_size)]


def evaluate_program(evaluate: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``evaluate(model, loss_fn, x, y, batch_size, group=group)``; report the model's rows."""
    model = Watched(mine["weights"])
    given.model(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    loss_fn = loss_of(mine["loss"])
    x, y, size = mine["x"], mine["y"], mine["batch_size"]
    answer: Any = evaluate(model, loss_fn, x, y, size, group=given.group)
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise TypeError(f"evaluate returns {answer!r:.60}, not a pair (mean loss, accuracy)")
    if any(p.grad is None or not bool((p.grad == 1).all()) for p in model.parameters()):
        raise RuntimeError("evaluate changes the gradients of the model, but must change nothing")
    # In training mode BatchNorm changes its buffers. Then the report must be about the mode.
    moved = any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if moved and not model.trained:
        raise RuntimeError("evaluate changes parameters or buffers, but must change nothing")
    seen: dict[str, Any] = {MODE: model.trained, "rows": [0, *model.rows]}
    return {**seen, **dict(zip(NUMBERS, answer, strict=True))}


Parts = Callable[[int, int, int, int], list[list[int]]]


def evaluated(parts: Parts = lambda n, k, me, size: [list(range(n))]) -> Oracle:
    """Return the oracle of a mean over parts of the rows, each as its mean; rightly all in one.

    Args:
        parts: ``parts(n, k, me, batch_size)`` returns lists of rows.

    """

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
        mine = inputs[me]
        model = Watched([w.double() for w in mine["weights"]]).eval()
        results = []
        for part in filter(None, parts(len(mine["x"]), len(inputs), me, mine["batch_size"])):
            with torch.no_grad():
                out, y = model(mine["x"].double()[part]), mine["y"][part]
            right = (out.argmax(1) == y).double().mean().item()
            results.append((loss_of(mine["loss"])(out, y).item(), right))
        if not results:
            return {}  # this rank has no rows
        means = (math.fsum(column) / len(results) for column in zip(*results, strict=True))
        return {MODE: False, **dict(zip(NUMBERS, means, strict=True))}

    return oracle


def _batches(n: int, k: int, me: int, size: int) -> list[list[int]]:
    strided = [list(range(n))[rank::k] for rank in range(k)]
    return [rows[at : at + size] for rows in strided for at in range(0, n, size)]


EVALUATION_MISTAKES: dict[str, Oracle] = {
    "the result if padded rows are counted: a sampler repeats rows to give every rank equally "
    "many": evaluated(lambda n, k, me, size: [[i % n for i in range(-(-n // k) * k)]]),
    "the result of this rank's rows alone": evaluated(
        lambda n, k, me, size: [list(range(n))[me::k]]
    ),
    "the mean of the batches' means: a short batch counts as much as a full one": evaluated(
        _batches
    ),
}


def _of_evaluation(case: Case, inputs: Sequence[Any], me: int, value: Any) -> str:
    if value.get(MODE):
        return (
            "Call model.eval() first: then dropout drops nothing, and BatchNorm uses its running "
            "means."
        )
    numbers = [value.get(name) for name in NUMBERS]
    if any(isinstance(number, float) and math.isnan(number) for number in numbers):
        return (
            "The mean of no rows is nan. If there are fewer rows than ranks, some ranks have no "
            "rows: do not call loss_fn on these ranks."
        )
    return ""


# The ranks may add in float32, so a small difference in float64 does not matter.
_near = equals(
    evaluated(), EVALUATION_MISTAKES, explain=_of_evaluation, tolerance={"float64": 1e-6}
)
_FLAG = Kind("a flag", lambda value: isinstance(value, bool))
_SEEN = {MODE: _FLAG, "rows": ListOf(WHOLE), **dict.fromkeys(NUMBERS, NUMBER)}


@sees(_SEEN)
def shared_work(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge how many rows each rank evaluated."""
    for members in case.groups:
        for rank in members:
            n, size = len(inputs[rank]["x"]), inputs[rank]["batch_size"]
            seen, most = sum(values[rank]["rows"]), max(values[rank]["rows"], default=0)
            fair = -(-n // len(members))
            if seen > fair:
                raise Wrong(
                    f"rank {rank}: the model was given {seen} of the {n} rows, expected at most "
                    f"{fair}",
                    "The ranks share the work: each looks at its own part only.",
                )
            if most > size:
                raise Wrong(
                    f"rank {rank}: the model was given {most} rows at once, expected at most {size}"
                )


evaluation = [
    looking_at((MODE, *NUMBERS), _near),
    looking_at(NUMBERS, same_on_all_ranks),
    shared_work,
]


# Checkpoints --------------------------------------------------------------------------------------

# A run is a model with a buffer, an SGD or AdamW that has taken steps, and the epoch with which to
# continue. Every rank has its own disk, and only the first rank of a group has the file.

KEYS = {"model", "optimizer", "epoch"}

MODEL, WROTE = "model in the file", "a file was written"
_UNREADABLE = "torch.load(file, weights_only=True) cannot read"


def checkpoint_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw a run, the same on all ranks, and fresh weights that differ on each rank.

    The case has ``epoch``, ``lr`` and ``optimizer`` (``SGD`` or ``AdamW``). If it ``loads``, only
    the first rank of a group gets the run.
    """

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=generator) for shape in SHAPES]

    p = case.parameters
    kept = {"weights": draw(), "scale": torch.rand((), generator=generator), "moments": draw()}
    run = {**kept, "epoch": p["epoch"], "lr": p["lr"]}
    firsts = {members[0] for members in case.groups}
    return [
        {
            "run": run if not p.get("loads") or rank in firsts else None,
            "optimizer": p["optimizer"],
            "fresh": {"weights": draw(), "scale": torch.rand((), generator=generator)},
        }
        for rank in range(case.world_size)
    ]


def _named(weights: Sequence[Tensor], scale: Tensor) -> nn.Module:
    """Return the small network, with names that break if a prefix is removed carelessly."""
    first, middle, last = scaled_model(weights, scale).children()
    inner = nn.Sequential(OrderedDict(module=middle))
    return nn.Sequential(OrderedDict(encoder=first, middle=inner, last=last))


def _fresh(model: nn.Module, kind: str, lr: float) -> torch.optim.Optimizer:
    """Return an optimizer with different options for biases and matrices."""
    params = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() < 2], "lr": lr / 3, "weight_decay": 0.0},
    ]
    if kind == "SGD":
        return torch.optim.SGD(groups, lr, momentum=0.9, weight_decay=lr / 10)
    return torch.optim.AdamW(groups, lr, betas=(0.8, 0.9 + lr / 100))


def pair_of(run: Any, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and the optimizer in the state of this run."""
    model = _named(run["weights"], run["scale"])
    optimizer = _fresh(model, kind, run["lr"])
    for param, moment in zip(model.parameters(), run["moments"], strict=True):
        state = {"momentum_buffer": moment.clone()}
        if kind == "AdamW":
            state = {"step": torch.tensor(3.0), "exp_avg": moment.clone()}
            state["exp_avg_sq"] = moment.square()
        optimizer.state[param] = state
    return model, optimizer


def _plain(optimizer: Any, where: str = " in the file") -> dict[str, Any]:
    """Return the content of an optimizer's ``state_dict()``, as plain values with readable keys."""
    state, groups = optimizer.get("state", {}), optimizer.get("param_groups", [])
    settings = {
        f"{key} of group {i}": group[key] for i, group in enumerate(groups) for key in group
    }
    return {
        f"optimizer's state of parameter {{}}{where}": [dict(state[i]) for i in sorted(state)],
        f"optimizer's setting{where}": settings,
    }


# Saving ------------------------------------------------------------------------------------


def save_program(save_checkpoint: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Save on all ranks, each to its own disk; return the content of this rank's disk."""
    model, optimizer = pair_of(mine["run"], mine["optimizer"])
    ddp: nn.Module = DistributedDataParallel(given.model(model), process_group=given.group)
    ddp.train(model.training)
    file = io.BytesIO()
    try:
        save_checkpoint(file, ddp, optimizer, mine["run"]["epoch"], group=given.group)
    except pickle.PicklingError:  # no rank can import the classes of this folder
        raise ValueError(f"{_UNREADABLE} whole objects: save their state_dict()") from None
    if file.closed:
        raise RuntimeError(
            "save_checkpoint closes the file. Leave the file open: the caller closes it"
        )
    content = file.getvalue()
    after = {"model after saving": {k: v.clone() for k, v in model.state_dict().items()}}
    after |= _plain(optimizer.state_dict(), " after saving")
    if torch.distributed.get_rank(given.group) or not content:
        return {WROTE: bool(content), **after}
    try:
        found = torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        reason = str(error).partition(". ")[0]
        raise ValueError(f"{_UNREADABLE} it: {reason}") from None
    if not isinstance(found, dict) or set(found) != KEYS:
        keys = sorted(map(str, found)) if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"the file holds {keys}, not a dict of model, optimizer and epoch")
    kept = {MODEL: dict(found["model"]), "epoch in the file": found["epoch"]}
    return {WROTE: True, **kept, **_plain(found["optimizer"]), **after}


def _of_the_file(case: Case, inputs: Sequence[Any], me: int, value: Any) -> str:
    if not isinstance(value, dict):
        return ""
    if value.get(WROTE) is not (me == 0):
        return "Only the group's first rank writes a file: the one with dist.get_rank(group) == 0."
    names = value.get(MODEL)
    if not isinstance(names, dict) or names.keys() == saved(case, inputs, 0)[MODEL].keys():
        return ""
    if all(str(name).startswith("module.") for name in names):
        return "These are the wrapper's names: save the state of the module inside (ddp.module)."
    return "Save the state of the module inside, ddp.module, with its own keys: do not change them."


def saved(case: Case, inputs: Sequence[Any], me: int) -> Any:
    """Return the right answer: only the group's first rank writes, and no rank changes anything."""
    run = inputs[me]["run"]
    model, optimizer = pair_of(run, inputs[me]["optimizer"])
    state = dict(model.state_dict())
    right: dict[str, Any] = {WROTE: me == 0}
    if me == 0:
        right |= {MODEL: state, "epoch in the file": run["epoch"], **_plain(optimizer.state_dict())}
    return {**right, "model after saving": state} | _plain(optimizer.state_dict(), " after saving")


# Loading -----------------------------------------------------------------------------------


def load_program(load_checkpoint: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Load into a fresh model and optimizer; return their content."""
    file = None
    if mine["run"] is not None:
        model, optimizer = pair_of(mine["run"], mine["optimizer"])
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        file = io.BytesIO()
        torch.save({**state, "epoch": mine["run"]["epoch"]}, file)
        file.seek(0)
    model = given.model(_named(mine["fresh"]["weights"], mine["fresh"]["scale"]))
    optimizer = _fresh(model, mine["optimizer"], 0.123 if file is None else 0.234)
    epoch = load_checkpoint(file, model, optimizer, group=given.group)
    return {
        "loaded model": {k: v.clone() for k, v in model.state_dict().items()},
        **_plain(optimizer.state_dict(), ""),
        "epoch to begin with": epoch,
    }


def loaded(case: Case, inputs: Sequence[Any], me: int) -> Any:
    """Return the content of the file of the group's first rank."""
    run = inputs[0]["run"]
    model, optimizer = pair_of(run, inputs[0]["optimizer"])
    state = {"loaded model": dict(model.state_dict()), **_plain(optimizer.state_dict(), "")}
    return {**state, "epoch to begin with": run["epoch"]}


def _nothing_loaded(case: Case, inputs: Sequence[Any], me: int) -> Any:
    fresh = inputs[me]["fresh"]
    return {"loaded model": dict(_named(fresh["weights"], fresh["scale"]).state_dict())}


LOAD_MISTAKES: dict[str, Oracle] = {
    "the model before the call: nothing was loaded on this rank": _nothing_loaded,
}


def _not_loaded(case: Case, inputs: Sequence[Any], me: int, value: Any) -> str:
    if not isinstance(value, dict) or value.get("optimizer's state of parameter {}"):
        return ""
    return (
        "The optimizer has no state, but the state of each parameter is a part of the run: load "
        "model and optimizer on every rank."
    )


saving = [equals(saved, explain=_of_the_file)]
loading = [equals(loaded, LOAD_MISTAKES, explain=_not_loaded)]
