"""The checks of this assignment. They are handed out: read them if a message is not enough.

A check has a reference in `course_lib`, a program that calls a function on a rank, and a draw that
makes a case from a seed. `models` has the models of the programs. A program gets only its rank's
input.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from course_lib.checking import Allowed, Case, Draw, Given, Variety, Wrong, by_reference
from course_lib.ranks.explain.words import counted

from .models import (
    CLASSES,
    FEATURES,
    WIDTH,
    ScaledTanh,
    Watched,
    content_of,
    draw_weights,
    fill,
    fresh_optimizer,
    loss_of,
    named_network,
    network,
    running,
    targets_of,
)

COLLECTIVES = (
    *("all_gather", "all_reduce", "broadcast", "reduce", "gather", "scatter", "all_to_all"),
    *("reduce_scatter", "send", "recv", "barrier"),
)
SMALL = 512  # bytes that a rank may send in addition to its gradients

# Task 1: the batches of a rank --------------------------------------------------------------------


def draw_calls(d: Draw) -> list[Any]:
    """Draw several calls: a length, a batch size, an epoch and a seed for each."""
    length = d.one_of(10, 13, 12, 7, 33, 24)
    length = d.maybe("fewer rows than ranks", d.one_of(1, 2), length)
    size, seed = d.one_of(2, 3, 4, 5), d.one_of(0, 7, 1, 11)
    epochs = d.one_of([0, 1], [0, 1, 2], [3, 0], [0, 5], [2, 4])
    calls = [(length, size, epoch, seed) for epoch in epochs]
    if d.maybe("another seed in between"):
        calls.insert(1, (length, size, epochs[0], seed + 2))
    if d.maybe("another length in between"):
        calls.insert(1, (length + 5, size + 1, epochs[0], seed))
    return [{"calls": calls} for _ in d.ranks]


def run_batches(my_batches: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``my_batches(length, batch_size, epoch, seed, group=group)`` several times."""
    received = {}
    for call in inputs["calls"]:
        batches = my_batches(*call, group=case.group)
        listed = isinstance(batches, list | tuple)
        if not listed or any(isinstance(batch, int) for batch in batches):
            raise TypeError(
                f"my_batches returns {batches!r:.40}, expected a list of lists of row numbers"
            )
        received[_batches(*call)] = str([[int(row) for row in batch] for batch in batches])
    return received


def _batches(length: int, batch_size: int, epoch: int, seed: int) -> str:
    return f"batches of epoch {epoch} ({length} rows, batches of {batch_size}, seed {seed})"


Rows = list[int]


def batches_of(call: Sequence[int], k: int, me: int, drop_last: bool = False) -> list[Rows]:
    """Return the batches of member `me` of `k`; see `draw_calls`."""
    length, size, epoch, seed = call
    sampler = DistributedSampler(range(length), k, me, seed=seed, drop_last=drop_last)
    sampler.set_epoch(epoch)
    rows = list(sampler)
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def batches_if(batches: Callable[[Sequence[int], int, int], list[Rows]]) -> Callable[..., Any]:
    """Return the mistake of a function that takes these batches."""
    return lambda inputs, me, expected: {
        _batches(*call): str(batches(call, len(inputs), me)) for call in inputs[me]["calls"]
    }


def in_order_of_epoch_0(call: Sequence[int], k: int, me: int) -> list[Rows]:
    length, size, _, seed = call
    return batches_of((length, size, 0, seed), k, me)


def without_short_ones(call: Sequence[int], k: int, me: int) -> list[Rows]:
    return [batch for batch in batches_of(call, k, me) if len(batch) == call[1]]


BATCHES_MISTAKES = {
    "the order of epoch 0: tell the sampler the epoch (set_epoch)": batches_if(in_order_of_epoch_0),
    "the batches of a sampler with drop_last=True, but no row may be lost": batches_if(
        lambda call, k, me: batches_of(call, k, me, drop_last=True)
    ),
    "batches without the last, short one": batches_if(without_short_ones),
}

# Task 2: the rows of a stream ---------------------------------------------------------------------

TAKEN = "rows that the ranks took before stop {}"


def draw_stream(d: Draw) -> list[Any]:
    """Draw a stream, and three runs that read it: K, workers of each rank, and steps to a stop."""
    size = d.one_of(1, 2, 3)
    runs = [(d.one_of(1, 2, 3, 4), d.one_of(1, 2, 3), d.one_of(2, 3, 5)) for _ in range(3)]
    d.say(", then ".join(f"{counted(k, 'rank')} x {counted(w, 'worker')}" for k, w, _ in runs))
    endless = d.maybe("the stream never ends")
    rows = size * sum(k * steps for k, _, steps in runs)
    length = rows if endless else rows - d.one_of(0, 1, 2)
    return [{"runs": runs, "size": size, "endless": endless, "length": length}]


def run_stream(own_rows: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Let each run take batches as K loaders would: a batch from each worker in turn."""
    size, position, taken = inputs["size"], 0, []

    def stream() -> Iterator[str]:
        yield from rows_of(inputs)
        if inputs["endless"]:
            raise RuntimeError("own_rows reads rows of a step that nobody has asked for")

    for k, workers, steps in inputs["runs"]:
        rows: list[str] = []
        for rank in range(k):
            places = [(rank, k, worker, workers) for worker in range(workers)]
            readers = [iter(own_rows(stream(), *place, position, size)) for place in places]
            for step in range(steps):
                rows += islice(readers[step % workers], size)
        taken.append(rows)
        position += k * steps * size
    return {TAKEN: taken}


def rows_of(inputs: Any) -> list[str]:
    return [f"row {place}" for place in range(inputs["length"])]


def each_row_once(case: Case, inputs: Any, expected: Any, values: Sequence[Any]) -> None:
    """Judge what the ranks of a run have taken together: the next rows, each once."""
    rows, size, position = rows_of(inputs[0]), inputs[0]["size"], 0
    for (k, workers, steps), taken in zip(inputs[0]["runs"], values[0][TAKEN], strict=True):
        stop = position + k * steps * size
        counts, right = Counter(taken), Counter(rows[position:stop])
        for place, row in enumerate([*rows, *taken]):
            if counts[row] != right[row]:
                hint = AT_POSITION if position else IN_A_STEP
                raise Wrong(
                    f"{counted(k, 'rank')} with {counted(workers, 'worker')} each take "
                    f"{steps} steps from row {position} on: {row} comes "
                    f"{counted(counts[row], 'time')}, expected {counted(right[row], 'time')}",
                    IN_THE_LAST if stop - k * size <= place and len(rows) < stop else hint,
                )
        position = stop


IN_A_STEP = (
    "In each step the ranks together take the next world_size · batch_size rows. A worker has only "
    "the steps worker, worker + workers, … of its rank."
)
AT_POSITION = (
    "position counts the rows that all ranks have taken together. Leave them out first, and "
    "divide only the rest into steps."
)
IN_THE_LAST = "The last step may have fewer rows than the others. Each of them comes once, too."

# Task 3: training ---------------------------------------------------------------------------------


def draw_training(d: Draw) -> list[Any]:
    """Draw the same rows for all ranks of a group, and different weights for each rank."""
    length, size, accumulate = d.one_of(13, 16, 21, 25), d.one_of(2, 3, 4), d.one_of(2, 3, 2, 1)
    accumulate = d.maybe("one window per epoch", 50, accumulate, one_in=4)
    epochs, seed = d.one_of([0, 1], [5, 2], [0, 1, 2], [4, 1], [3]), d.one_of(0, 1, 4, 5)
    large = d.maybe("large gradients")
    losses = "cross_entropy", "mse_loss", "smooth_l1_loss", "multi_margin_loss"
    loss = "mse_loss" if large else d.one_of(*losses)
    frozen = d.maybe("frozen parameters", d.one_of([0, 1], [2], [0, 1, 2]), [])
    before = draw_weights(d, 1.0) if d.maybe(".grad is not empty") else None
    lr, inputs = 1e-4 if large else d.one_of(0.1, 0.15, 0.2), {}
    for members in d.groups:
        x, scores = d.randn(length, FEATURES), (1000 if large else 1) * d.randn(length, CLASSES)
        for me, rank in enumerate(members):
            calls = [(length, size, epoch, seed) for epoch in epochs]
            batches = [batches_of(call, len(members), me) for call in calls]
            inputs[rank] = {
                "x": x,
                "y": targets_of(loss, scores),
                "weights": draw_weights(d, 0.3),
                "scale": 1 + d.randn().abs(),
                "before": before,
                "frozen": frozen,
                "loss": loss,
                "settings": [lr, size, accumulate],
                "epochs": epochs,
                "seed": seed,
                "windows": [
                    batches_of_epoch[at : at + accumulate]
                    for batches_of_epoch in batches
                    for at in range(0, len(batches_of_epoch), accumulate)
                ],
            }
    return [inputs[rank] for rank in d.ranks]


def run_train(train: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Train a model; return its weights and buffer, the losses, and what rows the model got."""
    x, rows_seen = inputs["x"], Counter[int]()

    def note(_: nn.Module, arguments: Any) -> None:
        if not _functorch.is_functorch_wrapped_tensor(rows := arguments[0]):
            rows_seen.update((rows[:, None] == x).all(-1).nonzero()[:, 1].tolist())

    model = network(inputs["weights"], ScaledTanh(inputs["scale"]), inputs["frozen"])
    fill(model, inputs["before"])
    model[0].register_forward_pre_hook(note)
    case.model(model)
    loss_fn, epochs = loss_of(inputs["loss"]), case.iterable(inputs["epochs"])
    settings = *inputs["settings"], epochs, inputs["seed"]
    losses = train(model, loss_fn, x, inputs["y"], *settings, group=case.group)
    batches = [batch for window in inputs["windows"] for batch in window]
    return {
        "parameter {} after training": [param.detach() for param in model.parameters()],
        "buffer {} after training": [buffer.clone() for buffer in model.buffers()],
        "loss of step {}": losses,
        MORE_ROWS: str(sorted((rows_seen - Counter(chain(*batches))).elements())),
    }


MORE_ROWS = "rows that the model was given beyond those of this rank's batches"


def sgd_run(weight: Callable[[int, int, int], float], alone: bool = False) -> Callable[..., Any]:
    """Return the mistake of a run that weights a micro-batch's mean loss like this.

    ``weight(rows, rows of the window, accumulate)`` is the weight. With `alone`, a rank takes the
    steps of its own gradients.
    """

    def mistake(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
        first, members = inputs[0], [inputs[me]] if alone else inputs
        lr, _, accumulate = first["settings"]
        model = network(first["weights"], ScaledTanh(first["scale"]), first["frozen"])
        optimizer = torch.optim.SGD(model.parameters(), lr)
        for windows in zip(*(member["windows"] for member in members), strict=True):
            optimizer.zero_grad()
            for member, window in zip(members, windows, strict=True):
                count = sum(map(len, window))
                for rows in window:
                    loss = loss_of(member["loss"])(model(member["x"][rows]), member["y"][rows])
                    (loss * weight(len(rows), count, accumulate) / len(members)).backward()
            optimizer.step()
        return {"parameter {} after training": [param.detach() for param in model.parameters()]}

    return mistake


def in_order_of_epoch_0_only(inputs: Sequence[Any]) -> Sequence[Any]:
    return [{**rank_inputs, "epochs": [0 for _ in rank_inputs["epochs"]]} for rank_inputs in inputs]


TRAIN_MISTAKES = {
    "a run that divides by `accumulate` also where a window has fewer micro-batches": sgd_run(
        lambda rows, count, accumulate: 1 / accumulate
    ),
    "a run with this rank's own gradients: nothing was averaged": sgd_run(
        lambda rows, count, accumulate: rows / count, alone=True
    ),
}


def of_training(inputs: Sequence[Any], me: int, expected: Sequence[Any], value: Any) -> str:
    if value.get(MORE_ROWS) == "[]":
        return ""
    return (
        "The ranks share the work: each takes only the batches of task 1, each batch through the "
        "model once, and gets from the others only their gradients."
    )


def weights_again(inputs: Any) -> int:
    """Return the bytes of a second broadcast of the weights, and of DDP's small messages."""
    return SMALL + sum(weight.nbytes for weight in inputs["weights"])


# Task 4: evaluation that counts each row once -----------------------------------------------------

LOSS, ACCURACY = "mean loss", "accuracy"
MODE = "the model was given rows in training mode"


def draw_rows(d: Draw) -> list[Any]:
    """Draw a model for all ranks, and the same rows for all ranks of a group."""
    length, size = d.one_of(7, 9, 11, 20, 23), d.one_of(2, 3, 4)
    length = d.maybe("fewer rows than ranks", d.one_of(1, 2), length)
    size = d.maybe("batches longer than a rank's rows", 32, size)
    loss = d.one_of("cross_entropy", "multi_margin_loss")
    large, overflow = d.maybe("large numbers", 100.0, 1.0), d.maybe("a row is not finite", one_in=6)
    weights, drawn = draw_weights(d, 0.5), {}
    for members in d.groups:
        x, y = large * d.randn(length, FEATURES), d.whole(CLASSES, length)
        group_inputs = {
            "weights": weights,
            "x": d.not_finite(x) if overflow else x,
            "y": y,
            "loss": loss,
            "batch_size": size,
            "share": -(-length // len(members)),
        }
        drawn |= dict.fromkeys(members, group_inputs)
    return [drawn[rank] for rank in d.ranks]


def run_evaluate(evaluate: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``evaluate(model, loss_fn, x, y, batch_size, group=group)``; report the model's rows."""
    model = Watched(inputs["weights"])
    case.model(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    x, y, size = inputs["x"], inputs["y"], inputs["batch_size"]
    answer: Any = evaluate(model, loss_of(inputs["loss"]), x, y, size, group=case.group)
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise TypeError(f"evaluate returns {answer!r:.60}, not a pair (mean loss, accuracy)")
    if any(p.grad is None or not bool((p.grad == 1).all()) for p in model.parameters()):
        raise RuntimeError("evaluate changes the gradients of the model, but must change nothing")
    loss, accuracy = answer
    share, lengths = inputs["share"], model.rows
    return {
        MODE: model.trained,
        LOSS: loss,
        ACCURACY: accuracy,
        f"rows that the model was given beyond {share} of {len(x)}": max(0, sum(lengths) - share),
        f"rows beyond {size} that it was given at once": max([0, *(n - size for n in lengths)]),
    }


def mean_over(parts: Callable[[int, int, int, int], list[Rows]]) -> Callable[..., Any]:
    """Return the mistake that takes the mean over parts of the rows, each as its mean.

    ``parts(length, k, me, batch_size)`` returns lists of rows.
    """

    def mistake(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
        rank_inputs, results = inputs[me], []
        model, x = Watched(rank_inputs["weights"]).eval(), rank_inputs["x"]
        for rows in filter(None, parts(len(x), len(inputs), me, rank_inputs["batch_size"])):
            with torch.no_grad():
                out, y = model(x[rows]), rank_inputs["y"][rows]
            right = (out.argmax(1) == y).double().mean().item()
            results.append((loss_of(rank_inputs["loss"])(out, y).item(), right))
        if not results:
            return None  # this rank has no rows
        means = (math.fsum(column) / len(results) for column in zip(*results, strict=True))
        return {MODE: False, **dict(zip((LOSS, ACCURACY), means, strict=True))}

    return mistake


def strided_batches(n: int, k: int, me: int, size: int) -> list[Rows]:
    strided = [list(range(n))[rank::k] for rank in range(k)]
    return [rows[at : at + size] for rows in strided for at in range(0, n, size)]


EVALUATE_MISTAKES = {
    "the result if padded rows are counted: a sampler repeats rows to give every rank equally "
    "many": mean_over(lambda n, k, me, size: [[i % n for i in range(-(-n // k) * k)]]),
    "the result of this rank's rows alone": mean_over(
        lambda n, k, me, size: [list(range(n))[me::k]]
    ),
    "the mean of the batches' means: a short batch counts as much as a full one": mean_over(
        strided_batches
    ),
}


def of_evaluation(inputs: Sequence[Any], me: int, expected: Sequence[Any], value: Any) -> str:
    if value.get(MODE):
        return (
            "Call model.eval() first: then dropout drops nothing, and BatchNorm uses its running "
            "means."
        )
    loss, right = value.get(LOSS), expected[me].get(LOSS)
    if loss != loss and right == right:
        return (
            "The mean of no rows is nan. If there are fewer rows than ranks, some ranks have no "
            "rows: do not call loss_fn on these ranks."
        )
    if any(value.get(key) for key in expected[me] if "beyond" in key):
        return "The ranks share the work: each looks at its own part only."
    return ""


# Task 5: checkpoints ------------------------------------------------------------------------------

# Every rank has its own disk, and only the first rank of a group has the file.

KEYS = {"model", "optimizer", "epoch"}
IN_FILE, WROTE = "model in the file", "a file was written"
_UNREADABLE = "torch.load(file, weights_only=True) cannot read"


def draw_run(d: Draw) -> list[Any]:
    """Draw a run, the same on all ranks, and fresh weights that differ on each rank."""
    run = {
        "optimizer": d.one_of("SGD", "AdamW"),
        "epoch": d.maybe("from epoch 0", 0, d.one_of(1, 4, 9)),
        "lr": d.one_of(0.1, 0.2, 0.5),
        "weights": draw_weights(d, 1.0),
        "moments": draw_weights(d, d.maybe("moments of zeros", 0.0, 1.0)),
        "scale": d.randn(),
    }
    return [
        {"run": run, "fresh": {"weights": draw_weights(d, 1.0), "scale": d.randn()}}
        for _ in d.ranks
    ]


def run_save(save_checkpoint: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Save on all ranks, each to its own disk; return the content of this rank's disk."""
    model, optimizer = running(inputs["run"])
    ddp: nn.Module = DistributedDataParallel(case.model(model), process_group=case.group)
    ddp.train(model.training)
    file = io.BytesIO()
    try:
        save_checkpoint(file, ddp, optimizer, inputs["run"]["epoch"], group=case.group)
    except pickle.PicklingError:  # no rank can import the classes of this folder
        raise ValueError(f"{_UNREADABLE} whole objects: save their state_dict()") from None
    content = file.getvalue()
    after = {"model after saving": {k: v.clone() for k, v in model.state_dict().items()}}
    after |= content_of(optimizer.state_dict(), " after saving")
    if torch.distributed.get_rank(case.group) or not content:
        return {WROTE: bool(content), **after}
    try:
        saved = torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        reason = str(error).partition(". ")[0]
        raise ValueError(f"{_UNREADABLE} it: {reason}") from None
    if not isinstance(saved, dict) or set(saved) != KEYS:
        keys = sorted(map(str, saved)) if isinstance(saved, dict) else type(saved).__name__
        raise ValueError(f"the file holds {keys}, not a dict of model, optimizer and epoch")
    state = {IN_FILE: dict(saved["model"]), "epoch in the file": saved["epoch"]}
    return {WROTE: True, **state, **content_of(saved["optimizer"], " in the file"), **after}


WROTE_MISTAKES = {
    "a file on the wrong rank. Only the group's first rank writes a file: the one with "
    "dist.get_rank(group) == 0": lambda inputs, me, expected: {WROTE: not expected[me][WROTE]}
}


def of_the_file(inputs: Sequence[Any], me: int, expected: Sequence[Any], value: Any) -> str:
    names = value.get(IN_FILE)
    if not isinstance(names, dict) or names.keys() == expected[0][IN_FILE].keys():
        return ""
    if all(str(name).startswith("module.") for name in names):
        return "These are the wrapper's names: save the state of the module inside (ddp.module)."
    return "Save the state of the module inside, ddp.module, with its own keys: do not change them."


def draw_file(d: Draw) -> list[Any]:
    """Draw a run as `draw_run`; only the first rank of a group has it."""
    firsts = {members[0] for members in d.groups}
    return [
        {"run": rank_inputs["run"] if rank in firsts else None, "fresh": rank_inputs["fresh"]}
        | {"optimizer": rank_inputs["run"]["optimizer"], "lr": 0.123 + 0.1 * rank}
        for rank, rank_inputs in enumerate(draw_run(d))
    ]


def run_load(load_checkpoint: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Load into a fresh model and optimizer; return their content."""
    file = None
    if inputs["run"] is not None:
        model, optimizer = running(inputs["run"])
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        file = io.BytesIO()
        torch.save({**state, "epoch": inputs["run"]["epoch"]}, file)
        file.seek(0)
    model = case.model(named_network(inputs["fresh"]["weights"], inputs["fresh"]["scale"]))
    optimizer = fresh_optimizer(model, inputs["optimizer"], inputs["lr"])
    epoch = load_checkpoint(file, model, optimizer, group=case.group)
    return {
        "loaded model": {k: v.clone() for k, v in model.state_dict().items()},
        **content_of(optimizer.state_dict()),
        "epoch to begin with": epoch,
    }


def nothing_loaded(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
    fresh = inputs[me]["fresh"]
    return {"loaded model": dict(named_network(fresh["weights"], fresh["scale"]).state_dict())}


def not_loaded(inputs: Sequence[Any], me: int, expected: Sequence[Any], value: Any) -> str:
    if value.get("optimizer's state of parameter {}"):
        return ""
    return (
        "The optimizer has no state, but the state of each parameter is a part of the run: load "
        "model and optimizer on every rank."
    )


# Task 6: the mean over tokens ---------------------------------------------------------------------

UNLABELLED = -100
GRADIENT = "gradient of parameter {}"


def draw_tokens(d: Draw) -> list[Any]:
    """Draw the same weights for all ranks, and different micro-batches for each.

    The tokens are multiplied by `size`, and the first weight is divided by it. So the outputs do
    not depend on it, and the first weight's gradient does: with 0.1 nothing is clipped.
    """
    size = d.maybe("gradients that are clipped", d.one_of(3, 9, 20), 0.1)
    thousands = d.form.dtype == "float16" and d.maybe("thousands of labels", one_in=1)
    unlabelled = d.rank("rank {} has no labels")
    empty = d.rank("rank {} has a micro-batch without rows")
    frozen = d.maybe("a frozen layer", d.one_of([0, 1], [1, 2]), [])
    before = draw_weights(d, 1.0) if d.maybe(".grad is not empty") else None
    size, as_tuple = 800 if thousands else size, d.one_of(True, False)
    weights = draw_weights(d, 0.2)
    weights[0] *= 0.25 / size
    inputs = []
    for rank in d.ranks:
        none = rank == unlabelled and len(d.members(rank)) > 1
        counts = [d.one_of(*range(1, 10)) for _ in range(d.one_of(1, 2, 3))]
        counts = [counts[0] + 9 * (rank % 2), *counts[1:]]
        if thousands:
            counts[0] += 4000 - 1500 * (rank % 2)
        if rank == empty:
            counts.insert(d.one_of(0, len(counts)), 0)
        pairs = [(n, 0 if none else d.one_of(n, (n + 1) // 2)) for n in counts]
        inputs.append(
            {
                "weights": weights,
                "before": before,
                "frozen": frozen,
                "x": [size * (d.randn(count, FEATURES) + 0.5) for count, _ in pairs],
                "y": [_labels(d, *pair) for pair in pairs],
                "tuple": as_tuple,
            }
        )
    return inputs


def _labels(d: Draw, count: int, labelled: int) -> Tensor:
    y = torch.full((count,), UNLABELLED)
    places = torch.randperm(count, generator=d.numbers)[:labelled]
    y[places] = d.whole(CLASSES - 1, labelled)
    return y


def run_tokens(step: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``step(ddp, micro_batches, group=group)``; return the gradients and the loss."""
    model = case.model(network(inputs["weights"], frozen=inputs["frozen"]))
    ddp = DistributedDataParallel(model, process_group=case.group)
    ddp.train(model.training)
    fill(model, inputs["before"])
    pairs = list(zip(inputs["x"], inputs["y"], strict=True))
    micro_batches = tuple(pairs) if inputs["tuple"] else pairs
    loss = step(ddp, micro_batches, group=case.group)
    return {GRADIENT: [param.grad for param in model.parameters()], LOSS: loss}


def clipped(gradient: Tensor) -> Tensor:
    return gradient / max(1.0, float(gradient.norm()))


def tokens_if(mean: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """Return the mistake with this gradient, ``mean(labels, tokens, sums)``.

    The ranks' numbers of labels and of tokens are (K, 1), their sums of gradients (K, D).
    """

    def mistake(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
        counts, sums = [], []
        for rank_inputs in inputs:
            weights = [weight.double() for weight in rank_inputs["weights"]]
            model = network(weights, frozen=rank_inputs["frozen"])
            x, y = torch.cat(rank_inputs["x"]).double(), torch.cat(rank_inputs["y"])
            F.cross_entropy(model(x), y, reduction="sum").backward()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
            counts.append(torch.tensor([(y != UNLABELLED).sum(), len(y)]))
            sums.append(torch.cat([grad.flatten() for grad in grads]))
        labels, tokens = torch.stack(counts).split(1, dim=1)
        gradient = clipped(mean(labels, tokens, torch.stack(sums)))
        pieces = gradient.split([weight.numel() for weight in inputs[me]["weights"]])
        return {
            GRADIENT: [
                right if right is None else piece.view_as(right).to(right.dtype)
                for piece, right in zip(pieces, expected[me][GRADIENT], strict=True)
            ]
        }

    return mistake


def clipped_by_each(labels: Tensor, tokens: Tensor, sums: Tensor) -> Tensor:
    return torch.stack([clipped(len(sums) * rank / labels.sum()) for rank in sums]).mean(0)


TOKEN_MISTAKES = {
    "a mean of the ranks' means: a label counts more on a rank that has few": tokens_if(
        lambda labels, tokens, sums: (sums / labels.clamp(min=1)).mean(0)
    ),
    "the mean divided by the number of ranks: DDP divides by it once more": tokens_if(
        lambda labels, tokens, sums: sums.mean(0) / labels.sum()
    ),
    "the mean over all tokens, but tokens without a label do not count": tokens_if(
        lambda labels, tokens, sums: sums.sum(0) / tokens.sum()
    ),
    "the mean of gradients that each rank clipped before: clip once, after the mean": tokens_if(
        clipped_by_each
    ),
}


def of_no_labels(inputs: Sequence[Any], me: int, expected: Sequence[Any], value: Any) -> str:
    loss = value.get(LOSS)
    if loss == loss:
        return ""
    return "The mean of no labels is nan: add up losses, or leave out micro-batches without labels."


# Task 7: the museum -------------------------------------------------------------------------------


def draw_script(d: Draw) -> list[Any]:
    """Draw the same weights for all ranks, and batches of its own for each."""
    large, rows = d.maybe("very wrong"), d.one_of(8, 9)
    loss = "mse_loss" if large else d.one_of("cross_entropy", "mse_loss")
    lr, steps = 1e-4 if large else d.one_of(0.1, 0.2, 0.3), d.one_of(2, 3)
    weights, test, inputs = draw_weights(d, 0.3), d.randn(rows + 2, FEATURES), []
    for rank in d.ranks:
        x = [d.randn(rows, FEATURES) + 0.5 * rank for _ in range(steps)]
        y = [targets_of(loss, (1000 if large else 1) * d.randn(rows, CLASSES)) for _ in x]
        inputs.append({"weights": weights, "x": x, "y": y, "test": test, "loss": loss, "lr": lr})
    return inputs


def run_script(script: Callable[..., Any], inputs: Any, case: Given, norm: Any = None) -> Any:
    """Train with the script; return the replica, and with `norm` the predictions for test rows."""
    model = case.model(network(inputs["weights"], norm))
    batches = case.iterable(list(zip(inputs["x"], inputs["y"], strict=True)))
    tested = [inputs["test"]] if norm else []
    loss_fn, lr = loss_of(inputs["loss"]), inputs["lr"]
    returned = script(model, loss_fn, batches, *tested, lr, group=case.group)
    return {
        "parameter {} at the end": [param.detach() for param in model.parameters()],
        "buffer {} at the end": [buffer.clone() for buffer in model.buffers()],
        "prediction": returned if norm else None,
    }


def run_with_norm(script: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Train a model with BatchNorm. The script also gets test rows, and returns predictions."""
    norm = nn.BatchNorm1d(WIDTH, dtype=inputs["weights"][0].dtype)
    return run_script(script, inputs, case, norm)


MUSEUM: dict[str, Any] = {
    "draw": draw_script,
    "variety": Variety(dtypes=("float32", "float64")),
    "allowed": Allowed(kinds=COLLECTIVES, calls=None, slack=None),
}

CHECKS = {
    "my_batches": by_reference(
        "my_batches",
        seeds=(2, 12, 13, 32, 44, 49),
        reference="course_lib.ddp.script:own_batches",
        program=run_batches,
        draw=draw_calls,
        variety=Variety(dtypes=("float32",), layouts=()),
        mistakes=BATCHES_MISTAKES,
        exact=True,
    ),
    "own_rows": by_reference(
        "own_rows",
        seeds=(0, 3, 5, 9),
        reference="course_lib.data:own_rows",
        program=run_stream,
        draw=draw_stream,
        variety=Variety(ranks=(1,), dtypes=("float32",), layouts=(), groups=False),
        judge=each_row_once,
    ),
    "train": by_reference(
        "train",
        seeds=(2, 4, 11, 13, 17, 28, 31, 33),
        reference="course_lib.ddp.script:train",
        program=run_train,
        draw=draw_training,
        variety=Variety(dtypes=("float32",)),
        mistakes=TRAIN_MISTAKES,
        as_if={
            "a run whose epochs all have the order of epoch 0: tell the sampler the epoch "
            "(set_epoch)": in_order_of_epoch_0_only
        },
        explain=of_training,
        allowed=Allowed(
            kinds=COLLECTIVES,
            calls=None,
            slack=weights_again,
            hint="Send gradients once per optimizer step, not once per micro-batch: put forward "
            "and backward of each micro-batch but a window's last into no_sync(). Wrap the model "
            "once, before the first epoch.",
        ),
        worth={"values": 4, "communication": 2},
    ),
    "evaluate": by_reference(
        "evaluate",
        seeds=(2, 3, 12, 14, 17, 20, 41, 44, 90),
        reference="course_lib.ddp.script:evaluate",
        program=run_evaluate,
        draw=draw_rows,
        variety=Variety(dtypes=("float32",)),
        mistakes=EVALUATE_MISTAKES,
        explain=of_evaluation,
        same_bits=True,
        allowed=Allowed(
            kinds=COLLECTIVES,
            calls=None,
            slack=SMALL - 16,
            hint="Send only three sums: the other ranks need no more.",
        ),
        worth={"values": 2, "communication": 1},
    ),
    "save_checkpoint": by_reference(
        "save_checkpoint",
        seeds=(2, 14, 28, 32, 39, 41, 49, 63),
        reference="course_lib.ddp.script:save_checkpoint",
        program=run_save,
        draw=draw_run,
        variety=Variety(dtypes=("float32", "float64")),
        mistakes=WROTE_MISTAKES,
        explain=of_the_file,
        exact=True,
        allowed=Allowed(kinds=COLLECTIVES, calls=None, slack=None),
    ),
    "load_checkpoint": by_reference(
        "load_checkpoint",
        seeds=(2, 8, 11, 28, 31, 45, 61),
        reference="course_lib.ddp.script:load_checkpoint",
        program=run_load,
        draw=draw_file,
        variety=Variety(dtypes=("float32", "float64")),
        mistakes={"the model before the call: nothing was loaded on this rank": nothing_loaded},
        explain=not_loaded,
        exact=True,
        # As tensors, the state takes fewer bytes than in a file.
        allowed=Allowed(kinds=COLLECTIVES, calls=None, slack=None, least=0.3),
    ),
    "token_mean_step": by_reference(
        "token_mean_step",
        seeds=(0, 1, 2, 3, 4, 8, 9, 11, 12, 16, 22, 27),
        reference="course_lib.ddp.script:token_mean_step",
        program=run_tokens,
        draw=draw_tokens,
        # A share of labels is a float32 number if PyTorch divides two counts: not float64, then.
        variety=Variety(dtypes=("float32", "float16")),
        mistakes=TOKEN_MISTAKES,
        explain=of_no_labels,
        allowed=Allowed(
            kinds=COLLECTIVES,
            calls=None,
            slack=SMALL,
            hint="Send gradients once. Put forward and backward of each micro-batch but the last "
            "into no_sync().",
        ),
        worth={"values": 4, "communication": 2},
    ),
    "exhibit_1": by_reference(
        "exhibit_1",
        seeds=(2, 8, 12, 13, 16, 17, 28),
        reference="course_lib.ddp.script:train_on_batches",
        program=run_script,
        **MUSEUM,
    ),
    "exhibit_2": by_reference(
        "exhibit_2",
        seeds=(2, 8, 11, 12, 16, 17, 22),
        reference="course_lib.ddp.script:train_and_predict",
        program=run_with_norm,
        **MUSEUM,
    ),
}
