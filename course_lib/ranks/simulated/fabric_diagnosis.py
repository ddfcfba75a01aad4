"""Diagnosis of a fabric. It is exact, because a fabric knows every operation of every rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace

from course_lib.ranks.explain.errors import (
    DeadlockError,
    MismatchError,
    MisuseWarning,
    RanksError,
    RankState,
)
from course_lib.ranks.explain.mismatch import PIECES, collective_mismatch, unfinished
from course_lib.ranks.explain.waiting import (
    Skipped,
    Unmatched,
    Waiting,
    deadlock,
    operation_in_words,
)
from course_lib.ranks.explain.words import counted, names
from course_lib.ranks.simulated.fabric import Fabric, Phase
from course_lib.ranks.simulated.handles import Misuse
from course_lib.ranks.simulated.operation import NEW_GROUP, Mismatch, Operation, stream_of

_ENDED = (Phase.FINISHED, Phase.RAISED)


def explain_failure(fabric: Fabric) -> RanksError:
    """Return what is wrong when no rank can go on: operations that do not fit, or a deadlock."""
    if isinstance(fabric.failure, Mismatch):
        return _explain_mismatch(fabric, fabric.failure)
    if fabric.failure is not None:
        return fabric.failure
    waiting = {
        rank: Waiting(
            rank,
            operation.kind,
            fabric.late(operation),
            operation.seq,
            operation.tag,
            operation.group,
        )
        for rank, operation in enumerate(fabric.waiting)
        if operation is not None and fabric.phase[rank] is Phase.BLOCKED
    }
    return deadlock(waiting, fabric_states(fabric), _unmatched(fabric))


def fabric_states(fabric: Fabric) -> list[RankState]:
    """Return one row per rank: what it does, on which line, and for how many virtual seconds."""
    now = max(fabric.clock)
    rows = []
    for rank, phase in enumerate(fabric.phase):
        operation = fabric.waiting[rank]
        if phase is Phase.BLOCKED and operation is not None:
            seconds = now - fabric.clock[rank]
            doing = f"waits in {_in_words(fabric, operation)}"
            rows.append(RankState(rank, doing, operation.where, seconds))
        else:
            rows.append(RankState(rank, phase.value, running=phase is Phase.RUNNING))
    return rows


def _in_words(fabric: Fabric, operation: Operation) -> str:
    made_at = fabric.made.get(operation.group, "")
    return operation_in_words(
        operation.kind,
        seq=operation.seq,
        peer=operation.peer,
        tag=operation.tag,
        nbytes=operation.nbytes,
        members=operation.members,
        world_size=fabric.world_size,
        group_name=operation.group_name,
        made_at=made_at,
    )


def _unmatched(fabric: Fabric) -> list[Unmatched]:
    """Return the messages without a partner; equal messages of one line are counted together."""
    counts: dict[Unmatched, int] = {}
    for left in fabric.unserved():
        if left.kind in ("send", "recv"):
            sends = left.kind == "send"
            key = Unmatched(left.rank, sends, left.peer, left.tag, left.group, 0, left.where)
            counts[key] = counts.get(key, 0) + 1
    return [replace(message, count=count) for message, count in counts.items()]


def explain_leftovers(fabric: Fabric) -> DeadlockError | None:
    """Return what every rank left behind at the end of a call, or ``None`` if nothing is left."""
    gaps: dict[tuple[bool, str, int, int], Skipped] = {}
    for left in fabric.unserved():
        if left.kind in ("send", "recv"):
            continue
        stream = stream_of(left)
        for member in left.members:
            entered = fabric.entered[(*stream, member)]
            gap_size = fabric.entered[(*stream, left.rank)] - entered
            if left.seq != entered + 1 or member == left.rank:
                continue
            before = gaps.get((*stream, member, gap_size))
            ranks_ahead = (*before.others, left.rank) if before else (left.rank,)
            gaps[(*stream, member, gap_size)] = Skipped(
                member, ranks_ahead, gap_size, left.seq, left.signature(), left.where, _noun(left)
            )
    states = fabric_states(fabric)
    over = all(phase in _ENDED for phase in fabric.phase)
    return unfinished(_unmatched(fabric), list(gaps.values()), states, over)


def _noun(operation: Operation) -> str:
    return NEW_GROUP if operation.kind == NEW_GROUP else "collective"


def report_misuse(misuses: Sequence[Misuse]) -> None:
    """Warn of what an otherwise successful call did wrong with its handles, if anything."""
    if text := explain_misuse((misuse.rank, misuse.words) for misuse in misuses):
        touched = explain_misuse((e.rank, e.words) for e in misuses if e.did).splitlines()
        warn_each_time(MisuseWarning(text, touched))


def warn_each_time(warning: Warning) -> None:
    """Give a warning that names no line of the notebook; Python would show it only once."""
    warnings.warn_explicit(warning, type(warning), "ranks", 0, registry={})


def explain_misuse(misuses: Iterable[tuple[int, str]]) -> str:
    """Return mistakes with handles in words; ranks with equal mistakes share one line.

    `misuses`: pairs of a rank and what it did, see `Misuse.words`.
    """
    together: dict[str, list[int]] = {}
    for rank, description in misuses:
        together.setdefault(description, []).append(rank)
    return "\n".join(f"{names(sorted(set(ranks)))} {did}" for did, ranks in together.items())


def _explain_mismatch(fabric: Fabric, mismatch: Mismatch) -> MismatchError:
    operations = mismatch.operations
    states = fabric_states(fabric)
    first = operations[0]
    if first.kind not in ("send", "recv"):
        entered = {part.rank: (part.signature(), part.where) for part in operations}
        return collective_mismatch(
            first.seq, entered, first.members, states, _noun(first), mismatch.summary
        )
    for operation in operations:
        doing = f"{_in_words(fabric, operation)} {counted(operation.numel, 'element')}"
        states[operation.rank] = RankState(operation.rank, doing, operation.where)
    return MismatchError(mismatch.summary, states, PIECES)
