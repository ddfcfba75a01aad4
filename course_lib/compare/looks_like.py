"""Rules that describe what a wrong tensor looks like.

Each rule takes a `Case` and returns a label and a sentence, or None. The first rule that fits is
used. The rules are general, and look only at numbers: a multiple, zero, the values of the step
before, the part of a different rank, the right numbers in a different order. The strongest rules
are in `shares`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import torch
from torch import Tensor

from course_lib.compare.differences import Case, Difference, Finding, Runs, named, near
from course_lib.compare.record import Key
from course_lib.compare.shares import factor, from_the_shares, shares_are_wrong


def explain(difference: Difference, runs: Runs, others: Sequence[Difference] = ()) -> None:
    """Set `label` and `says` of a difference, and also `ranks` for kinds without a tolerance."""
    case = Case(difference, runs, others)
    kind = difference.key.kind
    for rule in (RULE_OF_KIND[kind],) if kind in RULE_OF_KIND else RULES:
        finding = rule(case)
        if finding is not None:
            difference.label, difference.says = finding
            return
    if difference.key[:2] == (0, "weight"):
        difference.label = "other start"
        difference.says = f"the weights differ before the first step, on {named(difference.ranks)}."
    elif kind in ADVICE:
        difference.label = "unknown"
        difference.says = f"no known pattern fits. {ADVICE[kind]}"


ADVICE = {
    "weight": "Something writes to this weight between the steps.",
    "output": "Everything before this output agrees, so look at this layer: at its options, its "
    "random numbers, and its communication.",
    "gradient": "All outputs agree, so look at the loss, at backward and at the communication.",
    "state": "The gradient agrees, so look at the optimizer's options, and at its state before "
    "this step.",
    "update": "Gradient and options agree, so look at the optimizer's step and what follows it.",
    "buffer": "The step agrees, so look for other code that writes to this buffer.",
}
"""The advice if no pattern fits. It assumes that this is the first difference."""


# Rules for special kinds, which also find the ranks.


def _batch(case: Case) -> Finding:
    """Each row of the batch must be on one rank, or on ranks that have the same rows."""
    rows = case.runs.rows.get(case.key.step)
    if rows is None:
        return None
    forwards = {rank: numbers for rank, numbers in enumerate(rows[1]) if numbers}
    rows_of = {rank: set(torch.cat(numbers).tolist()) for rank, numbers in forwards.items()}
    on_ranks, size = set().union(*rows_of.values()), sum(map(len, rows[0]))
    absent = len(set(range(size)) - on_ranks)
    if -1 in on_ranks:
        strange = [rank for rank, numbers in rows_of.items() if -1 in numbers]
        pairs = case.runs.pairs(case.key)  # right rows, except for rounding?
        if pairs is not None and all(near(x, t, case.tolerance) for x, t in pairs.values()):
            return None
        case.difference.ranks = strange
        for step in range(case.key.step):
            before = Key(step, *case.key[1:])
            values = [[case.runs.ranks[r].value(k) for k in (case.key, before)] for r in strange]
            if all(a is not None and b is not None and torch.equal(a, b) for a, b in values):
                return "stale", f"{named(strange)} got the batch of step {step} again."
        extra = [any(bool((rows == -1).all()) for rows in forwards[rank]) for rank in strange]
        if not absent and all(extra):
            return "too many forwards", f"{named(strange)} did more in this step than its batch. " \
                "Look for a call of optimizer.step() that was skipped, or for micro-batches left " \
                "over from an accumulation that was not complete."  # fmt: skip
        return "other rows", f"rows on {named(strange)} are not in the trusted batch: the data " \
            "are in a different order, perhaps because of a different seed or epoch."  # fmt: skip
    for pair in combinations(rows_of, 2):
        a, b = (rows_of[rank] for rank in pair)
        if a & b and (absent or a != b):
            case.difference.ranks = [rank for rank, numbers in rows_of.items() if numbers & a & b]
            count = f"{len(a & b)} row{'s' * (len(a & b) > 1)}"
            return "same rows", f"{named(pair)} both have {count} of the batch, so they " \
                f"count twice; {absent} of the {size} rows are on no rank."  # fmt: skip
    if absent:
        case.difference.ranks = list(rows_of)
        return "rows missing", f"{absent} of {size} rows of the batch are on no rank."
    return None


def _modes(case: Case) -> Finding:
    """Dropout and batch normalization must be in training where the trusted run is."""
    right = case.runs.trusted.options[case.key]
    records = enumerate(case.runs.ranks)
    ranks = [r for r, record in records if record.options.get(case.key, right) != right]
    if not ranks:
        return None
    case.difference.ranks = ranks
    actual, trusted = ("eval()", "train()") if right["training"] else ("train()", "eval()")
    return "mode", f"{case.key.name} is in the mode of {actual} on {named(ranks)}, and in that " \
        f"of {trusted} in the trusted run."  # fmt: skip


def _masks(case: Case) -> Finding:
    """Dropout masks must be equal if ranks hold the same elements, and different otherwise."""
    values = Key(case.key.step, "dropout", case.key.name)
    places = case.runs.places(values) if values in case.runs.trusted.tensors else None
    masks = [rank.value(case.key) for rank in case.runs.ranks]
    for pair in combinations(range(len(masks)), 2) if places else ():
        (a, p), (b, q) = ((masks[rank], places[rank]) for rank in pair)  # type: ignore[index]
        if a is None or b is None or p is None or q is None or a.shape != b.shape:
            continue
        if a.numel() < 16 or a.all() or b.all() or torch.equal(p, q) == torch.equal(a, b):
            continue
        case.difference.ranks = list(pair)
        if torch.equal(p, q):
            return "other random numbers", f"{named(pair)} hold the same values but drop " \
                "different ones: they need the same random numbers."  # fmt: skip
        return "same random numbers", f"{named(pair)} hold different values but drop " \
            "them in the same places: they need different random numbers."  # fmt: skip
    return None


def _options(case: Case) -> Finding:
    """Learning rate, weight decay and other options must be those of the trusted run."""
    key, records = case.key, case.runs.ranks
    if not any(Key(key.step, "weight", key.name) in record.tensors for record in records):
        return None
    options = {r: record.options[key] for r, record in enumerate(records) if key in record.options}
    if not options:
        case.difference.ranks = list(range(len(records)))
        return "not in the optimizer", "no rank's optimizer has this parameter: the optimizer " \
            "got other tensors, perhaps because it was made before the wrapper."  # fmt: skip
    for name, right in case.runs.trusted.options[key].items():
        ranks = [rank for rank, own in options.items() if own.get(name, right) != right]
        if ranks:
            case.difference.ranks = ranks
            values = ", ".join(dict.fromkeys(str(options[rank][name]) for rank in ranks))
            return "option", f"{name} is {values} on {named(ranks)}, and {right} in the " \
                "trusted run."  # fmt: skip
    return None


RULE_OF_KIND = {"input": _batch, "mode": _modes, "mask": _masks, "option": _options}
"""The rules for the kinds in `OWN_RULES`."""

# Rules for tensors.


def _not_finite(case: Case) -> Finding:
    def is_bad(tensor: Tensor) -> bool:
        return not bool(tensor.isfinite().all())

    ranks = [rank for rank, (x, _) in case.wrong.items() if is_bad(x)]
    if not ranks:
        return None
    share = Key(case.key.step, "share", case.key.name)
    records = enumerate(case.runs.ranks)
    origin = [r for r, record in records if any(map(is_bad, record.tensors.get(share, [])))]
    source = f" They come from {named(origin)}." if origin and origin != ranks else ""
    return "NaN", f"there are infinite numbers, or NaN, on {named(ranks)}.{source}"


def _no_tensor(case: Case) -> Finding:
    without = [rank for rank in case.difference.ranks if rank not in case.wrong]
    frozen = [rank for rank in without if case.key.name in case.runs.ranks[rank].frozen]
    if frozen:
        return "frozen", f"this tensor is missing on {named(frozen)}: requires_grad is False there."
    return ("no gradient", f"this tensor is missing on {named(without)}.") if without else None


def _zero(case: Case) -> Finding:
    if not case.all(lambda x, _: not bool(x.any())):
        return None
    if case.key.kind != "update":
        return "zero", f"all elements are zero on {named(list(case.wrong))}."
    option = Key(case.key.step, "option", case.key.name)
    lacks = all(option not in case.runs.ranks[rank].options for rank in case.wrong)
    reason = ""
    if lacks and case.runs.trusted.options:
        reason = ": the optimizer there lacks this parameter"
    return "unchanged", f"the weight did not change on {named(list(case.wrong))}{reason}."


def _of_the_step_before(case: Case) -> Finding:
    before = case.runs.pairs(Key(case.key.step - 1, *case.key[1:])) if case.key.step else None
    if not before or not case.wrong or not all(rank in before for rank in case.wrong):
        return None
    for rank, (x, _) in case.wrong.items():
        if not any(near(x, old, case.tolerance) for old in before[rank]):
            return None
    return "stale", f"on {named(list(case.wrong))} the values are those of the step before."


def _bias_again(case: Case) -> Finding:
    """Find an output that is off by a multiple of a bias, the same in every row."""
    bias = case.runs.trusted.value(Key(case.key.step, "weight", f"{case.key.name}.bias"))
    if case.key.kind != "output" or bias is None or bias.dim() != 1:
        return None
    counts = set()
    for x, t in case.wrong.values():
        if not x.dim() or x.shape[-1] != len(bias):
            return None
        b = bias.double().expand(x.shape)
        times = float(((x - t) * b).sum() / b.square().sum())
        if not near(x - t, times * b, 4 * case.tolerance):
            return None
        counts.add(round(times, 1))
    if len(counts) != 1 or 0 in counts:
        return None
    (count,) = counts
    times_ = f"{abs(count):g} time{'s' * (abs(count) != 1)}"
    return "bias", f"{case.key.name}.bias is added {times_} too {'often' if count > 0 else 'few'}."


def _multiple(case: Case) -> Finding:
    factors = _factors(case)
    if not factors:
        return None
    if len(factors) < case.runs.world_size:  # few ranks have this piece: use others too
        for other in case.others:
            if other.key[:2] == case.key[:2]:
                factors = {**(_factors(Case(other, case.runs)) or {}), **factors}
    values = list(factors.values())
    if max(values) - min(values) <= 0.02 * max(map(abs, values)):
        return factor(sum(values) / len(values), case.runs.world_size)
    listed = ", ".join(f"{factors[rank]:.3g}" for rank in sorted(factors))
    return "unequal factors", f"the parts of {named(sorted(factors))} are {listed} times the " \
        "right ones: each rank used a factor of its own, such as the norm of its part."  # fmt: skip


def _factors(case: Case) -> dict[int, float] | None:
    """Return rank → c if its part is c times the right one; None if a part is not a multiple."""
    factors = {}
    for rank, (x, t) in case.wrong.items():
        if bool(t.any()) and t.numel() > 1:
            times = float((x * t).sum() / t.square().sum())
            if not near(x, times * t, 2 * case.tolerance * max(1.0, abs(times))):
                return None
            factors[rank] = times
    return factors


def _partial(case: Case) -> Finding:
    """Find parts with the same elements whose sum or mean over the ranks is right."""
    pairs = case.runs.pairs(case.key) or {}
    places = [place for place in case.runs.places(case.key) or [] if place is not None]
    if len(pairs) < 2 or not all(torch.equal(place, places[0]) for place in places):
        return None
    xs, t = torch.stack([x for x, _ in pairs.values()]), next(iter(pairs.values()))[1]
    if near(xs.sum(0), t, 2 * case.tolerance * len(xs)):
        return "partial sum", "each rank has only its own term of a sum over the ranks: " \
            "an all-reduce is missing."  # fmt: skip
    if near(xs.mean(0), t, 2 * case.tolerance):
        return "no all-reduce", "each rank has only its own numbers, and only their mean over " \
            "the ranks is the right result: an all-reduce is missing."  # fmt: skip
    return None


def _own_statistics(case: Case) -> Finding:
    """Find x = a t + b in each feature, with other a and b on each rank: its own statistics."""
    if case.key.kind != "output" or not case.wrong:
        return None
    for pair in case.wrong.values():
        if pair[1].dim() < 2:
            return None
        by_feature = [tensor.transpose(0, 1).flatten(1) for tensor in pair]
        if by_feature[1].shape[1] < 4:
            return None
        x, t = (tensor - tensor.mean(1, keepdim=True) for tensor in by_feature)
        a = (x * t).sum(1, keepdim=True) / t.square().sum(1, keepdim=True).clamp_min(1e-300)
        if not near(x, a * t, 8 * case.tolerance * max(1.0, float(a.abs().max()))):
            return None
    return "own statistics", f"{named(list(case.wrong))} normalize each feature with the mean " \
        "and variance of only their own part of the batch."  # fmt: skip


def _another_part(case: Case) -> Finding:
    pairs, owners = case.runs.pairs(case.key) or {}, {}
    for rank, (x, _) in case.wrong.items():
        fits = [r for r, (_, t) in pairs.items() if r != rank and near(x, t, 2 * case.tolerance)]
        if not fits:
            return None
        owners[rank] = fits[0]
    listed = ", ".join(f"rank {r} has the part of rank {s}" for r, s in owners.items())
    return ("another rank's part", f"{listed}.") if owners else None


def _another_order(case: Case) -> Finding:
    """Find the right numbers in wrong places: on each rank, or in all parts put together."""
    pairs, places = case.runs.pairs(case.key), case.runs.places(case.key)
    right, tolerance = case.runs.trusted.value(case.key), 2 * case.tolerance
    if not pairs or not places or right is None or right.numel() < 4:
        return None

    def same_numbers(x: Tensor, t: Tensor) -> bool:
        return near(x.flatten().sort()[0], t.flatten().sort()[0], tolerance)

    if case.all(same_numbers):
        return "another order", "the right numbers are in the wrong places."
    numbers = torch.cat([place.flatten() for place in places if place is not None])
    if len(set(numbers.tolist())) < len(numbers):
        return None  # ranks have elements in common, so their parts cannot be put together
    right = right.double()
    together = right.flatten().clone()
    for rank, (x, _) in pairs.items():
        together[places[rank].flatten()] = x.flatten()  # type: ignore[union-attr]
    if not same_numbers(together, right):
        return None
    return "another order", "if the ranks' parts are put together, the right numbers are in " \
        "the wrong places."  # fmt: skip


RULES: tuple[Callable[[Case], Finding], ...] = (
    *(_not_finite, _no_tensor, _zero, _of_the_step_before, from_the_shares, _bias_again),
    *(_multiple, _partial, _own_statistics, _another_part, _another_order, shares_are_wrong),
)
