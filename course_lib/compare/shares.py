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

import torch
from torch import Tensor

from course_lib.compare.differences import Case, Finding, named, near
from course_lib.compare.record import Key

Columns = list[tuple[int, int]]
"""The (rank, backward) of each share."""


def from_the_shares(case: Case) -> Finding:
    """Return what the ranks' gradients look like as sums of the shares, if all look the same."""
    if case.key.kind != "gradient":
        return None
    findings = [_of_one_rank(rank, case) for rank in case.difference.ranks]
    labels = {None if each is None else each[0] for each in findings}
    if labels == {"no all-reduce", "rank missing"}:  # the missing rank has only its own
        return next(each for each in findings if each is not None and each[0] == "rank missing")
    return findings[0] if len(labels) == 1 else None


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
    if near(1 / m) and not near(1 / k):
        return "divided by backwards", f"the values are 1/{m} of the right ones, and there were " \
            f"{m} backwards."  # fmt: skip
    if near(k):
        return "times K", f"the values are K = {k} times too large: they are the sum over the " \
            "ranks, but must be the mean."  # fmt: skip
    if near(1 / k):
        return "divided by K", f"the values are 1/K of the right ones, with K = {k}: they were " \
            "divided once too often, or not summed over the ranks."  # fmt: skip
    if near(k * k) or near(1 / k**2):
        label = "times K²" if value > 1 else "divided by K²"
        return label, f"the values are {value:.4g} times the right ones."
    return "scaled", f"the values are {value:.4g} times the right ones."


def shares_are_right(case: Case) -> bool:
    """Whether the right gradient is a sum of shares: then forward and backward were right."""
    for rank in case.difference.ranks:
        columns, basis, _, t, most, _ = _least_squares(rank, case)
        if not columns or _fit(basis, t, most) is None:
            return False
    return True


def shares_are_wrong(case: Case) -> Finding:
    """Find a correct mean of wrong shares."""
    if case.key.kind != "gradient":
        return None
    k = case.runs.world_size
    for rank in case.difference.ranks:
        columns, basis, x, _, most, _ = _least_squares(rank, case)
        have = _fit(basis, x, most) if columns else None
        if have is None or not _equal(have.tolist()) or abs(float(have[0]) * k - 1) > 0.05:
            return None
    return "wrong shares", "the gradient is the mean over the ranks, but each backward's " \
        "gradient was already wrong: look at the loss or backward, not communication."  # fmt: skip


def _of_one_rank(rank: int, case: Case) -> Finding:
    """Find the weights o and e of one rank, and interpret them."""
    columns, basis, x, t, most, before = _least_squares(rank, case)
    if not columns:
        return None
    right, have = _fit(basis, t, most), _fit(basis, x, most)
    if right is None:
        return None
    if near(x, torch.zeros_like(x), most):
        return "zero", "the result includes no rank's gradient."
    if have is not None:
        return _read(columns, have, right, rank, case)
    if before is None:
        return None
    have = _fit(torch.cat([basis, before[:, None]], 1), x, most)
    if have is None or abs(float(have[-1])) < 0.05:
        return None
    return "not zeroed", "the gradient from before this step was not cleared and is still " \
        f"included, with the weight {float(have[-1]):.3g}."  # fmt: skip


def _least_squares(
    rank: int, case: Case
) -> tuple[Columns, Tensor, Tensor, Tensor, float, Tensor | None]:
    """Return the shares (elements, columns), x, t, the allowed error, and the gradient before.

    If the tensor is small, other tensors that differ on this rank are added below it. No columns
    are returned if there are no shares, or too few elements.
    """
    keys = [d.key for d in case.others if d.key[:2] == case.key[:2] and rank in d.ranks]
    columns: Columns = []
    parts: list[list[Tensor]] = []
    befores: list[Tensor | None] = []
    size, most = 0, 0.0
    for key in dict.fromkeys([case.key, *keys]):
        shares, pairs = _shares(rank, key, case), case.runs.pairs(key) or {}
        if not shares or rank not in pairs or (columns and list(shares) != columns):
            continue
        columns = list(shares)
        parts.append([torch.stack(list(shares.values()), 1), *map(torch.flatten, pairs[rank])])
        befores.append(_before(rank, key, case))
        size, most = size + len(parts[-1][1]), max(most, case.runs.tolerance(key)[0])
        if size >= 4 * len(columns):
            break
    if size <= len(columns) + 1:
        return [], torch.empty(0), torch.empty(0), torch.empty(0), 0.0, None
    basis, x, t = (torch.cat(each) for each in zip(*parts, strict=True))
    there = [each for each in befores if each is not None]
    return columns, basis, x, t, most, torch.cat(there) if len(there) == len(parts) else None


def _shares(rank: int, key: Key, case: Case) -> dict[tuple[int, int], Tensor]:
    """Return (rank k, backward j) → its share, for the elements that `rank` has."""
    whole, places = case.runs.value(case.runs.trusted, key), case.runs.places(key)
    place = places[rank] if places else None
    found = {}
    for k, record in enumerate(case.runs.ranks if place is not None else ()):
        for j, share in enumerate(record.tensors.get(Key(key.step, "share", key.name), [])):
            assert whole is not None and place is not None
            if share.numel() == whole.numel():
                found[k, j] = share.flatten().double()[place.flatten()]
            elif k == rank and share.numel() == place.numel():
                found[k, j] = share.flatten().double()
    return found


def _before(rank: int, key: Key, case: Case) -> Tensor | None:
    """Return the gradient before this step: from the step before, or from the start."""
    record = case.runs.ranks[rank]
    before = case.runs.value(record, Key(key.step - 1, "gradient", key.name))
    if before is None:
        before = case.runs.value(record, Key(0, "left over", key.name))
    return None if before is None else before.flatten().double()


def _fit(basis: Tensor, vector: Tensor, most: float) -> Tensor | None:
    """Return the weights with which the columns of `basis` add up to `vector`, else None."""
    size = basis.norm(dim=0)
    if not basis.isfinite().all() or not vector.isfinite().all() or not bool((size > 0).all()):
        return None
    basis = basis / size
    spread = torch.linalg.svdvals(basis)
    if float(spread[-1]) < 1e-3 * float(spread[0]):
        return None  # some shares are nearly the same
    weights = torch.linalg.lstsq(basis, vector[:, None], driver="gelsd").solution[:, 0]
    larger = float(vector.norm() / size.mean())  # how much its roundings exceed a share's
    fits = float((basis @ weights - vector).abs().max()) <= 4 * most * max(1.0, larger)
    return weights / size if fits else None


def _read(columns: Columns, have: Tensor, right: Tensor, rank: int, case: Case) -> Finding:
    """Explain the weights `have` by comparing them with the `right` ones."""
    largest = float(right.abs().max())
    o, e = (dict(zip(columns, each.tolist(), strict=True)) for each in (have, right))
    ratio = {c: o[c] / e[c] for c in columns if abs(e[c]) > 0.05 * largest}
    ranks = sorted({k for k, _ in ratio})
    most = max(map(abs, ratio.values()))
    lost = {c for c, value in ratio.items() if abs(value) < 0.1 * min(1.0, most)}
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


def _no_share_is_lost(
    ratio: dict[tuple[int, int], float],
    o: dict[tuple[int, int], float],
    e: dict[tuple[int, int], float],
    case: Case,
) -> Finding:
    if _equal(list(ratio.values())):
        averaged = all(abs(o[c] * case.runs.world_size - 1) < 0.05 for c in ratio)
        mean = sum(ratio.values()) / len(ratio)
        return factor(mean, case.runs.world_size, 1 + max(j for _, j in ratio), averaged)
    backwards = sorted({j for _, j in ratio})
    first = [c for c in ratio if c[1] == backwards[0]]
    of = first if len(first) > 1 else list(ratio)
    have, right = (", ".join(f"{weights[c]:.3g}" for c in of) for weights in (o, e))
    words = f"the ranks' gradients were added with the weights {have}; right weights are {right}"
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
    return "unequal factors", f"{words}. Each gradient was scaled by a factor of its own, for " \
        "example by clipping or by a loss scale."  # fmt: skip


def _equal(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= 0.05 * max(map(abs, values))
