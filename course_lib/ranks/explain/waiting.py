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
from dataclasses import dataclass

from course_lib.ranks.explain.errors import DeadlockError, RankState
from course_lib.ranks.explain.words import (
    format_bytes,
    names,
    names_inside,
    one_or_many,
    spans,
)

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
    made: str = "",
) -> str:
    """Return an operation for a report: ``all_reduce #3 (4.0 KiB)``, ``recv from rank 2``.

    `made`: the line on which its group was made, if it is not the default group.
    """
    if kind in ("send", "recv"):
        other = "any rank" if peer is None else f"rank {peer}"
        what = f"{kind} {'to' if kind == 'send' else 'from'} {other}"
        what += f" with tag {tag}" if tag else ""
    else:
        what = f"{kind} #{seq}"
        if group_name or made or len(members) < world_size:
            whose = [group_name, f"ranks {spans(members)}", f"made at {made}" if made else ""]
            what += f" of {', '.join(filter(None, whose))}"
    return what + (f" ({format_bytes(nbytes)})" if nbytes else "")


def stuck(waiting: Mapping[int, Waiting], ended: Collection[int]) -> dict[int, Waiting]:
    """Return the waiting ranks that can never go on."""
    left = {rank for rank, each in waiting.items() if each.awaited}

    def moves(each: Waiting) -> bool:
        lost = (left | set(ended)).intersection(each.awaited)
        return len(lost) < len(each.awaited) if each.one_is_enough else not lost

    while moving := {rank for rank in left if moves(waiting[rank])}:
        left -= moving
    return {rank: waiting[rank] for rank in sorted(left)}


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
    waiting: Mapping[int, Waiting],
    states: Sequence[RankState],
    unmatched: Sequence[Unmatched] = (),
) -> DeadlockError:
    """Return the error for ranks that can never go on.

    Args:
        waiting: the ranks that are `stuck`.
        states: what every rank does, in rank order.
        unmatched: messages without their other side, perhaps because they were sent elsewhere.

    """
    cycle = find_cycle(waiting)
    awaited = {other for each in waiting.values() for other in each.awaited}
    ended = sorted(awaited - waiting.keys())
    if cycle or not ended:
        summary = "The ranks wait for one another: none of them can go on."
    else:
        verb = one_or_many(list(waiting), "waits", "wait")
        who = names(list(waiting))
        summary = f"{who} {verb} for {names_inside(ended)}, which ended without taking part."
    why = _explain_cycle(waiting, cycle) if cycle else _explain_ended(waiting)
    astray = _went_elsewhere([waiting[rank] for rank in cycle or waiting], unmatched)
    kinds = {waiting[rank].kind for rank in cycle} if len(cycle) > 1 and not astray else set()
    if kinds == {"recv"}:
        why += " All of them receive first, and nobody has sent."
    if kinds == {"send"}:
        why += (
            " All of them send first. Let some receive first, or start the send with dist.isend, "
            "receive, and then wait for it."
        )
    return DeadlockError(summary, states, "\n".join(filter(None, [why, *first_few(astray)])))


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
    for rank, each in waiting.items():
        if each.kind not in ("send", "recv", "new_group"):
            groups.setdefault(each.group, []).append(rank)
    if len(groups) < 2:
        return ""
    which = ["one group", *["another"] * (len(groups) - 1)]
    clauses = ", ".join(
        f"{names_inside(ranks)} {one_or_many(ranks, 'waits', 'wait')} in a collective of {group}"
        for ranks, group in zip(groups.values(), which, strict=True)
    )
    return (
        f"{clauses[0].upper()}{clauses[1:]}. Ranks that are in several groups must all call the "
        "collectives of these groups in the same order."
    )


def _explain_ended(waiting: Mapping[int, Waiting]) -> str:
    """Return what the ranks need from ranks that have ended, with one line for each reason."""
    lines: dict[tuple[str, str, str], list[int]] = {}
    for rank, each in waiting.items():
        ended = [other for other in each.awaited if other not in waiting]
        if not ended:
            continue
        who = names_inside(ended)
        if each.kind == "new_group":
            what = f"in dist.new_group, which {who} never called: every rank must call it for every"
            line = ("is", "are", f"{what} group.")
        elif each.kind == "recv":
            line = ("receives", "receive", f"from {who}, which ended without sending.")
        elif each.kind == "send":
            line = ("sends", "send", f"to {who}, which ended without receiving.")
        else:
            call = f"collective #{each.seq} of"
            what = f"which {who} never called: every rank of the group must call it."
            line = (f"is in {call} its group,", f"are in {call} their group,", what)
        lines.setdefault(line, []).append(rank)
    return "\n".join(
        f"{names(ranks)} {one_or_many(ranks, one, many)} {what}"
        for (one, many, what), ranks in lines.items()
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
                what = f"with tag {other.tag}, not {waiter.tag}"
                lines.append(f"Rank {other.rank} did {did}, but {what}{at}.")
            elif other.group != waiter.group:
                lines.append(f"Rank {other.rank} did {did}, but in a different group{at}.")
    return list(dict.fromkeys(lines))
