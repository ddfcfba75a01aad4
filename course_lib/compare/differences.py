"""Differences: which tensors differ by more than rounding does, on which ranks, in which part.

Let t be a tensor of the trusted run, and t', t'', … the same tensor in runs in which every value is
disturbed by a rounding. A rank's tensor x differs if

    max|x - t| > 4 max|t' - t|     or     rms(x - t) > 4 rms(t' - t)

The spread of a tensor, t' - t, counts as at least the median, relative to rms(t), of all tensors of
its kind. So a tensor in which rounding errors grow has a larger tolerance, and bfloat16 has a
larger one than float32.

Right programs may have other outputs than one rank has: a loss is the mean of the rank's own rows,
and a layer may hold a term of a sum. So gradients decide. If ranks have different rows, an output
is compared only if its dimension 0 is the batch. An output that differs does not count if a layer
around it is right, if nothing but outputs differs in this step, or if the right gradient is a sum
of the ranks' gradients.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from course_lib.compare.layout import Cut, places_of, rows_of
from course_lib.compare.record import Key, Record

ORDER = (
    *("weight", "input", "mode", "output", "mask", "gradient", "option", "state", "update"),
    "buffer",
)
"""The kinds that are compared, in the order of execution."""
OWN_RULES = ("input", "mode", "mask", "option")
"""The kinds that are compared by rules of their own, which also find the ranks."""
OF_ROWS = ("input", "output", "mask", "dropout")
"""The kinds that have a part for each row of the batch."""
SAYS = {
    "weight": "the weight {} before forward",
    "input": "the batch ({})",
    "mode": "the mode of {}",
    "output": "the output of {}",
    "mask": "the random mask of {}",
    "gradient": "the gradient of {}",
    "option": "the optimizer's options for {}",
    "state": "the optimizer's state {}",
    "update": "the update of {}",
    "buffer": "the buffer {} after the step",
}


@dataclass
class Difference:
    """A tensor that differs.

    Attributes:
        key: its step, kind and name.
        ranks: the ranks on which it differs.
        part: which elements of the whole differ, as ``[4:8, :]``; "" for all, or if unknown.
        error: the largest error, as a multiple of the tolerance.
        label: a short name for what it looks like, such as ``"times K"``; "" if not examined.
        says: the same as `label`, as a sentence.

    """

    key: Key
    ranks: list[int]
    part: str = ""
    error: float = float("inf")
    label: str = ""
    says: str = ""

    def __str__(self) -> str:
        what = SAYS[self.key.kind].format(self.key.name) + self.part
        size = ""
        if self.error != float("inf"):
            size = f". The error is {self.error:.3g} times the tolerance"
        return f"{what} in step {self.key.step}, on {named(self.ranks)}{size}."


class Runs:
    """The trusted run and the runs of the ranks, for comparison."""

    def __init__(
        self,
        trusted: Record,
        ranks: Sequence[Record],
        shards: Mapping[str, Cut],
        factor: float,
    ) -> None:
        self.trusted, self.ranks, self.shards, self.factor = trusted, ranks, shards, factor
        self.world_size = len(ranks)
        self._typical: dict[str, tuple[float, float]] = {}
        self._rows: dict[int, tuple[list[Tensor], list[list[Tensor]]] | None] = {}
        self._values: dict[tuple[int, Key], Tensor | None] = {}
        self._places: dict[Key, list[Tensor | None] | None] = {}

    def value(self, record: Record, key: Key) -> Tensor | None:
        """Return a tensor of a record, with all its passes; for an update, return the change."""
        if (id(record), key) not in self._values:
            self._values[id(record), key] = _value(record, key)
        return self._values[id(record), key]

    def rows(self, step: int) -> tuple[list[Tensor], list[list[Tensor]]] | None:
        """Return the rows of each forward: of the trusted run, and of each rank; see `rows_of`."""
        if step not in self._rows:
            key = Key(step, "input", "input")
            whole = self.trusted.tensors.get(key)
            parts = [rank.tensors.get(key, []) for rank in self.ranks]
            self._rows[step] = rows_of(whole, parts) if whole and any(parts) else None
        return self._rows[step]

    def places(self, key: Key) -> list[Tensor | None] | None:
        """Return where each rank's part is in the trusted tensor; None if this is unknown."""
        if key not in self._places:
            self._places[key] = self._find_places(key)
        return self._places[key]

    def _find_places(self, key: Key) -> list[Tensor | None] | None:
        whole = self.value(self.trusted, key)
        if whole is None:
            return None
        parts = [self.value(rank, key) for rank in self.ranks]
        rules = [cut for pattern, cut in self.shards.items() if fnmatchcase(key.name, pattern)]
        rows = self.rows(key.step) if key.kind in OF_ROWS else None
        if rows is None:
            return places_of(whole, parts, None, rules[0] if rules else None)
        batch, mine = torch.cat(rows[0]), [torch.cat(each) if each else None for each in rows[1]]
        usual = places_of(whole, parts, mine, rules[0] if rules else None)
        if rules or all(each is None or len(each) == len(batch) for each in mine):
            return usual  # all ranks have all rows
        has_rows = whole.dim() > 1 and len(whole) == len(batch)  # or they were gathered
        return usual if has_rows else None

    def pairs(self, key: Key) -> dict[int, tuple[Tensor, Tensor]] | None:
        """Return rank → (actual tensor, right tensor), in float64; None if shapes do not fit."""
        places = self.places(key)
        return None if places is None else self._pairs(key, places)

    def _pairs(self, key: Key, places: Sequence[Tensor | None]) -> dict[int, tuple[Tensor, Tensor]]:
        whole, found = self.value(self.trusted, key), {}
        for rank, place in enumerate(places):
            part = self.value(self.ranks[rank], key)
            if whole is not None and place is not None and part is not None:
                found[rank] = (part.double(), whole.flatten().double()[place])
        return found

    def tolerance(self, key: Key) -> tuple[float, float]:
        """Return the allowed largest error, and the allowed root of the mean square error."""
        most, mean, size = self._spread(key)
        if key.kind not in self._typical:
            kind = [k for k in self.trusted.tensors if k.kind == key.kind]
            spreads = [self._spread(k) for k in kind]
            ratios = [(m / s, r / s) for m, r, s in spreads if s > 0]
            columns = list(zip(*ratios, strict=True)) or [(0.0,), (0.0,)]  # largest, mean
            self._typical[key.kind] = (statistics.median(columns[0]), statistics.median(columns[1]))
        usual = self._typical[key.kind]
        most = self.factor * max(most, usual[0] * size)
        mean = self.factor * max(mean, usual[1] * size)
        if key.kind == "update":  # the difference of two weights, each of them rounded
            (weight,) = self.trusted.tensors[Key(key.step, "weight", key.name)]
            if weight.is_floating_point() and weight.numel():
                eps = torch.finfo(weight.dtype).eps
                most = max(most, eps * float(weight.abs().max()))
                mean = max(mean, eps * _rms(weight.double()))
        return most, mean

    def _spread(self, key: Key) -> tuple[float, float, float]:
        whole = self.value(self.trusted, key)
        if whole is None or not whole.numel():
            return 0.0, 0.0, 0.0
        errors = []
        for record in self.trusted.noise:
            other = self.value(record, key)
            if other is not None and other.shape == whole.shape:
                errors.append((other.double() - whole.double()).nan_to_num())
        most = max((float(e.abs().max()) for e in errors), default=0.0)
        mean = max((_rms(e) for e in errors), default=0.0)
        return most, mean, _rms(whole.double())

    def find(self) -> tuple[list[Difference], int, dict[str, str]]:
        """Return the differences, the number of compared tensors, and the tensors left out.

        The differences include each tensor of a kind in `OWN_RULES`, without ranks.
        """
        found, agree, left_out = [], set(), {}
        keys = [key for key in self.trusted.tensors if key.kind in ORDER]
        keys += self.trusted.options
        for key in sorted(keys, key=lambda key: (key.step, ORDER.index(key.kind))):
            value = self.value(self.trusted, key)
            if key.kind in ("mode", "mask", "option") or key == (key.step, "input", "input"):
                found.append(Difference(key, []))
                continue
            if key.kind == "input" or value is None or not value.is_floating_point():
                continue
            if self._nobody_has(key):
                if key.kind == "weight":
                    left_out[SAYS[key.kind].format(key.name)] = "no rank has a weight of this name"
                continue
            pairs = self.pairs(key)
            if pairs is None:
                left_out[SAYS[key.kind].format(key.name)] = self._why_left_out(key, value)
                continue
            difference = self._difference(key, pairs)
            if difference is not None:
                found.append(difference)
            else:
                agree.add(key)
        compared = len(found) + len(agree)
        return [each for each in found if not self._is_healed(each.key, agree)], compared, left_out

    def _why_left_out(self, key: Key, value: Tensor) -> str:
        if key.kind == "output" and self.rows(key.step) is not None:
            return (
                "its dimension 0 is not the batch, so it is unknown which part is of which row; "
                "the gradients decide"
            )
        shapes = ", ".join(_shape(self.value(rank, key)) for rank in self.ranks)
        return (
            f"the parts on the ranks have shapes {shapes}; pass `shards` to say how these parts "
            f"make up the whole tensor of shape {_shape(value)}"
        )

    def _is_healed(self, key: Key, agree: Collection[Key]) -> bool:
        """Whether the output of a layer around this one is right.

        Some layers hold only a term of a sum that the layer around them adds up over the ranks.
        """
        if key.kind != "output":
            return False
        parents = key.name.split(".")[:-1]
        around = [".".join(parents[:n]) for n in range(1, len(parents) + 1)]
        around += ["the model"] if key.name.partition("[")[0] != "the model" else []
        return any(Key(key.step, "output", each) in agree for each in around)

    def with_effect(self, found: Sequence[Difference]) -> list[Difference]:
        """Return the differences that do not only concern outputs, or gradients without effect."""
        found = [each for each in found if not self._without_effect(each, found)]
        others = {each.key.step for each in found if each.key.kind != "output"}
        trained = {key.step for key in self.trusted.tensors if key.kind == "gradient"}
        return [e for e in found if e.key.step in others or e.key.step not in trained]

    def _without_effect(self, difference: Difference, found: Sequence[Difference]) -> bool:
        """Whether a gradient differs, but state and update are right.

        This happens if the gradient is averaged inside the optimizer's step, as with ZeRO.
        """
        if difference.key.kind != "gradient":
            return False
        step, _, name = difference.key
        update = self.value(self.trusted, Key(step, "update", name))
        if update is None or not bool(update.any()):
            return False  # no step was taken
        after = [k for k in self.trusted.tensors if k.step == step and _follows(k, name)]
        recorded = all(any(self.value(r, k) is not None for r in self.ranks) for k in after)
        return recorded and not {each.key for each in found} & set(after)

    def _nobody_has(self, key: Key) -> bool:
        if key.kind == "gradient":  # a parameter without a gradient is a difference
            key = Key(key.step, "weight", key.name)
        return all(self.value(rank, key) is None for rank in self.ranks)

    def _difference(
        self, key: Key, pairs: Mapping[int, tuple[Tensor, Tensor]]
    ) -> Difference | None:
        errors = self._errors(key, pairs)
        if not errors:
            return None
        largest = max(float("inf") if error != error else error for error in errors.values())
        return Difference(key, sorted(errors), self.part(key, errors), largest)

    def _errors(self, key: Key, pairs: Mapping[int, tuple[Tensor, Tensor]]) -> dict[int, float]:
        """Return rank → its error, as a multiple of the tolerance, for the ranks that differ."""
        most, mean = self.tolerance(key)
        errors = {}
        for rank, (x, t) in pairs.items():
            if t.numel() and t.isfinite().all():
                error = (x - t).abs()
                errors[rank] = max(_over(float(error.max()), most), _over(_rms(error), mean))
        if key.kind == "gradient" and bool(self.value(self.trusted, key).any()):  # type: ignore[union-attr]
            weight = Key(key.step, "weight", key.name)
            for rank, record in enumerate(self.ranks):
                mine = self.value(record, weight)
                if rank not in pairs and mine is not None and mine.numel():
                    errors[rank] = float("inf")  # it has the weight, but no gradient for it
        return {rank: error for rank, error in errors.items() if not error <= 1}

    def part(self, key: Key, ranks: Mapping[int, float]) -> str:
        """Return which slice of the whole tensor differs, as text."""
        whole, places, pairs = self.value(self.trusted, key), self.places(key), self.pairs(key)
        if whole is None or places is None or pairs is None or not whole.dim():
            return ""
        wrong = torch.zeros(whole.numel(), dtype=torch.bool)
        for rank in ranks:
            place = places[rank]
            if rank in pairs and place is not None:
                x, t = pairs[rank]
                wrong[place[~((x - t).abs() <= self.tolerance(key)[0])]] = True
        bounds, wrong = [], wrong.view(whole.shape)
        for dim, size in enumerate(whole.shape):
            others = [d for d in range(whole.dim()) if d != dim]
            there = (wrong.any(others) if others else wrong).nonzero().flatten()
            full = not len(there) or len(there) == size or size == 1
            first, last = (0, size) if full else (int(there[0]), int(there[-1]) + 1)
            bounds.append(":" if (first, last) == (0, size) else f"{first}:{last}")
        return "" if set(bounds) == {":"} else f"[{', '.join(bounds)}]"


class Case:
    """A difference to explain.

    Attributes:
        wrong: rank that differs → (actual tensor, right tensor).
        most: the largest allowed error.
        others: the other differences.

    """

    def __init__(
        self, difference: Difference, runs: Runs, others: Sequence[Difference] = ()
    ) -> None:
        self.difference, self.runs, self.others = difference, runs, others
        self.key, self.most = difference.key, runs.tolerance(difference.key)[0]
        pairs = runs.pairs(difference.key) if difference.key in runs.trusted.tensors else None
        self.wrong = {rank: pairs[rank] for rank in difference.ranks if pairs and rank in pairs}

    def all(self, test: Callable[[Tensor, Tensor], bool]) -> bool:
        """Whether `test(actual, right)` is true for each rank that differs."""
        return bool(self.wrong) and all(test(x, t) for x, t in self.wrong.values())


Finding = tuple[str, str] | None
"""A label and a sentence."""


def near(a: Tensor, b: Tensor, most: float) -> bool:
    """Whether no two elements differ by more than `most`."""
    return a.shape == b.shape and bool(((a - b).abs() <= most).all())


def named(ranks: Sequence[int]) -> str:
    """Return ``rank 0``, or ``ranks 0, 1 and 2``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if ranks else "no rank"


def _follows(key: Key, name: str) -> bool:
    """Whether the tensor is the update of parameter `name`, or a part of its state."""
    is_state = key.kind == "state" and key.name.rpartition(".")[0] == name
    return is_state or (key.kind == "update" and key.name == name)


def _over(error: float, tolerance: float) -> float:
    return 0.0 if error == 0 else error / tolerance if tolerance else float("inf")


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0


def _shape(tensor: Tensor | None) -> str:
    return "none" if tensor is None else str(tuple(tensor.shape))


def _value(record: Record, key: Key) -> Tensor | None:
    tensors = record.tensors.get(key)
    if tensors is None:
        return None
    if key.kind == "update":
        (before,) = record.tensors.get(Key(key.step, "weight", key.name), [None])
        return None if before is None else tensors[0].double() - before.double()
    values = _in_order(record, key) or tensors
    if len(values) == 1:
        return values[0]
    if values[0].dim() and len({value.shape[1:] for value in values}) == 1:
        return torch.cat(values)
    return torch.cat([value.flatten() for value in values])


def _in_order(record: Record, key: Key) -> list[Tensor]:
    """Return what each run of a layer computed: all first calls of a pass come first."""
    calls: Counter[int] = Counter()
    found = []
    for each, tensor in zip(record.passes.get(key, []), record.tensors.get(key, []), strict=False):
        found.append((calls[each], each, tensor))
        calls[each] += 1
    return [tensor for *_, tensor in sorted(found, key=lambda each: each[:2])]
