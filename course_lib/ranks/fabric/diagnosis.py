"""Who waits for whom on a fabric, and what that means. Exact: the fabric knows every operation."""

from __future__ import annotations

from course_lib.ranks.board.diagnosis import find_cycle, names
from course_lib.ranks.explain.errors import (
    DeadlockError,
    MismatchError,
    RanksError,
    RankState,
    format_bytes,
)
from course_lib.ranks.fabric.fabric import Fabric, Phase
from course_lib.ranks.fabric.operation import Mismatch, Operation


def explain_failure(fabric: Fabric) -> RanksError:
    """Return what is wrong when no rank can go on: operations that do not fit, or a deadlock."""
    if isinstance(fabric.failure, Mismatch):
        return _explain_mismatch(fabric, fabric.failure)
    if fabric.failure is not None:
        return fabric.failure
    return DeadlockError(
        "The ranks wait for one another: none of them can go on.",
        rank_states(fabric),
        _explain(fabric),
    )


def awaited(fabric: Fabric, rank: int) -> tuple[int, ...]:
    """Return the ranks that have yet to start what `rank` is blocked in."""
    operation = fabric.waiting[rank]
    if operation is None or operation.end is not None:
        return ()
    if operation.kind == "recv" and operation.peer is None:
        return tuple(member for member in operation.members if member != rank)
    if operation.kind in ("send", "recv"):
        assert operation.peer is not None
        return (operation.peer,)
    entered = fabric.entered
    late = (m for m in operation.members if entered[operation.group, m] < operation.seq)
    return tuple(late)


def rank_states(fabric: Fabric) -> list[RankState]:
    """Return one row per rank: what it does, on which line, for how many virtual seconds."""
    now = max(fabric.clock)
    rows = []
    for rank, phase in enumerate(fabric.phase):
        operation = fabric.waiting[rank]
        if phase is Phase.BLOCKED and operation is not None:
            row = RankState(rank, f"waits in {_name(operation)}", operation.where)
            rows.append(RankState(rank, row.doing, row.where, now - fabric.clock[rank]))
        else:
            doing = "running" if phase in (Phase.RUNNING, Phase.READY) else phase.value
            rows.append(RankState(rank, doing))
    return rows


def _name(operation: Operation) -> str:
    size = format_bytes(operation.nbytes)
    if operation.kind == "send":
        return f"send to rank {operation.peer} ({size})"
    if operation.kind == "recv":
        source = "any rank" if operation.peer is None else f"rank {operation.peer}"
        return f"recv from {source} ({size})"
    return f"{operation.kind} #{operation.seq} ({size})"


def _explain(fabric: Fabric) -> str:
    blocked = [r for r, phase in enumerate(fabric.phase) if phase is Phase.BLOCKED]
    waiting = {rank: awaited(fabric, rank) for rank in blocked}
    cycle = find_cycle(waiting)
    if cycle:
        chain = " → ".join(f"rank {rank}" for rank in [*cycle, cycle[0]])
        sentence = f"Each waits for the next: {chain}."
        kinds = {operation.kind for rank in cycle if (operation := fabric.waiting[rank])}
        if kinds == {"send"}:
            sentence += (
                " All of them send first. Let some receive first, or start the send with"
                " dist.isend, receive, and then wait for it."
            )
        elif kinds == {"recv"}:
            sentence += " All of them receive first, and nobody has sent."
        return sentence + _other_tag(fabric, cycle)
    lines = []
    for rank, others in waiting.items():
        operation = fabric.waiting[rank]
        ended = [other for other in others if other not in waiting]
        if not ended or operation is None:
            continue
        who = names(ended).lower()
        if operation.kind == "recv":
            lines.append(f"Rank {rank} receives from {who}, which ended without sending.")
        elif operation.kind == "send":
            lines.append(f"Rank {rank} sends to {who}, which ended without receiving.")
        else:
            lines.append(
                f"Rank {rank} is in collective #{operation.seq} of its group, which {who} never "
                "called: every rank of the group must call it."
            )
    return "\n".join(lines) + _other_tag(fabric, blocked)


def _other_tag(fabric: Fabric, ranks: list[int]) -> str:
    """Say it if a message is there, but with another tag or in another group."""
    left = fabric.unserved()
    for rank in ranks:
        mine = fabric.waiting[rank]
        if mine is None or mine.kind not in ("send", "recv"):
            continue
        for other in left:
            if (other.rank, other.peer) != (mine.peer, rank) or other.kind == mine.kind:
                continue
            if other.kind in ("send", "recv"):
                what = f"tag {other.tag}, not {mine.tag}"
                if other.group != mine.group:
                    what = "a different group"
                return (
                    f"\nRank {other.rank} did start the {other.kind} that rank {rank} waits for "
                    f"({other.where}), but with {what}."
                )
    return ""


def _explain_mismatch(fabric: Fabric, mismatch: Mismatch) -> MismatchError:
    operations = {operation.rank: operation for operation in mismatch.operations}
    collective = all(op.kind not in ("send", "recv") for op in mismatch.operations)
    states = []
    for state in rank_states(fabric):
        operation = operations.get(state.rank)
        if operation is not None:
            size = f" {operation.numel} elements" if not collective else ""
            doing = operation.signature() if collective else f"{_name(operation)}{size}"
            states.append(RankState(state.rank, doing, operation.where))
        elif collective and state.rank in mismatch.operations[0].members:
            states.append(RankState(state.rank, "has not entered it"))
        else:
            states.append(state)
    detail = (
        "All ranks of a group must call the same collectives in the same order, with the same"
        " number of elements, dtype and root."
        if collective
        else "A send and its receive must have the same number of elements and the same dtype."
    )
    return MismatchError(str(mismatch), states, detail)


def explain_leftovers(fabric: Fabric) -> DeadlockError | None:
    """Return what every rank left behind at the end of a call, or ``None`` if nothing is left."""
    left = fabric.unserved()
    if not left:
        return None
    lines = []
    pairs: dict[tuple[str, int, int | None, str], int] = {}
    for operation in left:
        key = (operation.kind, operation.rank, operation.peer, operation.where)
        pairs[key] = pairs.get(key, 0) + 1
    for (kind, rank, peer, where), count in pairs.items():
        at = f" ({where})" if where else ""
        if kind == "send":
            lines.append(
                f"Rank {rank} sent {count} message{'s' * (count != 1)} to rank {peer} that rank "
                f"{peer} never received{at}."
            )
        elif kind == "recv":
            source = "any rank" if peer is None else f"rank {peer}"
            lines.append(
                f"Rank {rank} posted {count} receive{'s' * (count != 1)} from {source} that were "
                f"never sent{at}."
            )
        else:
            lines.append(f"Rank {rank} launched {kind} and did not wait; others never did{at}.")
    return DeadlockError(
        "Every rank ended, but not all communication did.", rank_states(fabric), "\n".join(lines)
    )
