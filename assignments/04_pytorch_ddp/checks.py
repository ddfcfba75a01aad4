"""The checks of this assignment. They are handed out: read them if a message is not enough.

`run_judges.py` has the inputs, programs and judges of batches and training runs. `judges.py` has
those of evaluation and checkpoints, `token_judges.py` those of the mean over tokens. A program gets
only its rank's input.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from course_lib.checking import (
    Allowed,
    Case,
    Draw,
    Form,
    Given,
    Variety,
    by_reference,
    calls_at_most,
    equals,
    in_many_forms,
    receives_at_least,
    sends_at_most,
    task,
)
from course_lib.checking.shared.averaging import unless_alone
from course_lib.checking.shared.training import NUMEL, SHAPES

from .models import (
    CLASSES,
    FEATURES,
    Watched,
    content_of,
    draw_weights,
    fresh_optimizer,
    loss_of,
    named_network,
    running,
)
from .run_judges import (
    SCRIPT_MISTAKES,
    epochs_inputs,
    epochs_program,
    equals_run,
    own_rows_only,
    script_inputs,
    script_program,
    windows_of,
    with_script,
)
from .token_judges import right_step, token_inputs, token_program

EXACT = {"dtypes": ("float32", "float64")}  # many steps in bfloat16 would hide a wrong one

# Task 1: the batches of a rank --------------------------------------------------------------------

_EXPECTED = "expected a list of lists of row numbers"


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


def run_batches(my_batches: Callable[..., Any], own: Any, given: Given) -> Any:
    """Call ``my_batches(length, batch_size, epoch, seed, group=group)`` several times."""
    received = {}
    for call in own["calls"]:
        batches = my_batches(*call, group=given.group)
        if not isinstance(batches, list | tuple):
            raise TypeError(f"my_batches returns {type(batches).__name__}, {_EXPECTED}")
        if any(isinstance(batch, int) for batch in batches):
            raise TypeError(f"my_batches returns {batches!r:.40}, {_EXPECTED}")
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


def batches_if(wrong: Callable[[Sequence[int], int, int], list[Rows]]) -> Callable[..., Any]:
    """Return the mistake of a function that takes these batches."""
    return lambda inputs, me, expected: {
        _batches(*call): str(wrong(call, len(inputs), me)) for call in inputs[me]["calls"]
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

# Task 3: evaluation that counts each row once -----------------------------------------------------

COLLECTIVES = (
    *("all_gather", "all_reduce", "broadcast", "reduce", "gather", "scatter", "all_to_all"),
    *("reduce_scatter", "send", "recv", "barrier"),
)
SMALL = 512  # bytes that a rank may send in addition to its gradients
LOSS, ACCURACY = "mean loss", "accuracy"
MODE = "the model was given rows in training mode"


def draw_rows(d: Draw) -> list[Any]:
    """Draw a model for all ranks, and the same rows for all ranks of a group."""
    length, size = d.one_of(7, 9, 11, 20, 23), d.one_of(2, 3, 4)
    length = d.maybe("fewer rows than ranks", d.one_of(1, 2), length)
    size = d.maybe("batches longer than a rank's rows", 32, size)
    loss = d.one_of("cross_entropy", "multi_margin_loss")
    uint8 = loss == "cross_entropy" and d.maybe("labels in uint8")
    large, overflow = d.maybe("large numbers", 100.0, 1.0), d.maybe("a row is not finite", one_in=6)
    weights, drawn = draw_weights(d, 0.5), {}
    for members in d.groups:
        x, y = large * d.randn(length, FEATURES), d.whole(CLASSES, length)
        own = {
            "weights": weights,
            "x": d.not_finite(x) if overflow else x,
            "y": y.to(torch.uint8) if uint8 else y,
            "loss": loss,
            "batch_size": size,
            "share": -(-length // len(members)),
            # The ranks may add in float32, so the sums of a float64 case are not compared.
            "compares": d.form.dtype != "float64",
        }
        drawn |= dict.fromkeys(members, own)
    return [drawn[rank] for rank in d.ranks]


def run_evaluate(evaluate: Callable[..., Any], own: Any, given: Given) -> Any:
    """Call ``evaluate(model, loss_fn, x, y, batch_size, group=group)``; report the model's rows."""
    model = Watched(own["weights"])
    given.model(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    x, y, size = own["x"], own["y"], own["batch_size"]
    answer: Any = evaluate(model, loss_of(own["loss"]), x, y, size, group=given.group)
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise TypeError(f"evaluate returns {answer!r:.60}, not a pair (mean loss, accuracy)")
    if any(p.grad is None or not bool((p.grad == 1).all()) for p in model.parameters()):
        raise RuntimeError("evaluate changes the gradients of the model, but must change nothing")
    # In training mode BatchNorm changes its buffers. Then the report must be about the mode.
    moved = any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if moved and not model.trained:
        raise RuntimeError("evaluate changes parameters or buffers, but must change nothing")
    loss, accuracy = answer
    numbers = {LOSS: loss, ACCURACY: accuracy}
    if not own["compares"]:
        numbers = {"rows that are right": round(float(accuracy) * len(x))}
    share, seen = own["share"], model.rows
    return {
        MODE: model.trained,
        **numbers,
        f"rows that the model was given beyond {share} of {len(x)}": max(0, sum(seen) - share),
        f"rows beyond {size} that it was given at once": max([0, *(n - size for n in seen)]),
    }


def mean_over(parts: Callable[[int, int, int, int], list[Rows]]) -> Callable[..., Any]:
    """Return the mistake that takes the mean over parts of the rows, each as its mean.

    ``parts(length, k, me, batch_size)`` returns lists of rows.
    """

    def mistake(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
        own, results = inputs[me], []
        model = Watched(own["weights"]).eval()
        for rows in filter(None, parts(len(own["x"]), len(inputs), me, own["batch_size"])):
            with torch.no_grad():
                out, y = model(own["x"][rows]), own["y"][rows]
            right = (out.argmax(1) == y).double().mean().item()
            results.append((loss_of(own["loss"])(out, y).item(), right))
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


# Task 4: checkpoints ------------------------------------------------------------------------------

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


def run_save(save_checkpoint: Callable[..., Any], own: Any, given: Given) -> Any:
    """Save on all ranks, each to its own disk; return the content of this rank's disk."""
    model, optimizer = running(own["run"])
    ddp: nn.Module = DistributedDataParallel(given.model(model), process_group=given.group)
    ddp.train(model.training)
    file = io.BytesIO()
    try:
        save_checkpoint(file, ddp, optimizer, own["run"]["epoch"], group=given.group)
    except pickle.PicklingError:  # no rank can import the classes of this folder
        raise ValueError(f"{_UNREADABLE} whole objects: save their state_dict()") from None
    if file.closed:
        raise RuntimeError(
            "save_checkpoint closes the file. Leave the file open: the caller closes it"
        )
    content = file.getvalue()
    after = {"model after saving": {k: v.clone() for k, v in model.state_dict().items()}}
    after |= content_of(optimizer.state_dict(), " after saving")
    if torch.distributed.get_rank(given.group) or not content:
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
    "dist.get_rank(group) == 0": lambda inputs, me, expected: {WROTE: not expected[me][WROTE]},
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
        {"run": own["run"] if rank in firsts else None, "fresh": own["fresh"]}
        | {"optimizer": own["run"]["optimizer"], "lr": 0.123 + 0.1 * rank}
        for rank, own in enumerate(draw_run(d))
    ]


def run_load(load_checkpoint: Callable[..., Any], own: Any, given: Given) -> Any:
    """Load into a fresh model and optimizer; return their content."""
    file = None
    if own["run"] is not None:
        model, optimizer = running(own["run"])
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        file = io.BytesIO()
        torch.save({**state, "epoch": own["run"]["epoch"]}, file)
        file.seek(0)
    model = given.model(named_network(own["fresh"]["weights"], own["fresh"]["scale"]))
    optimizer = fresh_optimizer(model, own["optimizer"], own["lr"])
    epoch = load_checkpoint(file, model, optimizer, group=given.group)
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


# Task 2: training ---------------------------------------------------------------------------------


def epochs_case(name, k, **parameters):
    usual = {"length": 10, "batch_size": 2, "accumulate": 1, "epochs": [0, 1], "lr": 0.2}
    return Case(name, k, {**usual, "seed": 0, **parameters})


MARGIN = {"length": 9, "loss": "multi_margin_loss"}


@epochs_program
def train_program(train, model, loss_fn, mine, given):
    settings = [mine[key] for key in ("lr", "batch_size", "accumulate")]
    epochs = given.iterable(mine["epochs"])
    return train(
        model, loss_fn, mine["x"], mine["y"], *settings, epochs, mine["seed"], group=given.group
    )


def steps(case, rank):
    """Return the number of optimizer steps."""
    return len(windows_of(case.parameters, len(case.members(rank))))


def gradient_bytes(case, rank):
    """Return the bytes that a rank sends if it sends its gradients once per optimizer step."""
    return steps(case, rank) * (NUMEL * case.itemsize + 64) + SMALL


def trained_bytes(case, rank):
    """Return the bytes of the gradients of trained parameters."""
    frozen = case.parameters.get("frozen", ())
    trained = (torch.Size(shape).numel() for i, shape in enumerate(SHAPES) if i not in frozen)
    return sum(trained) * case.itemsize


def gradients_of_others(case, rank):
    """Return the bytes that a rank must receive: the gradients of trained parameters, each step."""
    return steps(case, rank) * trained_bytes(case, rank)


# Task 5: the mean over tokens --------------------------------------------------------------


def tokens_case(name, k, *tokens, **more):
    return Case(name, k, {"tokens": tokens, **more})


# Task 6: the museum ------------------------------------------------------------------------


def script_case(name, k, kind, steps, rows, lr, **more):
    # BatchNorm divides by the deviation of a batch. With three rows it can be so small that
    # rounding shows in the weights, so the cases have eight rows or more.
    return Case(name, k, {"kind": kind, "steps": steps, "rows": rows, "lr": lr, **more})


def mended(name, kind, *more, modes=(True, False)):
    """Return the check of an exhibit whose batches are given, with the cases of all exhibits."""
    return task(
        name,
        inputs=script_inputs,
        program=script_program,
        judges=[equals(with_script(), SCRIPT_MISTAKES)],
        cases=in_many_forms(
            script_case("1 rank", 1, kind, 2, 8, 0.2),
            script_case("2 ranks", 2, kind, 3, 9, 0.1, loss="mse_loss"),
            script_case("3 ranks", 3, kind, 3, 9, 0.3),
            script_case("4 ranks, in two groups", 4, kind, 2, 8, 0.2),
            script_case("2 ranks, very wrong", 2, kind, 2, 8, 1e-4, loss="mse_loss", large=1000),
            *more,
            modes=modes,
            **EXACT,
        ),
    )


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
    "train": task(
        "train",
        inputs=epochs_inputs,
        program=train_program,
        judges=[
            equals_run("parameter", "buffer", tolerance={"float64": 1e-9}),
            equals_run("loss", tolerance={"float64": 1e-6}),
            own_rows_only,
        ],
        expects=[
            sends_at_most(
                gradient_bytes,
                kinds=["all_reduce"],
                hint="Send gradients once per optimizer step, not once per micro-batch. Put "
                "forward and backward of each micro-batch but a window's last into no_sync().",
            ),
            sends_at_most(
                lambda case, rank: 5 * (NUMEL * case.itemsize + SMALL) // 2,
                besides=["all_reduce"],
                hint="Wrap the model once, before the first epoch.",
            ),
            calls_at_most(all_reduce=lambda case, rank: (len(SHAPES) + 2) * steps(case, rank)),
            receives_at_least(unless_alone(gradients_of_others), kinds=["all_reduce"]),
        ],
        worth={"values": 4, "communication": 2},
        cases=in_many_forms(
            epochs_case("1 rank, 7 rows", 1, length=7, accumulate=2),
            epochs_case("2 ranks, 16 rows, windows of 2", 2, length=16, accumulate=2, lr=0.1),
            epochs_case(
                "3 ranks, 14 rows, squared error",
                *(3,),
                **{"length": 14, "accumulate": 3, "epochs": [5, 2], "seed": 5, "loss": "mse_loss"},
            ),
            epochs_case(
                "4 ranks, 21 rows, in two groups",
                *(4,),
                **{"length": 21, "batch_size": 3, "accumulate": 3, "loss": "smooth_l1_loss"},
            ),
            epochs_case("2 ranks, a frozen layer", 2, **MARGIN, epochs=[0, 1, 2], frozen=[0, 1]),
            epochs_case(
                "2 ranks, 14 rows, windows of 3",
                *(2,),
                **{"length": 14, "accumulate": 3, "lr": 0.1, "loss": "mse_loss"},
            ),
            epochs_case("2 ranks, .grad is not empty", 2, length=8, accumulate=2, filled=True),
            epochs_case(
                "2 ranks, large gradients", 2, length=8, lr=1e-4, loss="mse_loss", large=1000
            ),
            **EXACT,
        ),
        in_turn=[(1, 4)],
    ),
    "evaluate": by_reference(
        "evaluate",
        seeds=(1, 2, 5, 9, 12, 14, 28, 31, 41, 49),
        reference="course_lib.ddp.script:evaluate",
        program=run_evaluate,
        draw=draw_rows,
        variety=Variety(dtypes=("float32", "float64")),
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
        "save_checkpoint", seeds=(2, 14, 28, 32, 39, 41, 49, 63),
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
        "load_checkpoint", seeds=(2, 8, 11, 28, 31, 45, 61),
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
    "token_mean_step": task(
        "token_mean_step",
        inputs=token_inputs,
        program=token_program,
        judges=[right_step],
        expects=[
            sends_at_most(
                lambda case, rank: trained_bytes(case, rank) + SMALL,
                besides=["broadcast"],
                hint="Send gradients once. Put forward and backward of each micro-batch but the "
                "last into no_sync().",
            ),
            receives_at_least(unless_alone(trained_bytes)),
        ],
        worth={"values": 4, "communication": 2},
        cases=in_many_forms(
            tokens_case("1 rank, 2 micro-batches", 1, [(6, 4), (3, 3)]),
            tokens_case("2 ranks, 24 labels and 2", 2, [(16, 16), (9, 8)], [(4, 2)]),
            tokens_case("2 ranks, large gradients", 2, [(9, 7), (4, 4)], [(5, 3), (2, 1)], size=9),
            tokens_case("3 ranks, one without labels", 3, [(5, 0)], [(8, 8)], [(7, 3), (2, 1)]),
            tokens_case(
                "4 ranks, in two groups",
                *(4, [(5, 5), (2, 2), (3, 1)], [(4, 4)], [(9, 6), (2, 0)], [(3, 1)]),
            ),
            tokens_case("2 ranks, no rows", 2, [(0, 0)], [(6, 5), (0, 0), (3, 1)]),
            tokens_case(
                "2 ranks, a frozen layer", 2, [(6, 6), (5, 1)], [(9, 3)], frozen=[1, 2], size=3
            ),
            tokens_case("2 ranks, .grad is not empty", 2, [(8, 6)], [(3, 2), (4, 1)], filled=True),
            replace(
                tokens_case("2 ranks, 6000 labels", 2, [(3900, 3800)], [(2300, 2200)], size=800),
                form=Form(dtype="float16"),
            ),
            iterables=("list", "tuple"),
            **EXACT,
        ),
        in_turn=[(1, 2)],
    ),
    "exhibit_1": mended("exhibit_1", "plain"),
    "exhibit_2": mended(
        "exhibit_2",
        "experts",
        script_case("2 ranks, another model", 2, "plain", 2, 3, 0.2),
        script_case("2 ranks, a frozen expert", 2, "experts", 2, 3, 0.2, frozen=[2]),
    ),
    "exhibit_3": mended(
        "exhibit_3",
        "norm",
        Case(
            "2 ranks, in evaluation mode",
            *(2, {"kind": "norm", "steps": 2, "rows": 8, "lr": 0.2}),
            form=Form(training=False),
        ),
        modes=(True,),
    ),
}
