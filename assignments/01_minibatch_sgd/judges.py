"""Batches, accumulated gradients, the variance of a gradient: inputs, programs and judges.

A random answer is judged by counting, where there are few possible answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations, combinations_with_replacement, permutations
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checking import Case, Given, Wrong, equals
from course_lib.checking.answers import NUMBER, TEXT, Judge, Kind, ListOf, sees
from course_lib.checking.forbidden import refusing
from course_lib.checking.judges import Oracle
from course_lib.checking.shared.chance import ENOUGH, equally_likely
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

# Batches that are drawn without replacement -------------------------------------------------------

FEW = 30
"""If there are at most so many different epochs, all of them must be equally likely."""
EPOCHS = 5
"""So many epochs in a row have the same batches by chance less than once in 10^9 times. With sorted
rows in each batch, 9 rows in batches of 4 make only 630 different epochs."""
FIRST, AGAIN = "epoch {}, batch {}", "epoch {}, batch {}, with the same seed"
MANY = "many epochs"
_DATA = torch.utils.data
LIBRARY = (
    *(_DATA.DataLoader, _DATA.BatchSampler, _DATA.RandomSampler, _DATA.SequentialSampler),
    *(_DATA.SubsetRandomSampler, _DATA.WeightedRandomSampler, _DATA.DistributedSampler),
)
"""PyTorch's samplers and loaders, which are refused because they already do the task."""
FROM_GENERATOR = (
    "Draw every random number from `generator`, as in torch.randperm(…, generator=generator)."
)


def seed_of(generator: torch.Generator) -> int:
    """Draw a seed."""
    return int(torch.randint(2**31, (), generator=generator))


def batch_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Return the case's ``n``, ``batch_size`` and ``drop_last``, a seed, and how often to draw."""
    kinds = len(_possible(case))
    epochs = 4 * ENOUGH * kinds if 1 < kinds <= FEW else 0
    return [{**case.parameters, "seed": seed_of(generator), "epochs": epochs}]


def _possible(case: Case) -> set[str]:
    """Return what `_in_words` gives for every possible epoch; nothing if there are many rows."""
    n, size, drop = (case.parameters[key] for key in ("n", "batch_size", "drop_last"))
    if n > 5:
        return set()
    whole = n - n % size if drop else n
    return {_in_words(torch.tensor(order)[:whole].split(size)) for order in permutations(range(n))}


def _in_words(epoch: Sequence[Any]) -> str:
    """Return the batches of an epoch as text; the order of rows in a batch does not matter."""
    try:
        return " ".join(str(sorted(batch.tolist())) for batch in epoch)
    except (AttributeError, TypeError):  # the judge reports this from the first epochs
        return ""


def batch_program(minibatches: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``minibatches(n, batch_size, generator, drop_last=…)`` for one epoch after the other."""

    def epochs(count: int, **drop_last: bool) -> list[list[Any]]:
        generator = torch.Generator().manual_seed(mine["seed"])
        arguments = mine["n"], mine["batch_size"], generator
        with refusing(*LIBRARY):
            return [_listed(minibatches(*arguments, **drop_last)) for _ in range(count)]

    asked = {"drop_last": mine["drop_last"]}
    return {
        # These calls do not pass drop_last=False, so that a changed default shows.
        FIRST: epochs(EPOCHS, **(asked if mine["drop_last"] else {})),
        AGAIN: epochs(1, **asked),
        MANY: [_in_words(each) for each in epochs(mine["epochs"], **asked)],
    }


def _is_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.dtype == torch.int64


_EPOCH = ListOf(Kind("a vector of row numbers (int64)", _is_rows, "vectors"))


def _listed(batches: Any) -> list[Any]:
    """Return the values that the student's function yielded or returned, as a list."""
    if batches is None:
        raise TypeError("minibatches returned None: yield the batches, or return a list of them")
    return list(batches)


@sees({FIRST: [_EPOCH] * EPOCHS, AGAIN: [_EPOCH], MANY: ListOf(TEXT, 4 * ENOUGH * FEW)})
def without_replacement(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge batches: each row once per epoch, with all orders equally likely."""
    n, size, drop = (case.parameters[key] for key in ("n", "batch_size", "drop_last"))
    asked = f"minibatches({n}, {size}, generator, drop_last={drop})"
    first, *others = values[0][FIRST]
    _judge_epoch(asked, n, size, drop, first)
    possible = _possible(case)  # of few epochs, all may be equal by chance
    if len(first) > 1 and not possible and all(_same_batches(first, each) for each in others):
        hint = "Shuffle anew in every epoch: the next draw from the generator is a different order."
        raise Wrong(f"{asked}: {EPOCHS} epochs in a row have the same batches", hint)
    if not _same_batches(first, values[0][AGAIN][0]):
        raise Wrong(f"{asked}: the same seed gives other batches the second time", FROM_GENERATOR)
    _judge_chances(asked, values[0][MANY], possible)


def _judge_epoch(asked: str, n: int, size: int, drop: bool, batches: Sequence[Any]) -> None:
    rest = [n % size] if n % size and not drop else []
    sizes, right = [len(batch) for batch in batches], [size] * (n // size) + rest
    if sizes != right:
        hint = "Leave out a batch only if drop_last=True, and only a shorter one at the end."
        if sizes[: n // size] != right[: n // size]:
            hint = f"Each batch has batch_size = {size} rows; only the last one may have fewer."
        if set(sizes) <= {size} and len(sizes) < n // size:
            hint = f"Keep every full batch, here {n // size}. Leave out only a shorter last batch."
        raise Wrong(f"{asked}: the batches have {sizes} rows, expected {right}", hint)
    rows = [row for batch in batches for row in batch.tolist()]
    if not set(rows) <= set(range(n)):
        raise Wrong(f"{asked}: rows {min(rows)} to {max(rows)} occur, expected 0 to {n - 1}")
    if repeated := sorted(row for row in set(rows) if rows.count(row) > 1):
        row = repeated[0]
        hint = "Draw without replacement: no row may be drawn again in the same epoch."
        raise Wrong(f"{asked}: row {row} comes {rows.count(row)} times in one epoch", hint)


def _same_batches(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return [batch.tolist() for batch in one] == [batch.tolist() for batch in other]


def _judge_chances(asked: str, many: Sequence[str], possible: set[str]) -> None:
    """Raise `Wrong` unless every possible epoch comes equally often."""
    counts = Counter(many)
    if strange := sorted(counts.keys() - possible):
        raise Wrong(f"{asked}: a later epoch has the batches {strange[0] or 'of no row numbers'}")
    if not many or equally_likely(counts.values(), len(possible)):
        return
    hint = "Every order of the rows must be equally likely: a shuffle by hand may prefer some."
    if len(counts) < len(possible):
        hint = "Every order of the rows must be possible: shuffle the rows, not the batches."
    often, count = counts.most_common(1)[0]
    raise Wrong(
        f"{asked}: the batches {often} come in {count} of {len(many)} epochs, expected about "
        f"{len(many) / len(possible):.0f}; {len(counts)} of {len(possible)} possible epochs come",
        hint,
    )


# A gradient that is added up over micro-batches ---------------------------------------------------

# Micro-batch j has b_j of the B rows and the mean gradient g_j. The right sum is
# ``sum_j b_j/B g_j``. Nearly every mistake is a different choice of the factors, so the report can
# name it if its numbers appear.

AT_A_TIME = "micro-batches in memory at a time (backward() frees one)"

Factors = Callable[[Tensor], Tensor]
"""``factors(rows)``: the factor of each micro-batch, from the numbers of rows b_j."""


def share(rows: Tensor) -> Tensor:
    """Weigh each micro-batch by its number of rows: b_j / B."""
    return rows / rows.sum()


MISTAKES: dict[str, Factors] = {
    "the plain mean over the micro-batches, though the last micro-batch is shorter": (
        lambda rows: torch.ones_like(rows) / len(rows)
    ),
    "the sum over the micro-batches: weight each micro-batch by its share of the rows": (
        torch.ones_like
    ),
}


def draw_rows(count: int, loss: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw rows and targets for the loss, a function of ``torch.nn.functional``."""
    x = torch.randn(count, FEATURES, generator=generator)
    y = torch.randn(count, CLASSES, generator=generator)
    return x, targets_of(loss, y)


def draw_model(case: Case, generator: torch.Generator) -> dict[str, Any]:
    """Draw the weights of a model, and the ``.grad`` of its parameters before any call.

    A ``.grad`` is None if the case is ``fresh``, and for parameters at the positions ``frozen``.
    """
    weights = [0.3 * torch.randn(shape, generator=generator) for shape in SHAPES]
    before = [torch.randn(shape, generator=generator) for shape in SHAPES]
    fresh, frozen = case.parameters.get("fresh", False), list(case.parameters.get("frozen", ()))
    kept = [None if fresh or i in frozen else each for i, each in enumerate(before)]
    return {"weights": weights, "before": kept, "frozen": frozen}


def model_of(mine: Any) -> nn.Module:
    """Return the model with these weights and gradients."""
    model = make_model(mine["weights"], mine["frozen"])
    for param, gradient in zip(model.parameters(), mine["before"], strict=True):
        param.grad = None if gradient is None else gradient.clone()
    return model


def accumulation_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw a model and rows for two calls.

    The case has ``rows`` (their number in each call), ``micro`` (the rows of a micro-batch) and
    ``loss``.
    """
    loss = case.parameters["loss"]
    calls = [draw_rows(count, loss, generator) for count in case.parameters["rows"]]
    x, y = zip(*calls, strict=True)
    more = {"loss": loss, "micro": case.parameters["micro"]}
    return [{**draw_model(case, generator), "x": list(x), "y": list(y), **more}]


def accumulation_program(accumulate: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``accumulate(model, loss_fn, x, y, micro_batch_size)`` twice, and watch its rows."""
    seen: list[list[int]] = []
    graphs: list[Any] = []
    most = 0

    # The hooks are on the layers, not on the model, to see code that calls them one by one as well.
    def watch_rows(_: nn.Module, arguments: Any) -> None:
        # As Python's numbers, which no transformation of torch.func wraps.
        seen.append(_row_numbers(arguments[0], x).tolist())

    def watch_graph(_: nn.Module, arguments: Any, output: Tensor) -> None:
        nonlocal most
        graphs[:] = [graph for graph in graphs if not _is_freed(graph)]
        if output.requires_grad:
            graphs.append(output.grad_fn)
            most = max(most, len(graphs))

    module, loss_fn = model_of(mine), loss_of(mine["loss"])
    first, *_, last = module.children()
    first.register_forward_pre_hook(watch_rows)
    last.register_forward_hook(watch_graph)
    model = given.model(module)
    losses = []
    for x, y in zip(mine["x"], mine["y"], strict=True):
        losses.append(accumulate(model, loss_fn, x, y, mine["micro"]))
    return {
        "parameter {} after the call": [param.detach() for param in model.parameters()],
        "gradient of parameter {}": [param.grad for param in model.parameters()],
        "loss returned by call {}": losses,
        "rows of forward pass {}": [torch.tensor(rows, dtype=torch.int64) for rows in seen],
        AT_A_TIME: most,
    }


def _row_numbers(rows: Tensor, x: Tensor) -> Tensor:
    """Return the position of each row in x; -1 if x does not contain it."""
    same = (rows.detach().reshape(-1, 1, x.shape[-1]) == x[None]).all(-1)
    return torch.where(same.any(1), same.int().argmax(1), -1)


def _is_freed(graph: Any) -> bool:
    """Return whether backward has freed the tensors that the last layer saved for it."""
    try:
        return graph._saved_mat1 is None
    except RuntimeError:
        return True


def equals_accumulated(*keys: str, **options: Any) -> Judge:
    """Judge the result of `accumulation_program` by one backward pass over all rows.

    Args:
        *keys: first words of the keys of the values to judge.
        **options: options of `equals`.

    """

    def some(oracle: Oracle) -> Oracle:
        return lambda case, inputs, me: those(oracle(case, inputs, me), keys)

    mistakes = {name: some(_oracle(factors)) for name, factors in MISTAKES.items()}
    mistakes["the right gradient, added to the .grad from before the call"] = some(
        _oracle(carry=1.0)
    )
    return looking_at(keys, equals(some(_oracle()), mistakes, **options))


def _oracle(factors: Factors = share, carry: float = 0.0) -> Oracle:
    """Return the oracle of these factors; `carry` times the previous gradient is added to it."""

    def oracle(case: Case, inputs: Any, me: int) -> Any:
        mine = inputs[0]
        model = make_model([weight.double() for weight in mine["weights"]])
        held: list[Any] = [0.0 if g is None else g.double() for g in mine["before"]]
        losses, numbers = [], []
        for x, y in zip(mine["x"], mine["y"], strict=True):
            parts = list(zip(x.split(mine["micro"]), y.split(mine["micro"]), strict=True))
            rows = torch.tensor([len(part) for part, _ in parts], dtype=torch.float64)
            means = [mean_loss(model, mine["loss"], *part) for part in parts]
            grads = [torch.autograd.grad(mean, list(model.parameters())) for mean in means]
            shares = factors(rows)
            for i in range(len(held)):
                mixed = sum(f * g[i] for f, g in zip(shares, grads, strict=True))
                held[i] = mixed + carry * held[i]
            losses.append(sum(f * m for f, m in zip(shares, means, strict=True)).item())
            numbers += [
                torch.arange(len(x))[i : i + mine["micro"]] for i in range(0, len(x), mine["micro"])
            ]
        dtype = mine["weights"][0].dtype
        return {
            "parameter {} after the call": mine["weights"],
            "gradient of parameter {}": [
                None if i in mine["frozen"] else each.to(dtype) for i, each in enumerate(held)
            ],
            "loss returned by call {}": losses,
            "rows of forward pass {}": numbers,
            AT_A_TIME: 1,
        }

    return oracle


# The variance of a batch's gradient, measured -----------------------------------------------------

# The rows are so few that there are few batches, and few right numbers.


def variance_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw a model and ``n`` rows; the case has ``batch_size``, ``num_batches`` and ``loss``.

    It has also ``calls``, the number of additional calls, all with one generator.
    """
    asked = {key: case.parameters[key] for key in ("loss", "batch_size", "num_batches", "calls")}
    x, y = draw_rows(case.parameters["n"], asked["loss"], generator)
    return [{**draw_model(case, generator), **asked, "x": x, "y": y, "seed": seed_of(generator)}]


def variance_program(gradient_variance: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call the function twice with the same seed; return its numbers, and the unchanged state."""
    model, loss_fn = given.model(model_of(mine)), loss_of(mine["loss"])
    arguments = model, loss_fn, mine["x"], mine["y"], mine["batch_size"], mine["num_batches"]
    found = [
        gradient_variance(*arguments, torch.Generator().manual_seed(mine["seed"])) for _ in range(2)
    ]
    generator = torch.Generator().manual_seed(mine["seed"] + 1)
    more = [gradient_variance(*arguments, generator) for _ in range(mine["calls"])]
    return {
        "variance returned by call {}": found,
        "more": more,
        ".grad of parameter {} after the call": [param.grad for param in model.parameters()],
        "parameter {} after the call": [param.detach() for param in model.parameters()],
    }


def _as_it_was(mine: Any) -> dict[str, Any]:
    return {
        ".grad of parameter {} after the call": mine["before"],
        "parameter {} after the call": mine["weights"],
    }


def _form(case: Case, inputs: Sequence[Any], rank: int) -> Any:
    """Return the form of an answer: numbers, and the model as it was before."""
    numbers = {"variance returned by call {}": [NUMBER] * 2, "more": [NUMBER] * inputs[0]["calls"]}
    return {**numbers, **_as_it_was(inputs[0])}


@sees(_form)
def drawn_anew(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge the numbers: each must be the mean over some ``num_batches`` batches.

    In all calls together, every batch must occur, and must also occur together with batches from
    outside its own epoch.
    """
    size, count = case.parameters["batch_size"], case.parameters["num_batches"]
    rows = row_gradients(inputs[0])
    full, n = rows.mean(0), len(rows)
    means = {drawn: rows[list(drawn)].mean(0) for drawn in combinations(range(n), size)}
    lengths = {drawn: (mean - full).square().sum().item() for drawn, mean in means.items()}
    near = {"float64": 1e-10}.get(case.form.dtype, 1e-5) * (rows - full).square().sum().item()
    different = sorted(lengths.values())
    different = [a for a, b in zip(different, [*different[1:], inf], strict=True) if b - a > near]
    asked = f"the variance of {count} batches of {size} of {n} rows"
    first, again = (float(value) for value in values[0]["variance returned by call {}"])
    seen: set[tuple[float, ...]] = set()
    for got in (first, *map(float, values[0]["more"])):
        fitting = [
            drawn
            for drawn in combinations_with_replacement(different, count)
            if abs(sum(drawn) / count - got) <= near
        ]
        if not fitting:
            possible = ", ".join(f"{each:.5g}" for each in different)
            raise Wrong(
                f"{asked} is {got:.5g}, but {count} batches cannot have this mean: for a single "
                f"batch, |g_B - ∇F|² can only be one of {possible}",
                _named_otherwise(got, list(means.values()), count, near),
            )
        seen.update(fitting)
    if first != again:
        raise Wrong(
            f"{asked} is a different number the second time, with the same seed", FROM_GENERATOR
        )
    if len(different) == 1:
        return
    if len(seen) == 1:
        hint = f"Every call must draw new batches. {FROM_GENERATOR}"
        raise Wrong(f"{asked} is the same number in each of {len(values[0]['more'])} calls", hint)
    if all(len(set(drawn)) == 1 for drawn in seen):
        hint = (
            "Draw each of the num_batches batches anew from all rows: do not use one batch for "
            "all, and do not take the next batch of an epoch."
        )
        raise Wrong(f"{asked}: in every call, |g_B - ∇F|² is the same for all batches", hint)
    if missing := sorted(set(different) - {each for drawn in seen for each in drawn}):
        hint = "Every combination of rows must be possible as a batch."
        raise Wrong(f"{asked}: in all calls, no batch has |g_B - ∇F|² = {missing[0]:.5g}", hint)


def _named_otherwise(got: float, means: Sequence[Tensor], count: int, near: float) -> str:
    """Return a hint, a special one if `got` is the spread of some batches around their own mean."""
    for drawn in combinations_with_replacement(means, count):
        spread = (torch.stack(drawn) - torch.stack(drawn).mean(0)).square().sum().item()
        for divisor in (count, max(1, count - 1)):
            if abs(spread / divisor - got) <= near:
                return (
                    "This is the spread around the mean of the drawn batches, but ∇F is the mean "
                    "over all rows."
                )
    return (
        "The variance is the mean of |g_B - ∇F|² over num_batches batches. Draw each batch without "
        "replacement. |…|² is a sum over all parameters."
    )


model_stays = looking_at(
    (".grad", "parameter"),
    equals(
        lambda case, inputs, me: _as_it_was(inputs[0]),
        explain=lambda *_: (
            "Measure at the weights that the model has, and take no step. torch.autograd.grad does "
            "not touch .grad; backward() adds to it."
        ),
    ),
)
"""Judge whether weights and gradients are unchanged."""


def row_gradients(mine: Any) -> Tensor:
    """Return the gradient of every single row as a matrix with one line per row, in float64."""
    model = make_model([weight.double() for weight in mine["weights"]])
    params = list(model.parameters())
    lines = []
    for x, y in zip(mine["x"].split(1), mine["y"].split(1), strict=True):
        gradients = torch.autograd.grad(mean_loss(model, mine["loss"], x, y), params)
        lines.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(lines)
