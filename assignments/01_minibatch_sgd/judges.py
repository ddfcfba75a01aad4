"""Judges of random answers: batches, and the variance of a gradient.

A random answer is judged by counting, where there are few possible answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, combinations_with_replacement, permutations
from math import factorial, inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.checking import Case, Wrong, expect_equal
from course_lib.checking.judges import ENOUGH, equally_likely
from course_lib.checking.on_ranks.given import linear_of

# Batches that are drawn without replacement -------------------------------------------------------

FEW = 30
"""If there are at most so many different epochs, all of them must be equally likely."""
EPOCHS = 5
"""So many epochs in a row have the same batches by chance less than once in 10^9 times, if at least
200 epochs are possible, even with sorted rows in each batch."""
FIRST, AGAIN = "epoch {}, batch {}", "epoch {}, batch {}, with the same seed"
OTHER, MANY = "epoch {}, batch {}, with the other drop_last", "many epochs"
_DATA = torch.utils.data
LIBRARY = (
    *(_DATA.DataLoader, _DATA.BatchSampler, _DATA.RandomSampler, _DATA.SequentialSampler),
    *(_DATA.SubsetRandomSampler, _DATA.WeightedRandomSampler, _DATA.DistributedSampler),
)
"""PyTorch's samplers and loaders, which are refused because they already do the task."""
FROM_GENERATOR = (
    "Draw every random number from `generator`, as in torch.randperm(…, generator=generator)."
)


def epochs_to_count(inputs: Any) -> int:
    """Return how many epochs show whether all are equally likely; 0 if there are too many."""
    kinds = _kinds(inputs)
    return 4 * ENOUGH * kinds if 1 < kinds <= FEW else 0


def _kinds(inputs: Any) -> int:
    """Return how many different epochs there are; the order of rows in a batch does not matter."""
    full, leftover = divmod(inputs["n"], inputs["batch_size"])
    return factorial(inputs["n"]) // factorial(inputs["batch_size"]) ** full // factorial(leftover)


def _possible(inputs: Any) -> set[str]:
    """Return what `in_words` gives for every possible epoch."""
    n, size = inputs["n"], inputs["batch_size"]
    end = n - n % size if inputs["drop_last"] else n
    return {in_words(torch.tensor(order)[:end].split(size)) for order in permutations(range(n))}


def in_words(epoch: Sequence[Any]) -> str:
    """Return the batches of an epoch as text; the order of rows in a batch does not matter."""
    try:
        return " ".join(str(sorted(batch.tolist())) for batch in epoch)
    except (AttributeError, TypeError):  # the judge reports this from the first epochs
        return ""


def without_replacement(case: Case, inputs: Any, expected: Any, values: Sequence[Any]) -> None:
    """Judge batches: each row once per epoch, with all orders equally likely."""
    rank_inputs = inputs[0]
    call = _call(rank_inputs)
    first, *later_epochs = values[0][FIRST]
    _judge_epoch(rank_inputs, first)
    # A few epochs may all be equal by chance.
    alike = all(_same(first, epoch) for epoch in later_epochs)
    if len(first) > 1 and _kinds(rank_inputs) > 200 and alike:
        hint = "Shuffle anew in every epoch: the next draw from the generator is a different order."
        raise Wrong(f"{call}: {EPOCHS} epochs in a row have the same batches", hint)
    for epoch in later_epochs:
        _judge_epoch(rank_inputs, epoch)
    if not _same(first, values[0][AGAIN][0]):
        raise Wrong(f"{call}: the same seed gives other batches the second time", FROM_GENERATOR)
    _judge_epoch({**rank_inputs, "drop_last": not rank_inputs["drop_last"]}, values[0][OTHER][0])
    if rank_inputs["epochs"]:
        _judge_chances(call, values[0][MANY], _possible(rank_inputs))


def _call(inputs: Any) -> str:
    n, size, drop_last = inputs["n"], inputs["batch_size"], inputs["drop_last"]
    return f"minibatches({n}, {size}, generator, drop_last={drop_last})"


def _judge_epoch(inputs: Any, batches: Sequence[Tensor]) -> None:
    call, n, size = _call(inputs), inputs["n"], inputs["batch_size"]
    last_sizes = [n % size] if n % size and not inputs["drop_last"] else []
    sizes, right = [len(batch) for batch in batches], [size] * (n // size) + last_sizes
    if sizes != right:
        hint = (
            f"Each batch has batch_size = {size} rows. Only the last one may be shorter, and it is "
            "left out only if it is shorter, and only if drop_last=True."
        )
        raise Wrong(f"{call}: the batches have {sizes} rows, expected {right}", hint)
    rows = Counter(row for batch in batches for row in batch.tolist())
    if not set(rows) <= set(range(n)):
        raise Wrong(f"{call}: rows {min(rows)} to {max(rows)} occur, expected 0 to {n - 1}")
    if repeated := sorted(row for row, count in rows.items() if count > 1):
        row = repeated[0]
        hint = "Draw without replacement: no row may be drawn again in the same epoch."
        raise Wrong(f"{call}: row {row} comes {rows[row]} times in one epoch", hint)


def _same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return [batch.tolist() for batch in first] == [batch.tolist() for batch in second]


def _judge_chances(call: str, epochs: Sequence[str], possible: set[str]) -> None:
    """Raise `Wrong` unless every possible epoch comes equally often."""
    counts = Counter(epochs)
    if strange := sorted(counts.keys() - possible):
        raise Wrong(f"{call}: a later epoch has the batches {strange[0] or 'of no row numbers'}")
    if equally_likely(counts.values(), len(possible)):
        return
    hint = (
        "Every order of the rows must be equally likely: shuffle the rows, not the batches. A "
        "shuffle by hand may prefer some orders."
    )
    often, count = counts.most_common(1)[0]
    raise Wrong(
        f"{call}: the batches {often} come in {count} of {len(epochs)} epochs, expected about "
        f"{len(epochs) / len(possible):.0f}; {len(counts)} of {len(possible)} possible epochs come",
        hint,
    )


# The variance of a batch's gradient, measured -----------------------------------------------------

TWICE, MORE = "variance returned by call {}", "variance returned by later call {}"
BEFORE, WEIGHTS = ".grad of parameter {} after the calls", "parameter {} after the calls"
OF_ALL_ROWS = (
    "The variance is the mean of |g_B - ∇F|² over num_batches batches. ∇F is the mean over all "
    "rows, not the mean of the drawn batches. Draw each batch without replacement. |…|² is a sum "
    "over all parameters."
)


def drawn_anew(case: Case, inputs: Any, expected: Any, values: Sequence[Any]) -> None:
    """Judge the numbers: each must be the mean over some batches of the drawn number.

    In all calls together, every batch must occur, and must also occur together with batches from
    outside its own epoch.
    """
    rank_inputs, value = inputs[0], values[0]
    _judge_model(rank_inputs, value)
    size, count = rank_inputs["batch_size"], rank_inputs["batches"]
    rows = _row_gradients(rank_inputs)
    full, n = rows.mean(0), len(rows)
    means = [rows[list(drawn)].mean(0) for drawn in combinations(range(n), size)]
    different = sorted((mean - full).square().sum().item() for mean in means)
    near = {"float64": 1e-10}.get(case.form.dtype, 1e-5) * (rows - full).square().sum().item()
    different = [a for a, b in zip(different, [*different[1:], inf], strict=True) if b - a > near]
    batches = f"{count} batch{'es' * (count > 1)}"
    call = f"the variance of {batches} of {size} of {n} rows"
    first, again = map(float, value[TWICE])
    draws: set[tuple[float, ...]] = set()
    for got in (first, *map(float, value[MORE])):
        fitting = [
            drawn
            for drawn in combinations_with_replacement(different, count)
            if abs(sum(drawn) / count - got) <= near
        ]
        if not fitting:
            possible = ", ".join(f"{length:.5g}" for length in different)
            raise Wrong(
                f"{call} is {got:.5g}, but {batches} cannot have this mean: for a single "
                f"batch, |g_B - ∇F|² can only be one of {possible}",
                OF_ALL_ROWS,
            )
        draws.update(fitting)
    if first != again:
        raise Wrong(
            f"{call} is a different number the second time, with the same seed", FROM_GENERATOR
        )
    if len(different) > 1:
        _judge_draws(call, rank_inputs, different, draws)


def _judge_model(inputs: Any, value: Any) -> None:
    for key, right in ((BEFORE, inputs["before"]), (WEIGHTS, inputs["weights"])):
        try:
            expect_equal({key: value[key]}, {key: right}, "rank 0", rtol=0, atol=0)
        except Wrong as error:
            hint = (
                "Measure at the weights that the model has, and take no step. torch.autograd.grad "
                "does not touch .grad; backward() adds to it."
            )
            raise Wrong(error.message, hint) from None


def _judge_draws(
    call: str, inputs: Any, different: Sequence[float], draws: set[tuple[float, ...]]
) -> None:
    """Raise `Wrong` unless every batch came, and batches in all combinations."""
    if len(draws) == 1:
        hint = f"Every call must draw new batches. {FROM_GENERATOR}"
        raise Wrong(f"{call} is the same number in each of {inputs['calls']} calls", hint)
    if inputs["batches"] > 1:
        hint = (
            "Draw each of the num_batches batches anew from all rows: do not use one batch for "
            "all, and do not take the next batch of an epoch."
        )
        if all(len(set(drawn)) == 1 for drawn in draws):
            raise Wrong(f"{call}: in every call, |g_B - ∇F|² is the same for all batches", hint)
        if all(len(set(drawn)) == len(drawn) for drawn in draws):
            raise Wrong(f"{call}: in every call, all batches differ in |g_B - ∇F|²", hint)
    if absent := sorted(set(different) - {length for drawn in draws for length in drawn}):
        hint = "Every combination of rows must be possible as a batch."
        raise Wrong(f"{call}: in all calls, no batch has |g_B - ∇F|² = {absent[0]:.5g}", hint)


def _row_gradients(inputs: Any) -> Tensor:
    """Return the gradient of every single row as a matrix with one line per row, in float64."""
    model = network_of(inputs).double()
    params, lines = list(model.parameters()), []
    for x, y in zip(inputs["x"].double().split(1), inputs["y"].split(1), strict=True):
        y = y.double() if y.is_floating_point() else y
        gradients = torch.autograd.grad(getattr(F, inputs["loss"])(model(x), y), params)
        lines.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(lines)


def network_of(inputs: Any) -> nn.Sequential:
    """Return a network that holds these weights, in their memory, and copies of these gradients."""
    params = [nn.Parameter(w, i not in inputs["frozen"]) for i, w in enumerate(inputs["weights"])]
    for param, gradient in zip(params, inputs["before"], strict=True):
        param.grad = copy_of(gradient)
    return nn.Sequential(linear_of(*params[:2]), nn.Tanh(), linear_of(*params[2:]))


def copy_of(tensor: Tensor | None) -> Tensor | None:
    """Return a copy of a tensor; None of None."""
    return None if tensor is None else tensor.clone()
