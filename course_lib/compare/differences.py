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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from course_lib.compare.layout import Cut, places_of, rows_of
from course_lib.compare.record import OF_ROWS, Key, Record

SENTENCES = {
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
"""The kinds that are compared, in the order of execution, and how each is named in a sentence."""
ORDER = tuple(SENTENCES)
OWN_RULES = ("input", "mode", "mask", "option")
"""The kinds that are compared by rules of their own, which also find the ranks."""
ALLOWED = 4.0
"""How many times the spread of the trusted run's own rounding is allowed."""
Pairs = Mapping[int, tuple[Tensor, Tensor]]
"""Rank → (actual tensor x, right tensor t), in float64."""


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
        tensor = SENTENCES[self.key.kind].format(self.key.name) + self.part
        size = ""
        if self.error != float("inf"):
            size = f". The error is {self.error:.3g} times the tolerance"
        return f"{tensor} in step {self.key.step}, on {named(self.ranks)}{size}."


class Runs:
    """The trusted run and the runs of the ranks, for comparison.

    Attributes:
        rows: step → the rows of each forward, of the trusted run and of each rank; see `rows_of`.

    """

    def __init__(self, trusted: Record, ranks: Sequence[Record], shards: Mapping[str, Cut]) -> None:
        self.trusted, self.ranks, self.shards = trusted, ranks, shards
        self.world_size = len(ranks)
        self.rows: dict[int, tuple[list[Tensor], list[list[Tensor]]] | None] = {}
        for key, inputs in trusted.tensors.items():
            parts = [rank.tensors.get(key, []) for rank in ranks]
            if key[1:] == ("input", "input") and any(parts):
                self.rows[key.step] = rows_of(inputs, parts)
        self._typical: dict[str, tuple[float, float]] = {}

    def places(self, key: Key) -> list[Tensor | None] | None:
        """Return where each rank's part is in the trusted tensor; None if this is unknown."""
        whole_tensor = self.trusted.value(key)
        if whole_tensor is None:
            return None
        parts = [rank.value(key) for rank in self.ranks]
        cuts = [cut for pattern, cut in self.shards.items() if fnmatchcase(key.name, pattern)]
        cut = cuts[0] if cuts else None
        rows = self.rows.get(key.step) if key.kind in OF_ROWS else None
        if rows is None:
            return places_of(whole_tensor, parts, None, cut)
        batch = torch.cat(rows[0])
        rows_of_rank = [torch.cat(forwards) if forwards else None for forwards in rows[1]]
        all_have_all = all(r is None or len(r) == len(batch) for r in rows_of_rank)
        has_rows = whole_tensor.dim() > 1 and len(whole_tensor) == len(batch)  # or gathered ones
        if cut is None and not all_have_all and not has_rows:
            return None
        return places_of(whole_tensor, parts, rows_of_rank, cut)

    def pairs(self, key: Key) -> Pairs | None:
        """Return the pairs of the ranks that have a part; None if shapes do not fit."""
        places, whole_tensor = self.places(key), self.trusted.value(key)
        if places is None or whole_tensor is None:
            return None
        flat, pairs = whole_tensor.flatten().double(), {}
        for rank, place in enumerate(places):
            part = self.ranks[rank].value(key)
            if place is not None and part is not None:
                pairs[rank] = (part.double(), flat[place])
        return pairs

    def tolerance(self, key: Key) -> tuple[float, float]:
        """Return the allowed largest error, and the allowed root of the mean square error."""
        if key.kind not in self._typical:
            spreads = [self._spread(k) for k in self.trusted.tensors if k.kind == key.kind]
            ratios = [(m / s, r / s) for m, r, s in spreads if s > 0] or [(0.0, 0.0)]
            typical_max, typical_mean = map(statistics.median, zip(*ratios, strict=True))
            self._typical[key.kind] = typical_max, typical_mean
        typical_max, typical_mean = self._typical[key.kind]
        spread_max, spread_mean, size = self._spread(key)
        largest = ALLOWED * max(spread_max, typical_max * size)
        mean = ALLOWED * max(spread_mean, typical_mean * size)
        if key.kind == "update":  # the difference of two weights, each of them rounded
            (weight,) = self.trusted.tensors[Key(key.step, "weight", key.name)]
            if weight.is_floating_point() and weight.numel():
                eps = torch.finfo(weight.dtype).eps
                largest = max(largest, eps * float(weight.abs().max()))
                mean = max(mean, eps * _rms(weight.double()))
        return largest, mean

    def _spread(self, key: Key) -> tuple[float, float, float]:
        """Return max|t' - t| and rms(t' - t) of the disturbed runs, and rms(t)."""
        right = self.trusted.value(key)
        if right is None or not right.numel():
            return 0.0, 0.0, 0.0
        errors = []
        for record in self.trusted.noise:
            disturbed = record.value(key)
            if disturbed is not None and disturbed.shape == right.shape:
                errors.append((disturbed.double() - right.double()).nan_to_num())
        largest = max((float(error.abs().max()) for error in errors), default=0.0)
        return largest, max(map(_rms, errors), default=0.0), _rms(right.double())

    def find(self) -> tuple[list[Difference], int, dict[str, str]]:
        """Return the differences, the number of compared tensors, and the tensors left out.

        The differences include each tensor of a kind in `OWN_RULES`, without ranks.
        """
        differences, equal, left_out = [], set(), {}
        keys = [key for key in self.trusted.tensors if key.kind in ORDER]
        keys += self.trusted.options
        for key in sorted(keys, key=lambda key: (key.step, ORDER.index(key.kind))):
            if key.kind in OWN_RULES:
                if key.kind != "input" or key.name == "input":
                    differences.append(Difference(key, []))
                continue
            value, name = self.trusted.value(key), SENTENCES[key.kind].format(key.name)
            if value is None or not value.is_floating_point():
                continue
            if self._nobody_has(key):
                if key.kind == "weight":
                    left_out[name] = "no rank has a weight of this name"
                continue
            pairs = self.pairs(key)
            if pairs is None:
                left_out[name] = (
                    "it is unknown which part of it each rank has: pass `shards`, or let the "
                    "gradients decide"
                )
            elif errors := self._errors(key, pairs):
                # An error that is not a number is the largest.
                largest = max(float("inf") if e != e else e for e in errors.values())
                part = self._part(key, pairs, errors)
                differences.append(Difference(key, sorted(errors), part, largest))
            else:
                equal.add(key)
        compared = len(differences) + len(equal)
        return [d for d in differences if not self._is_healed(d.key, equal)], compared, left_out

    def _is_healed(self, key: Key, equal: Collection[Key]) -> bool:
        """Whether the output of a layer around this one is right.

        Some layers hold only a term of a sum that the layer around them adds up over the ranks.
        """
        if key.kind != "output":
            return False
        parents = key.name.split(".")[:-1]
        around = [".".join(parents[:n]) for n in range(1, len(parents) + 1)]
        around += ["the model"] if key.name.partition("[")[0] != "the model" else []
        return any(Key(key.step, "output", name) in equal for name in around)

    def with_effect(self, differences: Sequence[Difference]) -> list[Difference]:
        """Return the differences that do not only concern outputs, or gradients without effect."""
        effective = [d for d in differences if not self._without_effect(d, differences)]
        beside_outputs = {d.key.step for d in effective if d.key.kind != "output"}
        trained = {key.step for key in self.trusted.tensors if key.kind == "gradient"}
        return [d for d in effective if d.key.step in beside_outputs or d.key.step not in trained]

    def _without_effect(self, difference: Difference, differences: Sequence[Difference]) -> bool:
        """Whether a gradient differs, but state and update are right.

        This happens if the gradient is averaged inside the optimizer's step, as with ZeRO.
        """
        if difference.key.kind != "gradient":
            return False
        step, _, name = difference.key
        update = self.trusted.value(Key(step, "update", name))
        if update is None or not bool(update.any()):
            return False  # no step was taken
        later = [k for k in self.trusted.tensors if k.step == step and _follows(k, name)]
        recorded = all(any(rank.value(k) is not None for rank in self.ranks) for k in later)
        return recorded and not {d.key for d in differences} & set(later)

    def _nobody_has(self, key: Key) -> bool:
        if key.kind == "gradient":  # a parameter without a gradient is a difference
            key = Key(key.step, "weight", key.name)
        return all(rank.value(key) is None for rank in self.ranks)

    def _errors(self, key: Key, pairs: Pairs) -> dict[int, float]:
        """Return rank → its error, as a multiple of the tolerance, for the ranks that differ."""
        largest, mean = self.tolerance(key)
        errors = {}
        for rank, (x, t) in pairs.items():
            if t.numel() and t.isfinite().all():
                error = (x - t).abs()
                errors[rank] = max(_over(float(error.max()), largest), _over(_rms(error), mean))
        right = self.trusted.value(key)
        if key.kind == "gradient" and right is not None and bool(right.any()):
            for rank, record in enumerate(self.ranks):
                weight = record.value(Key(key.step, "weight", key.name))
                if rank not in pairs and weight is not None and weight.numel():
                    errors[rank] = float("inf")  # it has the weight, but no gradient for it
        return {rank: error for rank, error in errors.items() if not error <= 1}

    def _part(self, key: Key, pairs: Pairs, ranks: Iterable[int]) -> str:
        """Return which slice of the whole tensor differs on `ranks`, as text."""
        right, places = self.trusted.value(key), self.places(key)
        if right is None or places is None or not right.dim():
            return ""
        differs = torch.zeros(right.numel(), dtype=torch.bool)
        for rank in ranks:
            place = places[rank]
            if rank in pairs and place is not None:
                x, t = pairs[rank]
                differs[place[~((x - t).abs() <= self.tolerance(key)[0])]] = True
        bounds, differs = [], differs.view(right.shape)
        for dim, size in enumerate(right.shape):
            other_dims = [d for d in range(right.dim()) if d != dim]
            indices = (differs.any(other_dims) if other_dims else differs).nonzero().flatten()
            first, stop = (int(indices[0]), int(indices[-1]) + 1) if len(indices) else (0, size)
            bounds.append(":" if (first, stop) == (0, size) else f"{first}:{stop}")
        return "" if set(bounds) == {":"} else f"[{', '.join(bounds)}]"


class Case:
    """A difference to explain.

    Attributes:
        wrong: the pairs of the ranks that differ.
        tolerance: the largest allowed error.
        others: the other differences.

    """

    def __init__(
        self, difference: Difference, runs: Runs, others: Sequence[Difference] = ()
    ) -> None:
        self.difference, self.runs, self.others = difference, runs, others
        self.key, self.tolerance = difference.key, runs.tolerance(difference.key)[0]
        pairs = runs.pairs(difference.key) if difference.key in runs.trusted.tensors else None
        self.wrong = {rank: pairs[rank] for rank in difference.ranks if pairs and rank in pairs}

    def all(self, test: Callable[[Tensor, Tensor], bool]) -> bool:
        """Whether `test(actual, right)` is true for each rank that differs."""
        return bool(self.wrong) and all(test(x, t) for x, t in self.wrong.values())


Finding = tuple[str, str] | None
"""A label and a sentence."""


def near(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether no two elements differ by more than `tolerance`."""
    return a.shape == b.shape and bool(((a - b).abs() <= tolerance).all())


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
