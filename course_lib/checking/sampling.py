"""Who gets which rows: the batches of an epoch, the windows of a run, and a judge of batches.

PyTorch's `DistributedSampler` decides. What people get wrong is a change of one of its settings, so
a mistake is a few keys here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from course_lib.checking.answers import VECTOR, WHOLE, Kind, ListOf, sees
from course_lib.checking.cases import Case, Wrong
from course_lib.checking.on_ranks.given import Given

Batch = list[int]
ROWS = "rows that the model was given"


def batches_of(p: Mapping[str, Any], epoch: int) -> list[Batch]:
    """Return the batches of row numbers of member ``p["me"]`` of ``p["k"]`` in an epoch.

    ``p`` has ``length``, ``batch_size`` and ``seed``. Of mistakes: ``shuffle``, ``tell`` (which
    epoch it is), ``drop_last``, ``short`` (whether a short last batch is kept).
    """
    sampler: DistributedSampler[int] = DistributedSampler(
        range(p["length"]),  # type: ignore[arg-type]
        *(p["k"], p["me"], p.get("shuffle", True), p["seed"], p.get("drop_last", False)),
    )
    if p.get("tell", True):
        sampler.set_epoch(epoch)
    rows, size = list(sampler), p["batch_size"]
    cut = [rows[at : at + size] for at in range(0, len(rows), size)]
    return [batch for batch in cut if p.get("short", True) or len(batch) == size]


def windows_of(p: Mapping[str, Any], k: int) -> list[list[list[Batch]]]:
    """Return the windows of a run: for each the micro-batches, for each the members' rows.

    ``p`` has ``epochs`` (their numbers) and ``accumulate`` as well. Of mistakes: ``keep_last``
    (whether an incomplete window makes a step), ``carry_over`` (whether a window goes on in the
    next epoch), ``from_0`` (whether epochs are counted anew), and those of `batches_of`.
    """
    size, runs = p["accumulate"], []
    for number, epoch in enumerate(p["epochs"]):
        at = number if p.get("from_0") else epoch
        theirs = [batches_of({**p, "k": k, "me": me}, at) for me in range(k)]
        runs.append([list(each) for each in zip(*theirs, strict=True)])
    if p.get("carry_over"):
        runs = [[micro for run in runs for micro in run]]
    cut = [run[at : at + size] for run in runs for at in range(0, len(run), size)]
    return [w for w in cut if p.get("keep_last", True) or len(w) == size]


_EXPECTED = "expected a list of lists of row numbers"


def batches_program(my_batches: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``my_batches(length, batch_size, epoch, seed, group=group)`` for several epochs."""
    length, size, seed = mine["length"], mine["batch_size"], mine["seed"]
    found = [my_batches(length, size, epoch, seed, group=given.group) for epoch in mine["epochs"]]
    for batches in found:
        if not isinstance(batches, list | tuple):
            raise TypeError(f"my_batches returns {type(batches).__name__}, {_EXPECTED}")
        if any(isinstance(batch, int) for batch in batches):
            raise TypeError(f"my_batches returns {batches!r:.40}, {_EXPECTED}")
    listed = [[[int(row) for row in batch] for batch in batches] for batches in found]
    return {"epoch {}": dict(zip(map(str, mine["epochs"]), listed, strict=True))}


MISTAKES: dict[str, dict[str, Any]] = {
    "the order of epoch 0: tell the sampler which epoch it is (set_epoch)": {"tell": False},
    "the rows in their order: shuffle them": {"shuffle": False},
    "an order from another seed: give the sampler `seed`": {"seed": 0},
    "what a sampler with drop_last=True gives: no row may be lost": {"drop_last": True},
    "the share of the group's first rank": {"me": 0},
    "batches without the last, short one": {"short": False},
    "all rows in one batch": {"batch_size": 10**9},
}


@sees(
    lambda case, inputs, rank: {
        "epoch {}": {str(e): ListOf(ListOf(WHOLE)) for e in inputs[rank]["epochs"]}
    }
)
def right_batches(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge the batches of all ranks, one list after the other."""
    p = case.parameters
    for members in case.groups:
        world = {"k": case.world_size}
        for me, rank in enumerate(members):
            asked = {**p, "k": len(members), "me": me}
            mistakes = {
                **MISTAKES,
                "the share among all ranks: give the sampler the group's size, and this rank's "
                "number in it": {**world, "me": rank},
            }
            answers = [values[rank]["epoch {}"][str(epoch)] for epoch in p["epochs"]]
            got = [list(map(list, batches)) for batches in answers]
            for epoch, mine in zip(p["epochs"], got, strict=True):
                wanted = batches_of(asked, epoch)
                if mine != wanted:
                    like = _like(got, asked, mistakes)
                    raise Wrong(
                        f"rank {rank}: epoch {epoch}: expected the batches {_short(wanted)}, "
                        f"got {_short(mine)}",
                        f"This equals {like}." if like else "",
                    )


def _like(got: list[Any], asked: Mapping[str, Any], mistakes: Mapping[str, Any]) -> str:
    """Return the mistake that gives these batches in all epochs, or nothing."""
    for words, changes in mistakes.items():
        if got == [batches_of({**asked, **changes}, epoch) for epoch in asked["epochs"]]:
            return words
    return ""


def _short(batches: Any) -> str:
    text = str(batches)
    return text if len(text) < 120 else text[:117] + "…"


_SEEN = Kind(
    "the rows that the model saw",
    lambda value: isinstance(value, dict) and VECTOR.test(value.get(ROWS)),
)


@sees(_SEEN)
def own_rows_only(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge whether each rank's model saw the rows of its own batches, and no others."""
    p = case.parameters
    for members in case.groups:
        for me, rank in enumerate(members):
            asked = {**p, "k": len(members), "me": me}
            batches = [batch for epoch in p["epochs"] for batch in batches_of(asked, epoch)]
            own = {row for batch in batches for row in batch}
            if others := sorted(set(values[rank][ROWS].tolist()) - own):
                raise Wrong(
                    f"rank {rank}: the model was given row {others[0]}, which is in none of this "
                    "rank's batches",
                    "The ranks share the work: each takes its own batches, and what the others "
                    "find in theirs comes as their gradients.",
                )
