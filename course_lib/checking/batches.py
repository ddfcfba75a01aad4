"""Batches that are drawn without replacement: inputs, program, judge.

What is random is judged by counting: each limit is six standard deviations away, so that chance
alone does not cross it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checking.answers import Kind, ListOf, sees
from course_lib.checking.cases import Case, Wrong
from course_lib.checking.forbidden import refusing
from course_lib.checking.on_ranks.given import Given

EPOCHS = 400
FIRST, AGAIN = "epoch {}, batch {}", "epoch {}, batch {}, with the same seed"
MANY = "many epochs"
_DATA = torch.utils.data
LIBRARY = (
    *(_DATA.DataLoader, _DATA.BatchSampler, _DATA.RandomSampler, _DATA.SequentialSampler),
    *(_DATA.SubsetRandomSampler, _DATA.WeightedRandomSampler, _DATA.DistributedSampler),
)
"""PyTorch's samplers and loaders: they do what the task asks for."""
FROM_GENERATOR = (
    "All that is random comes from `generator`: torch.randperm(…, generator=generator)."
)


def seed_of(generator: torch.Generator) -> int:
    """Draw a seed."""
    return int(torch.randint(2**31, (), generator=generator))


def batch_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Return what the case asks for, ``n``, ``batch_size`` and ``drop_last``, and a seed.

    It may have ``epochs``, how many are counted: a small bias shows in many only.
    """
    return [{"epochs": EPOCHS, **case.parameters, "seed": seed_of(generator)}]


def batch_program(minibatches: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``minibatches(n, batch_size, generator, drop_last=…)`` for epoch after epoch."""

    def epochs(count: int, **drop_last: bool) -> list[list[Any]]:
        generator = torch.Generator().manual_seed(mine["seed"])
        arguments = mine["n"], mine["batch_size"], generator
        with refusing(*LIBRARY):
            return [_listed(minibatches(*arguments, **drop_last)) for _ in range(count)]

    asked = {"drop_last": mine["drop_last"]}
    # What is not asked for is not said either: a default that was changed shows.
    twice, again = epochs(2, **(asked if mine["drop_last"] else {})), epochs(2, **asked)
    return {FIRST: twice, AGAIN: again, MANY: _table(epochs(mine["epochs"], **asked))}


def _table(epochs: list[list[Any]]) -> Tensor | None:
    """Return each epoch's rows with their batches; None if the epochs have unlike many, or none."""
    try:
        many = [
            [[number, int(row)] for number, batch in enumerate(epoch) for row in batch]
            for epoch in epochs
        ]
    except (TypeError, ValueError):  # the first epochs, which come as they are, show what they are
        return None
    return torch.tensor(many) if len({len(epoch) for epoch in many}) == 1 else None


def _is_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.dtype == torch.int64


def _is_many(value: Any) -> bool:
    if value is None or not isinstance(value, Tensor):
        return value is None
    return value.dtype == torch.int64 or not value.numel()  # of no batches it is float32


_EPOCHS = [ListOf(Kind("a vector of row numbers (int64)", _is_rows, "vectors"))] * 2


def _listed(batches: Any) -> list[Any]:
    """Return what the student's function yielded or returned, as a list."""
    if batches is None:
        raise TypeError("minibatches returned None: yield the batches, or return a list of them")
    return list(batches)


@sees({FIRST: _EPOCHS, AGAIN: _EPOCHS, MANY: Kind("rows and their batches (int64)", _is_many)})
def without_replacement(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge batches: each row once an epoch, in an order of which all are equally likely."""
    n, size, drop = (case.parameters[key] for key in ("n", "batch_size", "drop_last"))
    asked = f"minibatches({n}, {size}, generator, drop_last={drop})"
    first, second = values[0][FIRST]
    _judge_epoch(asked, n, size, drop, first)
    if len(first) > 1 and _same_batches(first, second):
        hint = "Every epoch is shuffled anew: what the generator draws next is another order."
        raise Wrong(f"{asked}: two epochs have the same batches", hint)
    if not _same_batches(first, values[0][AGAIN][0]):
        raise Wrong(f"{asked}: the same seed gives other batches the second time", FROM_GENERATOR)
    if not first:
        return
    many = values[0][MANY]
    epochs = inputs[0]["epochs"]
    if many is None or many.shape != (epochs, sum(map(len, first)), 2):
        raise Wrong(f"{asked}: not all epochs have as many rows")
    if not many.numel():
        return
    if not 0 <= int(many[..., 0].min()) <= int(many[..., 0].max()) < len(first):
        raise Wrong(f"{asked}: not all epochs have {len(first)} batches")
    if not 0 <= int(many[..., 1].min()) <= int(many[..., 1].max()) < n:
        raise Wrong(f"{asked}: some epochs have rows that are not among 0 to {n - 1}")
    _judge_chances(asked, n, size, many)


def _judge_epoch(asked: str, n: int, size: int, drop: bool, batches: Sequence[Any]) -> None:
    rest = [n % size] if n % size and not drop else []
    sizes, right = [len(batch) for batch in batches], [size] * (n // size) + rest
    if sizes != right:
        hint = "Only a last batch that is shorter is left out, and with drop_last=True only."
        raise Wrong(f"{asked}: the batches have {sizes} rows, expected {right}", hint)
    rows = [row for batch in batches for row in batch.tolist()]
    if not set(rows) <= set(range(n)):
        raise Wrong(f"{asked}: rows {min(rows)} to {max(rows)} occur, expected 0 to {n - 1}")
    if repeated := sorted(row for row in set(rows) if rows.count(row) > 1):
        row = repeated[0]
        hint = "Without replacement: a row that was drawn is not there to be drawn again."
        raise Wrong(f"{asked}: row {row} comes {rows.count(row)} times in one epoch", hint)


def _same_batches(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return [batch.tolist() for batch in one] == [batch.tolist() for batch in other]


def _judge_chances(asked: str, n: int, size: int, many: Tensor) -> None:
    """Raise `Wrong` unless each row, and each pair of rows, is as often in a batch as it should."""
    epochs = len(many)
    held = torch.zeros(epochs, n, int(many[..., 0].max()) + 1, dtype=torch.float64)
    held[torch.arange(epochs)[:, None], many[..., 1], many[..., 0]] = 1
    held = held[:, :, : n // size]  # full batches only
    if not held.numel():
        return
    _expect_chance(asked, epochs, held.sum(0), size / n, "row {} is in batch {}")
    pairs = torch.einsum("erb,esb->rs", held, held)
    chance = (n // size) * size * (size - 1) / (n * (n - 1))
    pairs.fill_diagonal_(epochs * chance)
    _expect_chance(asked, epochs, pairs, chance, "rows {} and {} share a full batch")
    _expect_spread(asked, held.sum(0), epochs * size / n, whole=n % size == 0)


def _expect_spread(asked: str, counts: Tensor, expected: float, whole: bool) -> None:
    """Raise `Wrong` if rows and batches go together more often than chance lets them, all in all.

    `whole`: no rows are left over. It is Pearson's χ²; by Wilson and Hilferty (1931) its cube root
    is nearly normal.
    """
    n, batches = counts.shape
    freedom = (n - 1) * (batches - whole)
    chi2 = float(((counts - expected).square() / expected).sum()) * (n - 1) / n
    spread = 2 / (9 * max(1, freedom))
    if freedom and (chi2 / freedom) ** (1 / 3) > 1 - spread + 6 * spread**0.5:
        row, batch = (
            int(i) for i in torch.unravel_index((counts - expected).argmax(), counts.shape)
        )
        raise Wrong(
            f"{asked}: some rows come more often in some batches than chance lets them; row {row} "
            f"is {counts[row, batch]:.0f} times in batch {batch}, expected about {expected:.0f}",
            "Every order of the rows must be equally likely: a shuffle by hand may prefer some.",
        )


def _expect_chance(asked: str, epochs: int, counts: Tensor, chance: float, words: str) -> None:
    spread = (epochs * chance * (1 - chance)) ** 0.5
    far = (counts - epochs * chance).abs()
    if far.max() > 6 * spread:
        place = [int(i) for i in torch.unravel_index(far.argmax(), far.shape)]
        raise Wrong(
            f"{asked}: {words.format(*place)} in {counts[tuple(place)]:.0f} of {epochs} epochs, "
            f"expected about {epochs * chance:.0f}",
            "Every order of the rows must be equally likely.",
        )
