"""The checks of this assignment. They are handed out: read them if a message is not enough.

A check has a reference in `course_lib`, a program that calls a function, and a draw that makes a
case from a seed. Everything runs on one rank. `judges.py` judges random answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.checking import Draw, Given, Variety, by_reference
from course_lib.checking.forbidden import OPTIMIZERS, refusing

from .judges import (
    AGAIN,
    BEFORE,
    EPOCHS,
    FIRST,
    LIBRARY,
    MANY,
    MORE,
    OTHER,
    TWICE,
    WEIGHTS,
    copy_of,
    drawn_anew,
    epochs_to_count,
    in_words,
    network_of,
    without_replacement,
)

NO_TENSORS = Variety(ranks=(1,), dtypes=("float32",), layouts=(), groups=False)
ONE_PROCESS = Variety(ranks=(1,), dtypes=("float32", "float64"), groups=False)

# Task 1: an epoch of batches. Any order may be right, so there is a judge. ------------------------


def run_batches(minibatches: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``minibatches(n, batch_size, generator, drop_last=…)`` for one epoch after the other."""

    def epochs(count: int, **options: bool) -> list[list[Any]]:
        generator = torch.Generator().manual_seed(inputs["seed"])
        arguments = inputs["n"], inputs["batch_size"], generator
        return [_listed(minibatches(*arguments, **options)) for _ in range(count)]

    options = {"drop_last": inputs["drop_last"]}
    with refusing(*LIBRARY):
        return {
            # These calls do not pass drop_last=False, so that a changed default shows.
            FIRST: epochs(EPOCHS, **(options if inputs["drop_last"] else {})),
            AGAIN: epochs(1, **options),
            OTHER: epochs(1, drop_last=not inputs["drop_last"]),
            MANY: [in_words(epoch) for epoch in epochs(inputs["epochs"], **options)],
        }


def _listed(batches: Any) -> list[Any]:
    if batches is None:
        raise TypeError("minibatches returned None: yield the batches, or return a list of them")
    return list(batches)


def draw_batches(d: Draw) -> list[Any]:
    """Draw numbers of rows: so few that every order can be counted, or so many that none recurs."""
    drop_last = d.maybe("drop_last")
    if d.maybe("many times", one_in=2):
        n, size = d.one_of((4, 1), (4, 1), (4, 2), (3, 1), (5, 2), (5, 3))
    elif d.maybe("fewer rows than a batch"):
        n, size = d.one_of((1, 2), (3, 5), (9, 20), (5, 8))
    else:
        size = d.one_of(3, 4, 5)
        leftover = d.maybe("a shorter last batch", d.one_of(*range(1, size)), 0, one_in=2)
        n = size * d.one_of(3, 4) + leftover
    d.say(f"{n} rows in batches of {size}")
    inputs = {"n": n, "batch_size": size, "drop_last": drop_last}
    return [{**inputs, "seed": int(d.whole(2**31)), "epochs": epochs_to_count(inputs)}]


# Task 2: the step ---------------------------------------------------------------------------------


def run_steps(sgd_step: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``sgd_step(params, lr)`` with two sets of gradients; return what the memory holds."""
    params, doubles = [], inputs["doubles"]
    for i, (weight, gradient) in enumerate(zip(inputs["weights"], inputs[".grad"][0], strict=True)):
        weight = weight.double() if i in doubles else weight
        params.append(nn.Parameter(weight, requires_grad=gradient is not None))
    memory = [param.detach() for param in params]  # it keeps the old memory of a parameter
    case.watch.add_parameters("the parameters", params, values=False)
    weights, replaced = [], []
    with refusing(*OPTIMIZERS):
        for gradients, lr in zip(inputs[".grad"], inputs["lr"], strict=True):
            # Gradients of the case's dtype are those of the input, which are watched.
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = None if gradient is None else gradient.to(param.dtype)
            before = [param.grad for param in params]
            sgd_step(case.iterable(params), lr)
            weights.append([tensor.clone() for tensor in memory])
            replaced.append([param.grad is not before[i] for i, param in enumerate(params)])
    return {
        "after step {}, parameter {}": weights,
        "after step {}, whether .grad of parameter {} was replaced": replaced,
        ".grad of parameter {} after both steps": [copy_of(param.grad) for param in params],
    }


def draw_steps(d: Draw) -> list[Any]:
    """Draw parameters and two sets of gradients; the second ones are large."""
    shapes = d.one_of([(3, 2), (5,), ()], [(4, 3), (2,)], [(2, 2), (3,), (4, 2)])
    if d.maybe("an empty parameter"):
        shapes = [*shapes[:1], (0,), *shapes[1:]]
    places = range(len(shapes))
    frozen = [d.one_of(*places)] if d.maybe("a frozen parameter", one_in=2) else []
    doubles = [d.one_of(*places)] if d.maybe("two dtypes") else []
    overflow = d.maybe("an inf or a NaN in a gradient", one_in=2)
    lr = d.one_of(0.1, 0.25, 0.3, 0.6, 2.0)
    d.say(f"α = {lr}")

    def gradients(scale: float) -> list[Tensor | None]:
        drawn = [scale * d.randn(*shape) for shape in shapes]
        drawn = [d.not_finite(gradient) for gradient in drawn] if overflow else drawn
        return [None if i in frozen else gradient for i, gradient in enumerate(drawn)]

    weights = [d.randn(*shape) for shape in shapes]
    steps = [gradients(1), gradients(300)]
    return [{"weights": weights, ".grad": steps, "lr": [lr, 0.7 * lr], "doubles": doubles}]


def stepped(factor: int) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return the mistake that takes `factor` times the right step."""
    return lambda inputs: [{**inputs[0], "lr": [factor * lr for lr in inputs[0]["lr"]]}]


STEP_MISTAKES = {
    "the parameter before the steps. Update each parameter that has a gradient, in its own "
    "memory": stepped(0),
    "steps up the slope: the sign is wrong": stepped(-1),
}

# Tasks 3 and 5 call a small network. --------------------------------------------------------------

FEATURES, WIDTH, CLASSES = 8, 6, 3
SHAPES = ((WIDTH, FEATURES), (WIDTH,), (CLASSES, WIDTH), (CLASSES,))
LABELS = ("cross_entropy", "nll_loss", "multi_margin_loss")


def loss_of(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of this name as a task promises it: a mean, without options."""
    return lambda prediction, target: getattr(F, name)(prediction, target)


def draw_network(d: Draw) -> dict[str, Any]:
    """Draw weights, and what ``.grad`` of the parameters holds before a call."""
    weights, before = ([scale * d.randn(*shape) for shape in SHAPES] for scale in (0.3, 1))
    fresh = d.maybe(".grad is None at first")
    return {"weights": weights, "before": [None] * 4 if fresh else before, "frozen": []}


def draw_rows(d: Draw, count: int, loss: str) -> tuple[Tensor, Tensor]:
    scores = d.randn(count, CLASSES)
    return d.randn(count, FEATURES), scores.argmax(1) if loss in LABELS else scores


# Task 3: a batch that does not fit ----------------------------------------------------------------

GRADIENTS, LOSSES = "after call {}, gradient of parameter {}", "loss returned by call {}"
AT_A_TIME = "micro-batches in memory at a time (backward() frees one)"


def run_accumulate(accumulate_gradients: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``accumulate_gradients(model, loss_fn, x, y, micro_batch_size)`` twice."""
    module, loss_fn = network_of(inputs), loss_of(inputs["loss"])
    rows: list[int] = []
    graphs: list[Any] = []
    peak = 0

    # The hooks are on the layers, not on the model, to see code that calls them one by one as well.
    def watch_rows(_: nn.Module, arguments: Any) -> None:
        rows.append(len(arguments[0]))

    def watch_graph(_: nn.Module, arguments: Any, output: Tensor) -> None:
        nonlocal peak
        graphs[:] = [graph for graph in graphs if not _is_freed(graph)]
        if output.requires_grad:
            graphs.append(output.grad_fn)
            peak = max(peak, len(graphs))

    module[0].register_forward_pre_hook(watch_rows)
    module[-1].register_forward_hook(watch_graph)
    model = case.model(module)
    losses, gradients = [], []
    for x, y in zip(inputs["x"], inputs["y"], strict=True):
        loss = accumulate_gradients(model, loss_fn, x, y, inputs["micro"])
        losses.append(_rounded_once(loss, loss_fn(network_of(inputs)(x), y).item()))
        gradients.append([copy_of(param.grad) for param in model.parameters()])
    return {
        "parameter {} after the calls": [param.detach().clone() for param in model.parameters()],
        GRADIENTS: gradients,
        LOSSES: losses,
        "rows in forward pass {}": rows,
        AT_A_TIME: peak,
    }


def _is_freed(graph: Any) -> bool:
    """Return whether backward has freed the tensors that the last layer saved for it."""
    try:
        return graph._saved_mat1 is None
    except RuntimeError:
        return True


def _rounded_once(loss: Any, mean: float) -> Any:
    """Return the mean for a loss that is the mean up to float32: a loss may be added up in it."""
    try:
        near = math.isclose(float(loss), mean, rel_tol=1e-6, abs_tol=1e-7)
    except (TypeError, ValueError):  # it is not a number, and the comparison will say so
        return loss
    return mean if near and not getattr(loss, "requires_grad", False) else loss


def draw_accumulate(d: Draw) -> list[Any]:
    """Draw a network, and rows for two calls."""
    loss = d.one_of("cross_entropy", "mse_loss", "smooth_l1_loss", "nll_loss", "multi_margin_loss")
    micro = d.one_of(1, 2, 3, 4)
    leftover = d.one_of(0, *range(micro))
    if leftover:
        d.say("a shorter last micro-batch")
    counts = [micro * d.one_of(1, 2, 3) + leftover for _ in range(2)]
    if d.maybe("more rows fit than there are"):
        micro = max(counts) + d.one_of(0, 1, 5)
    overflow = d.maybe("an inf or a NaN in a row")
    inputs = draw_network(d)
    frozen = d.maybe("a frozen layer", d.one_of([0, 1], [2, 3], [0], [3]), [])
    inputs["frozen"] = frozen
    inputs["before"] = [None if i in frozen else g for i, g in enumerate(inputs["before"])]
    x, y = zip(*(draw_rows(d, count, loss) for count in counts), strict=True)
    x = tuple(map(d.not_finite, x)) if overflow else x
    d.say(f"{counts[0]} and {counts[1]} rows by {micro}, {loss}")
    return [{**inputs, "x": list(x), "y": list(y), "loss": loss, "micro": micro}]


def in_equal_parts(inputs: Sequence[Any]) -> Sequence[Any]:
    """Repeat rows until the last micro-batch has as many as the others, so all count the same."""
    (rank_inputs,) = inputs
    micro = rank_inputs["micro"]
    full = math.lcm(*(len(part) for x in rank_inputs["x"] for part in x.split(micro)))

    def repeated(rows: Tensor) -> Tensor:
        parts = rows.split(micro)
        return torch.cat([part.repeat_interleave(full // len(part), dim=0) for part in parts])

    x, y = (list(map(repeated, rank_inputs[key])) for key in ("x", "y"))
    return [{**rank_inputs, "x": x, "y": y, "micro": full}]


def added_to_the_old(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
    held, gradients = inputs[0]["before"], []
    for after in expected[0][GRADIENTS]:
        pairs = zip(held, after, strict=True)
        held = [new if new is None or old is None else old + new for old, new in pairs]
        gradients.append(held)
    return {GRADIENTS: gradients}


def summed(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
    """Return the sum over micro-batches of equal length; None if a last one is shorter."""
    (rank_inputs,), (values,) = inputs, expected
    if any(len(x) % rank_inputs["micro"] for x in rank_inputs["x"]):
        return None
    gradients, losses = [], []
    for x, mean, loss in zip(rank_inputs["x"], values[GRADIENTS], values[LOSSES], strict=True):
        parts = len(x) // rank_inputs["micro"]
        gradients.append([gradient if gradient is None else parts * gradient for gradient in mean])
        losses.append(parts * loss)
    return {GRADIENTS: gradients, LOSSES: losses}


SUM_MISTAKES = {
    "the right gradient, added to the .grad from before the call": added_to_the_old,
    "the sum over the micro-batches: weight each micro-batch by its share of the rows": summed,
}

# Task 4: warm-up ----------------------------------------------------------------------------------

COUNT_ROWS = "Count rows and not steps: all runs read one curve, in the middle of their batches."


def run_rates(learning_rate: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``learning_rate(rows_seen, batch, peak, warmup_rows, total_rows)`` for every step."""
    rates = [torch.zeros(len(steps), dtype=torch.float64) for steps in inputs["runs"]]
    # From the last step to the first, in both runs by turns, to find a function that counts calls.
    with refusing(*OPTIMIZERS):
        for i in reversed(range(max(map(len, rates)))):
            for held, steps in zip(rates, inputs["runs"], strict=True):
                if i < len(held):
                    if (rate := learning_rate(*steps[i], *inputs["curve"])) is None:
                        raise TypeError("learning_rate returned None, expected a number")
                    held[i] = float(rate)
    return {"run {}, rate in step": rates}


def draw_rates(d: Draw) -> list[Any]:
    """Draw a curve, and the epochs of two runs on it: one rank, and several with as many rows each.

    A step is a pair: the rows seen before it, and those of its batch.
    """
    own, ranks, epochs = d.one_of(3, 4, 5, 8), d.one_of(2, 3, 4), d.one_of(2, 3)
    leftover = d.maybe("a shorter last batch in each epoch", d.one_of(*range(1, own)), 0, one_in=2)
    n = own * ranks * d.one_of(1, 2) + leftover
    peak, total = d.one_of(0.05, 0.1, 0.3, 0.5, 1.6, 2.5e-5), epochs * n
    total -= d.maybe("the curve ends within the last batch", (leftover or own) - 1, 0)
    warmup = d.one_of(1, own, n // 2, n, total - 1)
    if d.maybe("no warm-up"):
        warmup = 0
    elif d.maybe("nothing but warm-up"):
        warmup = total
    epochs += d.maybe("an epoch after the last row", 1, 0)
    d.say(f"{warmup} of {total} rows to {peak:g}, in batches of {own} and of {ranks * own}")

    def steps(batch: int) -> list[tuple[int, int]]:
        starts = range(0, n, batch)
        return [(i * n + row, min(batch, n - row)) for i in range(epochs) for row in starts]

    return [{"curve": [peak, warmup, total], "runs": [steps(own), steps(ranks * own)]}]


def reading_at(halves: int) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return the mistake that reads the curve so many halves of a batch after the rows seen."""

    def mistake(inputs: Sequence[Any]) -> Sequence[Any]:
        runs = [[(seen, halves * b) for seen, b in steps] for steps in inputs[0]["runs"]]
        return [{**inputs[0], "runs": runs}]

    return mistake


def cosine_of_all_rows(inputs: Sequence[Any]) -> Sequence[Any]:
    peak, _, total = inputs[0]["curve"]
    return [{**inputs[0], "curve": [peak, 0, total]}]


RATE_MISTAKES = {
    "the curve where the batch begins: the first step would do nothing. Read it in the middle of "
    "the batch": reading_at(0),
    "the curve where the batch ends. Read it in the middle of the batch": reading_at(2),
    "a cosine of r/R. Count only the rows after the warm-up: (r - W)/(R - W)": cosine_of_all_rows,
}

# Task 5: the variance of a batch's gradient. Many numbers may be right, so there is a judge. ------


def run_variance(gradient_variance: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call the function twice with the same seed, then often with one generator."""
    model, loss_fn = case.model(network_of(inputs)), loss_of(inputs["loss"])
    rows, seed = (inputs["x"], inputs["y"]), inputs["seed"]
    arguments = model, loss_fn, *rows, inputs["batch_size"], inputs["batches"]
    twice = [gradient_variance(*arguments, torch.Generator().manual_seed(seed)) for _ in range(2)]
    generator = torch.Generator().manual_seed(seed + 1)
    return {
        TWICE: twice,
        MORE: [gradient_variance(*arguments, generator) for _ in range(inputs["calls"])],
        BEFORE: [copy_of(param.grad) for param in model.parameters()],
        WEIGHTS: [param.detach().clone() for param in model.parameters()],
    }


def draw_variance(d: Draw) -> list[Any]:
    """Draw so few rows that there are few batches, and so many calls that each of them comes."""
    loss = d.one_of("nll_loss", "smooth_l1_loss", "l1_loss", "cross_entropy", "mse_loss")
    n, size, batches = d.one_of((4, 2, 2), (4, 3, 2), (3, 1, 2), (3, 1, 4), (5, 2, 3), (5, 3, 3))
    if d.maybe("batches of all rows"):
        size = n
    elif d.maybe("one batch"):
        n, size, batches = 4, d.one_of(1, 2, 3), 1
    elif d.maybe("many batches"):
        n, size, batches = 3, d.one_of(1, 2), 25
    # By chance, a batch never comes, no batch comes twice in a call, or all calls give the same
    # number, less than once in 10^9 times.
    calls = 2 if size == n else max(12, 24 * math.comb(n, size) // (batches if batches > 2 else 1))
    d.say(f"{batches} times {size} of {n} rows, {loss}")
    x, y = draw_rows(d, n, loss)
    inputs = {"x": x, "y": y, "loss": loss, "batch_size": size, "batches": batches, "calls": calls}
    return [{**draw_network(d), **inputs, "seed": int(d.whole(2**31))}]


# The checks ---------------------------------------------------------------------------------------

CHECKS = {
    "minibatches": by_reference(
        "minibatches",
        seeds=(2, 4, 9, 20, 26, 34, 44, 46),
        reference="course_lib.sgd:minibatches",
        program=run_batches,
        draw=draw_batches,
        variety=NO_TENSORS,
        judge=without_replacement,
    ),
    "sgd_step": by_reference(
        "sgd_step",
        seeds=(1, 5, 8, 14, 24, 27, 31, 44),
        reference="course_lib.sgd:sgd_step",
        program=run_steps,
        draw=draw_steps,
        variety=Variety(ranks=(1,), groups=False),
        as_if=STEP_MISTAKES,
        may_change=["weights"],
    ),
    "accumulate_gradients": by_reference(
        "accumulate_gradients",
        seeds=(2, 3, 5, 14, 15, 28, 40, 49),
        reference="course_lib.sgd:accumulate_gradients",
        program=run_accumulate,
        draw=draw_accumulate,
        variety=ONE_PROCESS,
        mistakes=SUM_MISTAKES,
        as_if={
            "the plain mean over the micro-batches, though the last micro-batch is shorter": (
                in_equal_parts
            )
        },
    ),
    "learning_rate": by_reference(
        "learning_rate",
        seeds=(1, 3, 27, 30, 34, 37),
        reference="course_lib.sgd:learning_rate",
        program=run_rates,
        draw=draw_rates,
        variety=NO_TENSORS,
        as_if=RATE_MISTAKES,
        explain=lambda *_: COUNT_ROWS,
    ),
    "gradient_variance": by_reference(
        "gradient_variance",
        seeds=(2, 3, 5, 13, 20, 22, 24, 45, 46),
        reference="course_lib.sgd:gradient_variance",
        program=run_variance,
        draw=draw_variance,
        variety=ONE_PROCESS,
        judge=drawn_anew,
    ),
}
