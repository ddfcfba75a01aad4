"""Explain, for all kinds of ranks, who waits for whom, and when that is a deadlock.

A blocked rank *waits for* the ranks that have not yet started what it needs:

- in a collective: the members of the group that have not entered that collective;
- in a send: the peer, if it has not posted the receive;  in a recv: the peer, if it has not sent.

It needs all of them. So a rank is stuck for good if one of the ranks it waits for has ended the
call, or is itself stuck. The largest set of ranks that are stuck in this sense is a *deadlock*.
Each of them needs a different rank of the set, or a rank that has ended. So none of them will ever
move, no matter what the ranks outside the set do. If the set is empty, there is no deadlock. (In a
broadcast, one receiver may get the data before another receiver has come. A program that relies on
this makes a mistake: with NCCL it hangs.)

`processes.board_diagnosis` finds who waits on real ranks, `simulated.fabric_diagnosis` on simulated
ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from course_lib.ranks.explain.errors import DeadlockError, RankState
from course_lib.ranks.explain.words import format_bytes, names, names_inside, one_or_many, spans

_TOLD = 8
"""Up to this number of ranks, a report explains each one."""


@dataclass(frozen=True)
class Waiting:
    """The operation in which one blocked rank waits."""

    rank: int
    kind: str
    """``send``, ``recv``, ``new_group``, or a collective such as ``all_reduce``."""
    awaited: tuple[int, ...]
    """The ranks that have not yet started what it needs."""
    seq: int = 0
    """The collective's number in its group, from 1."""
    tag: int = 0
    group: Hashable = None
    """A value that identifies the process group."""
    one_is_enough: bool = False
    """Whether one of the awaited ranks is enough, as for a message from any rank."""


@dataclass(frozen=True)
class Unmatched:
    """Messages of one kind that a rank has started and the other side has not."""

    rank: int
    sends: bool
    peer: int | None
    """The rank on the other side; ``None`` for any rank."""
    tag: int = 0
    group: Hashable = None
    count: int = 1
    where: str = ""


@dataclass(frozen=True)
class Skipped:
    """Collectives of a group that some ranks entered, but an ended rank did not."""

    rank: int
    """The rank that has ended."""
    others: tuple[int, ...]
    count: int
    first: int
    """Number of the first skipped collective in its group, from 1."""
    signature: str = ""
    where: str = ""
    noun: str = "collective"


def operation_in_words(
    kind: str,
    *,
    seq: int = 0,
    peer: int | None = None,
    tag: int = 0,
    nbytes: int = 0,
    members: Sequence[int] = (),
    world_size: int = 0,
    group_name: str = "",
    made_at: str = "",
) -> str:
    """Return an operation for a report: ``all_reduce #3 (4.0 KiB)``, ``recv from rank 2``.

    `made_at`: the line on which its group was made, if it is not the default group.
    """
    if kind in ("send", "recv"):
        other = "any rank" if peer is None else f"rank {peer}"
        text = f"{kind} {'to' if kind == 'send' else 'from'} {other}"
        text += f" with tag {tag}" if tag else ""
    else:
        text = f"{kind} #{seq}"
        if group_name or made_at or len(members) < world_size:
            origin = f"made at {made_at}" if made_at else ""
            facts = [group_name, f"ranks {spans(members)}", origin]
            text += f" of {', '.join(filter(None, facts))}"
    return text + (f" ({format_bytes(nbytes)})" if nbytes else "")


def stuck(waiting: Mapping[int, Waiting], ended: Collection[int]) -> dict[int, Waiting]:
    """Return the waiting ranks that can never go on; they await only ranks that never come."""
    left = {rank for rank, wait in waiting.items() if wait.awaited}

    def lost(wait: Waiting) -> tuple[int, ...]:
        return tuple(rank for rank in wait.awaited if rank in left or rank in ended)

    def moves(wait: Waiting) -> bool:
        return lost(wait) != wait.awaited if wait.one_is_enough else not lost(wait)

    while moving := {rank for rank in left if moves(waiting[rank])}:
        left -= moving
    return {rank: replace(waiting[rank], awaited=lost(waiting[rank])) for rank in sorted(left)}


def find_cycle(waiting: Mapping[int, Waiting]) -> list[int]:
    """Return ranks that wait for one another in a ring, or nothing if there is no ring."""
    for start in waiting:
        path: list[int] = []
        rank = start
        while rank in waiting and rank not in path:
            path.append(rank)
            # Prefer a rank that also waits: the others cannot be part of a ring.
            rank = next((other for other in waiting[rank].awaited if other in waiting), -1)
        if rank in path:
            return path[path.index(rank) :]
    return []


def deadlock(
    waiting: Mapping[int, Waiting], states: Sequence[RankState], unmatched: Sequence[Unmatched] = ()
) -> DeadlockError:
    """Return the error for ranks that can never go on.

    Args:
        waiting: the ranks that are `stuck`.
        states: what every rank does, in rank order.
        unmatched: messages without their other side, perhaps because they were sent elsewhere.

    """
    cycle = find_cycle(waiting)
    awaited = {other for wait in waiting.values() for other in wait.awaited}
    ended = sorted(awaited - waiting.keys())
    if cycle or not ended:
        summary = "The ranks wait for one another: none of them can go on."
    else:
        verb = one_or_many(list(waiting), "waits", "wait")
        waiters = names(list(waiting))
        summary = f"{waiters} {verb} for {names_inside(ended)}, which ended without taking part."
    explanation = _explain_cycle(waiting, cycle) if cycle else _explain_ended(waiting)
    astray = _went_elsewhere([waiting[rank] for rank in cycle or waiting], unmatched)
    kinds = {waiting[rank].kind for rank in cycle} if len(cycle) > 1 and not astray else set()
    if kinds == {"recv"}:
        explanation += " All of them receive first, and nobody has sent."
    if kinds == {"send"}:
        explanation += (
            " All of them send first. Let some receive first, or start the send with dist.isend, "
            "receive, and then wait for it."
        )
    lines = filter(None, [explanation, *first_few(astray)])
    return DeadlockError(summary, states, "\n".join(lines))


def first_few(lines: Sequence[str]) -> list[str]:
    """Return a report's lines about single ranks; if they are many, the first few and a count."""
    if len(lines) <= _TOLD:
        return list(lines)
    return [*lines[:_TOLD], f"… and {len(lines) - _TOLD} more like these."]


def _explain_cycle(waiting: Mapping[int, Waiting], cycle: Sequence[int]) -> str:
    if len(cycle) == 1:
        return (
            f"Rank {cycle[0]} waits for itself. A rank can send only to another rank, and receive "
            "only from another rank: check src or dst in this call."
        )
    ring = [f"rank {rank}" for rank in [*cycle, cycle[0]]]
    if len(ring) > _TOLD + 2:
        ring[_TOLD:-1] = ["…"]
    chain = " → ".join(ring)
    sentence = f"Each waits for the next: {chain}."
    crossed = _explain_crossed(waiting)
    return f"{sentence}\n{crossed}" if crossed else sentence


def _explain_crossed(waiting: Mapping[int, Waiting]) -> str:
    """Return an explanation if the ranks wait in collectives of different groups, else ``""``."""
    groups: dict[Hashable, list[int]] = {}
    for rank, wait in waiting.items():
        if wait.kind not in ("send", "recv", "new_group"):
            groups.setdefault(wait.group, []).append(rank)
    if len(groups) < 2:
        return ""
    group_labels = ["one group", *["another"] * (len(groups) - 1)]
    clauses = ", ".join(
        f"{names_inside(ranks)} {one_or_many(ranks, 'waits', 'wait')} in a collective of {group}"
        for ranks, group in zip(groups.values(), group_labels, strict=True)
    )
    return (
        f"{clauses[0].upper()}{clauses[1:]}. Ranks that are in several groups must all call the "
        "collectives of these groups in the same order."
    )


def _explain_ended(waiting: Mapping[int, Waiting]) -> str:
    """Return what the ranks need from ranks that have ended, with one line for each reason."""
    lines: dict[tuple[str, str, str], list[int]] = {}
    for rank, wait in waiting.items():
        ended = [other for other in wait.awaited if other not in waiting]
        if not ended:
            continue
        ended_names = names_inside(ended)
        if wait.kind == "new_group":
            reason = f"in dist.new_group, which {ended_names} never called"
            line = ("is", "are", f"{reason}: every rank must call it for every group.")
        elif wait.kind == "recv":
            line = ("receives", "receive", f"from {ended_names}, which ended without sending.")
        elif wait.kind == "send":
            line = ("sends", "send", f"to {ended_names}, which ended without receiving.")
        else:
            call = f"collective #{wait.seq} of"
            reason = f"which {ended_names} never called: every rank of the group must call it."
            line = (f"is in {call} its group,", f"are in {call} their group,", reason)
        lines.setdefault(line, []).append(rank)
    return "\n".join(
        f"{names(ranks)} {one_or_many(ranks, singular, plural)} {reason}"
        for (singular, plural, reason), ranks in lines.items()
    )


def _went_elsewhere(waiting: Iterable[Waiting], unmatched: Sequence[Unmatched]) -> list[str]:
    """Return a line for each awaited message that was started for another rank, tag or group."""
    lines = []
    for waiter in waiting:
        if waiter.kind not in ("send", "recv") or len(waiter.awaited) != 1:
            continue
        for other in unmatched:
            if other.rank != waiter.awaited[0] or other.sends == (waiter.kind == "send"):
                continue
            did = "send" if other.sends else "receive"
            at = f" ({other.where})" if other.where else ""
            if other.peer not in (waiter.rank, None):
                to = f"{'to' if other.sends else 'from'} rank {other.peer}"
                lines.append(f"Rank {other.rank} did {did}, but {to}, not rank {waiter.rank}{at}.")
            elif other.tag != waiter.tag:
                tags = f"with tag {other.tag}, not {waiter.tag}"
                lines.append(f"Rank {other.rank} did {did}, but {tags}{at}.")
            elif other.group != waiter.group:
                lines.append(f"Rank {other.rank} did {did}, but in a different group{at}.")
    return list(dict.fromkeys(lines))
