"""Shares: what happened to the ranks' gradients on the way. This is the strongest evidence.

A rank's *share* s is the gradient that its own backward computed, before anything was communicated.
Let x be a rank's final gradient, and t the right one. Both are written as sums of all shares, by
least squares,

    x = Σ o s        t = Σ e s        over the ranks k, and the backwards j of each

A comparison of the weights o with the right weights e shows what happened:

    o = K e for all                      a sum over the ranks, but the mean is right
    o = 0 except for this rank's own     no all-reduce
    o = 0 for rank 2                     rank 2 takes no part
    o = 0 except for the last backward   the other backwards were lost
    o equal, but e not                   a mean of means, over batches of unequal size
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from course_lib.compare.differences import Case, Finding, named
from course_lib.compare.record import Key

Weights = dict[tuple[int, int], float]
"""(rank, backward) → the weight of its share."""


class Shares(NamedTuple):
    """The shares of all ranks as the columns of a matrix, for one rank's part of the tensor.

    Attributes:
        columns: the (rank, backward) of each share.
        basis: the shares, of shape (elements, columns).
        x: this rank's final gradient, as one column.
        t: the right one.
        tolerance: the largest allowed error.
        before: the gradient before this step; None if it is unknown.

    """

    columns: list[tuple[int, int]]
    basis: Tensor
    x: Tensor
    t: Tensor
    tolerance: float
    before: Tensor | None

    def fit(self, vector: Tensor) -> Tensor | None:
        """Return the weights with which the columns add up to `vector`, else None."""
        size = self.basis.norm(dim=0)
        finite = self.basis.isfinite().all() and vector.isfinite().all()
        if not finite or not bool((size > 0).all()):
            return None
        basis = self.basis / size
        spread = torch.linalg.svdvals(basis)
        if float(spread[-1]) < 1e-3 * float(spread[0]):
            return None  # some shares are nearly the same
        weights = torch.linalg.lstsq(basis, vector[:, None], driver="gelsd").solution[:, 0]
        larger = float(vector.norm() / size.mean())  # how much its roundings exceed a share's
        error = float((basis @ weights - vector).abs().max())
        return weights / size if error <= 4 * self.tolerance * max(1.0, larger) else None


def from_the_shares(case: Case) -> Finding:
    """Return what the ranks' gradients look like as sums of the shares, if all look the same."""
    if case.key.kind != "gradient":
        return None
    findings = [_of_one_rank(rank, case) for rank in case.difference.ranks]
    by_label = {finding and finding[0]: finding for finding in reversed(findings)}
    if set(by_label) == {"no all-reduce", "rank missing"}:  # the missing rank has only its own
        return by_label["rank missing"]
    if set(by_label) == {"scaled"} and len(findings) < case.runs.world_size:
        return None  # pieces of other tensors, on the other ranks, may have other factors
    return findings[0] if len(by_label) == 1 else None


def factor(
    value: float, world_size: int, backwards: int = 1, averaged: bool = False
) -> tuple[str, str]:
    """Explain a factor: K, 1/K, … for K = `world_size`, or the number of backwards."""

    def near(other: float) -> bool:
        return other not in (0, 1) and abs(value / other - 1) < 0.03

    k, m = world_size, backwards
    if near(m) and (averaged or not near(k)):
        return "times backwards", f"the values are {m} times too large: the gradients of the " \
            f"{m} backwards were added, but must be averaged."  # fmt: skip
    if near(k):
        return "times K", f"the values are K = {k} times too large: they are the sum over the " \
            "ranks, but must be the mean."  # fmt: skip
    if near(1 / k):
        return "divided by K", f"the values are 1/K of the right ones, with K = {k}: they were " \
            "divided once too often, or not summed over the ranks."  # fmt: skip
    return "scaled", f"the values are {value:.4g} times the right ones."


def shares_are_right(case: Case) -> bool:
    """Whether the right gradient is a sum of shares: then forward and backward were right."""
    by_rank = [_shares(rank, case) for rank in case.difference.ranks]
    return all(shares is not None and shares.fit(shares.t) is not None for shares in by_rank)


def shares_are_wrong(case: Case) -> Finding:
    """Find a correct mean of wrong shares."""
    if case.key.kind != "gradient":
        return None
    for rank in case.difference.ranks:
        shares = _shares(rank, case)
        weights = None if shares is None else shares.fit(shares.x)
        if weights is None or not _equal(weights.tolist()):
            return None
        if abs(float(weights[0]) * case.runs.world_size - 1) > 0.05:
            return None
    return "wrong shares", "the gradient is the mean over the ranks, but each backward's " \
        "gradient was already wrong: look at the loss or backward, not communication."  # fmt: skip


def _of_one_rank(rank: int, case: Case) -> Finding:
    """Find the weights o and e of one rank, and interpret them."""
    shares = _shares(rank, case)
    right = None if shares is None else shares.fit(shares.t)
    if shares is None or right is None:
        return None
    actual = shares.fit(shares.x)
    if actual is not None:
        o, e = (dict(zip(shares.columns, w.tolist(), strict=True)) for w in (actual, right))
        return _read(o, e, rank, case)
    if shares.before is None:
        return None
    basis = torch.cat([shares.basis, shares.before[:, None]], 1)
    with_before = shares._replace(basis=basis).fit(shares.x)
    if with_before is None or abs(float(with_before[-1])) < 0.05:
        return None
    return "not zeroed", "the gradient from before this step was not cleared and is still " \
        f"included, with the weight {float(with_before[-1]):.3g}."  # fmt: skip


def _shares(rank: int, case: Case) -> Shares | None:
    """Return the shares of all ranks; None if there are none, or too few elements.

    If the tensor is small, other tensors that differ on this rank are added below it.
    """
    keys = [d.key for d in case.others if d.key[:2] == case.key[:2] and rank in d.ranks]
    columns: list[tuple[int, int]] = []
    parts: list[list[Tensor]] = []
    befores: list[Tensor] = []
    size, tolerance = 0, 0.0
    for key in dict.fromkeys([case.key, *keys]):
        shares, pairs = _columns(rank, key, case), case.runs.pairs(key) or {}
        if not shares or rank not in pairs or (columns and list(shares) != columns):
            continue
        columns = list(shares)
        parts.append([torch.stack(list(shares.values()), 1), *map(torch.flatten, pairs[rank])])
        before = case.runs.ranks[rank].value(Key(key.step - 1, "gradient", key.name))
        befores += [] if before is None else [before.flatten().double()]
        size += len(parts[-1][1])
        tolerance = max(tolerance, case.runs.tolerance(key)[0])
        if size >= 4 * len(columns):
            break
    if size <= len(columns) + 1:
        return None
    basis, x, t = (torch.cat(column) for column in zip(*parts, strict=True))
    before = torch.cat(befores) if len(befores) == len(parts) else None
    return Shares(columns, basis, x, t, tolerance, before)


def _columns(rank: int, key: Key, case: Case) -> dict[tuple[int, int], Tensor]:
    """Return (rank k, backward j) → its share, for the elements that `rank` has."""
    right, places = case.runs.trusted.value(key), case.runs.places(key)
    place = places[rank] if places else None
    if right is None or place is None:
        return {}
    columns = {}
    for k, record in enumerate(case.runs.ranks):
        for j, share in enumerate(record.tensors.get(Key(key.step, "share", key.name), [])):
            if share.numel() == right.numel():
                columns[k, j] = share.flatten().double()[place.flatten()]
            elif k == rank and share.numel() == place.numel():
                columns[k, j] = share.flatten().double()
    return columns


def _read(o: Weights, e: Weights, rank: int, case: Case) -> Finding:
    """Explain the weights o by comparing them with the right ones, e."""
    largest = max(map(abs, e.values()))
    ratio = {c: o[c] / e[c] for c in o if abs(e[c]) > 0.05 * largest}
    ranks = sorted({k for k, _ in ratio})
    largest_ratio = max(map(abs, ratio.values()))
    lost = {c for c, value in ratio.items() if abs(value) < 0.1 * min(1.0, largest_ratio)}
    absent = [k for k in ranks if all(c in lost for c in ratio if c[0] == k)]
    if not lost:
        return _no_share_is_lost(ratio, o, e, case)
    if absent and set(absent) == set(ranks) - {rank}:
        way = "sum" if all(abs(e[c] - 1) < 0.05 for c in ratio) else "mean"
        return "no all-reduce", f"on {named(case.difference.ranks)} there is only the rank's own " \
            f"gradient, not the {way} over the ranks: this tensor was not all-reduced."  # fmt: skip
    if absent:
        present = [k for k in ranks if k not in absent]
        if len(present) == 1:
            return "rank missing", f"the result includes only the gradient of {named(present)}."
        return "rank missing", f"the result does not include the gradient of {named(absent)}."
    early = sorted({j for _, j in lost})
    some = f"backward{'s' * (len(early) > 1)} {', '.join(map(str, early))} (counted from 0)"
    if all((k, j) in lost for k, j in ratio if j in early):
        return "backwards missing", f"the result does not include {some} of any rank."
    if all(k != rank for k, _ in lost):
        return "reduced too early", f"the result does not include {some} of the other ranks: " \
            "gradients were communicated before the accumulation ended."  # fmt: skip
    return "unequal factors", "the ranks' gradients were added with wrong weights."


def _no_share_is_lost(ratio: Weights, o: Weights, e: Weights, case: Case) -> Finding:
    if _equal(list(ratio.values())):
        averaged = all(abs(o[c] * case.runs.world_size - 1) < 0.05 for c in ratio)
        mean = sum(ratio.values()) / len(ratio)
        return factor(mean, case.runs.world_size, 1 + max(j for _, j in ratio), averaged)
    backwards = sorted({j for _, j in ratio})
    first = [c for c in ratio if c[1] == backwards[0]]
    shown = first if len(first) > 1 else list(ratio)
    actual, right = (", ".join(f"{weights[c]:.3g}" for c in shown) for weights in (o, e))
    total, expected = (sum(weights[c] for c in ratio) for weights in (o, e))
    if _equal([o[c] for c in ratio]) and abs(total / expected - 1) < 0.05:
        return "mean of means", "the result is a mean of means: all batches count the same, but " \
            f"their right weights are {right}: a batch with more examples that count, such as " \
            "rows or valid tokens, must weigh more."  # fmt: skip
    by_backward = [[value for c, value in ratio.items() if c[1] == j] for j in backwards]
    if all(map(_equal, by_backward)):
        counts = ", ".join(f"{values[0]:.3g}" for values in by_backward)
        return "unequal backwards", f"the gradients of the backwards count {counts} times what " \
            "they should: the first ones were reduced again with the later ones."  # fmt: skip
    return "unequal factors", f"the ranks' gradients were added with the weights {actual}; right " \
        f"weights are {right}. Each gradient was scaled by a factor of its own, for example by " \
        "clipping or by a loss scale."  # fmt: skip


def _equal(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= 0.05 * max(map(abs, values))
