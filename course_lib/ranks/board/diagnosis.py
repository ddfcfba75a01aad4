"""From what stands on the board to what is wrong.

A blocked rank *waits for* the ranks that have yet to start what it needs:

- in a collective: the members of the group that have not entered that collective;
- in a send: the peer, if it has not posted the receive;  in a recv: the peer, if it has not sent.

It needs all of them. So a rank is stuck for good if one of those it waits for has ended the call,
or is stuck itself. The largest set of ranks that are stuck in this sense is a *deadlock*: each of
them needs another one of the set, or one that has ended, so none will ever move, whatever the
ranks outside do. An empty set rules a deadlock out. (In a broadcast one receiver may be served
before another has come; counting on that is the mistake that NCCL punishes with a hang.)

An operation that needs a rank which has ended is *unfinished*: also when nobody waits for it yet,
it can never complete. `find_unfinished` finds these.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from course_lib.ranks.board.views import RankView, State, Wait
from course_lib.ranks.explain.errors import DeadlockError, MismatchError, RankState

_ENDED = (State.FINISHED, State.RAISED)


def waits_for(rank: RankView, ranks: Sequence[RankView]) -> tuple[int, ...]:
    """Return the ranks that have yet to start what `rank` waits for; empty if it is served."""
    if rank.state is not State.BLOCKED:
        return ()
    if rank.wait is Wait.COLLECTIVE:
        group = rank.groups.get(rank.group)
        members = group.members if group is not None else ()
        return tuple(m for m in members if _entered(ranks[m], rank.group) < rank.seq)
    if rank.channel is None:
        return ()
    if ranks[rank.channel.peer].count(rank.channel.other_end(rank.rank)) < rank.seq:
        return (rank.channel.peer,)
    return ()


def _entered(rank: RankView, group: int) -> int:
    """Return how many collectives the rank entered; -1 if it is not connected to the group."""
    return rank.groups[group].entered if group in rank.groups else -1


def stuck_ranks(ranks: Sequence[RankView]) -> dict[int, tuple[int, ...]]:
    """Return the ranks that can never go on, each with those it waits for."""
    waiting = {rank.rank: waits_for(rank, ranks) for rank in ranks}
    stuck = {rank for rank, awaited in waiting.items() if awaited}
    ended = {rank.rank for rank in ranks if rank.state in _ENDED}
    while moving := {r for r in stuck if not (stuck | ended).intersection(waiting[r])}:
        stuck -= moving
    return {rank: waiting[rank] for rank in sorted(stuck)}


def find_deadlock(ranks: Sequence[RankView], now: float | None = None) -> DeadlockError | None:
    """Return the explained deadlock if the board shows one, else ``None``.

    The board is not read in one instant, so a deadlock counts only if it is still there, with
    nothing changed, at a later look: `DeadlockWatch` takes both.
    """
    waiting = stuck_ranks(ranks)
    if not waiting:
        return None
    who = names(list(waiting))
    ended = sorted({other for awaited in waiting.values() for other in awaited} - set(waiting))
    summary = "The ranks wait for one another: none of them can go on."
    if not find_cycle(waiting) and ended:
        verb = "waits" if len(waiting) == 1 else "wait"
        summary = f"{who} {verb} for {_names(ended)}, which ended without taking part."
    return DeadlockError(summary, rank_states(ranks, now), _explain(ranks, waiting))


def _explain(ranks: Sequence[RankView], waiting: dict[int, tuple[int, ...]]) -> str:
    cycle = find_cycle(waiting)
    if cycle:
        chain = " → ".join(f"rank {rank}" for rank in [*cycle, cycle[0]])
        sentence = f"Each waits for the next: {chain}."
        if all(ranks[rank].wait is Wait.SEND for rank in cycle):
            sentence += (
                " All of them send first. Let some receive first, or start the send with"
                " dist.isend, receive, and then wait for it."
            )
        elif all(ranks[rank].wait is Wait.RECV for rank in cycle):
            sentence += " All of them receive first, and nobody has sent."
        return sentence
    lines: dict[str, list[int]] = {}
    for rank, awaited in waiting.items():
        view = ranks[rank]
        ended = [other for other in awaited if other not in waiting]
        if not ended:
            continue
        who = _names(ended)
        if view.wait is Wait.COLLECTIVE and view.seq == 0:
            what = f"in dist.new_group, which {who} never called: all ranks must make every group."
        elif view.wait is Wait.COLLECTIVE:
            what = (
                f"in collective #{view.seq} of the group, which {who} never called: "
                "every rank of the group must call it."
            )
        elif view.wait is Wait.RECV:
            what = f"in a receive from {who}, which ended without sending."
        else:
            what = f"in a send to {who}, which ended without receiving."
        lines.setdefault(what, []).append(rank)
    return "\n".join(
        f"{names(group)} {'is' if len(group) == 1 else 'are'} {what}"
        for what, group in lines.items()
    )


def names(ranks: Sequence[int]) -> str:
    """Return ``Rank 2`` or ``Ranks 0, 1``."""
    return ("Rank " if len(ranks) == 1 else "Ranks ") + ", ".join(map(str, ranks))


def _names(ranks: Sequence[int]) -> str:
    return names(ranks).lower()


def find_cycle(waiting: dict[int, tuple[int, ...]]) -> list[int]:
    """Return ranks that wait for one another in a ring, or nothing if there is no ring."""
    for start in waiting:
        path: list[int] = []
        rank = start
        while rank in waiting and rank not in path:
            path.append(rank)
            # Prefer a rank that waits itself: the others have ended and close no ring.
            rank = next((other for other in waiting[rank] if other in waiting), -1)
        if rank in path:
            return path[path.index(rank) :]
    return []


def find_unfinished(ranks: Sequence[RankView], now: float | None = None) -> DeadlockError | None:
    """Return the operations that need a rank which has ended the call, explained, or ``None``.

    Certain at one look: of a rank that has ended, everything on the board is final.
    """
    lines: dict[str, list[int]] = {}
    for ended in (rank for rank in ranks if rank.state is State.FINISHED):
        for rank in ranks:
            for key, group in rank.groups.items():
                theirs = max(0, _entered(ended, key))
                missing = group.entered - theirs
                if ended.rank in group.members and missing > 0:
                    signature, where = group.latest.get(theirs + 1, ("", ""))
                    text = f"Rank {ended.rank} ended {missing} collective{'s' * (missing != 1)} "
                    text += f"short of {{}}; the first that it skipped is #{theirs + 1}"
                    text += f", {signature} ({where})." if signature else "."
                    lines.setdefault(text, []).append(rank.rank)
            for channel, count in rank.channels.items():
                missing = count - ended.count(channel.other_end(rank.rank))
                if channel.peer != ended.rank or missing <= 0:
                    continue
                tag = f" with tag {channel.tag}" if channel.tag else ""
                text = f"{missing} message{'s' * (missing != 1)}{tag}"
                if channel.sends:
                    text = f"Rank {rank.rank} sent {text} to {{}}, which never received."
                else:
                    text = f"Rank {rank.rank} waits for {text} from {{}}, which never sent."
                lines.setdefault(text, []).append(ended.rank)
    if not lines:
        return None
    over = all(rank.state in _ENDED for rank in ranks)
    return DeadlockError(
        "Every rank ended, but not all communication did."
        if over
        else "A rank ended while others still need it.",
        rank_states(ranks, now),
        "\n".join(text.replace("{}", _names(who)) for text, who in lines.items()),
    )


def find_mismatch(ranks: Sequence[RankView]) -> MismatchError | None:
    """Return the first collective in which two ranks differ, explained, or ``None``."""
    keys = {key for rank in ranks for key in rank.groups}
    for key in sorted(keys):
        seen: dict[int, dict[int, tuple[str, str]]] = {}
        for rank in ranks:
            if key in rank.groups:
                for seq, entry in rank.groups[key].latest.items():
                    seen.setdefault(seq, {})[rank.rank] = entry
        for seq in sorted(seen):
            if len({signature for signature, _ in seen[seq].values()}) > 1:
                states = [
                    RankState(view.rank, *seen[seq].get(view.rank, ("has not entered it", "")))
                    for view in ranks
                ]
                return MismatchError(
                    f"The ranks disagree about collective #{seq} of their group.",
                    states,
                    "All ranks of a group must call the same collectives in the same order, with"
                    " the same number of elements, dtype and root.",
                )
    return None


def rank_states(ranks: Sequence[RankView], now: float | None = None) -> list[RankState]:
    """Return one row per rank: what it does, where, and for how long."""
    now = time.monotonic() if now is None else now
    rows = []
    for rank in ranks:
        running = rank.state in (State.BLOCKED, State.RUNNING)
        doing = rank.text if rank.state is State.BLOCKED else rank.state.name.lower()
        if rank.state is State.STARTING:
            doing = "starting"
        if rank.state is State.RUNNING and rank.pending:
            doing = f"running, {rank.pending} operation{'s' * (rank.pending != 1)} not over"
        rows.append(
            RankState(
                rank.rank,
                doing,
                rank.where if rank.state is not State.RUNNING else "",
                max(0.0, now - rank.since) if running else None,
            )
        )
    return rows


class DeadlockWatch:
    """Finds a deadlock whose ranks have not changed anything for `patience` seconds."""

    def __init__(self, patience: float = 0.3) -> None:
        self._patience = patience
        self._changes: dict[int, tuple[int, float]] = {}

    def look(self, ranks: Sequence[RankView], asleep: Collection[int] = ()) -> DeadlockError | None:
        """Return the deadlock once it is certain, else ``None``.

        `asleep`: ranks that the system shows asleep in compiled code. PyTorch's DDP waits there
        for its last buckets, where no process group is told; such a rank is taken to wait for the
        operations it has launched.
        """
        now = time.monotonic()
        for rank in ranks:
            if self._changes.get(rank.rank, (-1, now))[0] != rank.changes:
                self._changes[rank.rank] = rank.changes, now
        if (unfinished := find_unfinished(ranks, now)) is not None:
            # Not at once: the rank may be about to raise, which would say more.
            if any(
                rank.state is State.FINISHED and now - rank.since >= self._patience
                for rank in ranks
            ):
                return find_deadlock(ranks, now) or unfinished
            return None
        ranks = [_as_blocked(rank, ranks) if rank.rank in asleep else rank for rank in ranks]
        if all(now - self._changes[r][1] >= self._patience for r in stuck_ranks(ranks)):
            return find_deadlock(ranks, now)
        return None


def _as_blocked(rank: RankView, ranks: Sequence[RankView]) -> RankView:
    """Return `rank` as waiting for its first launched collective that another has not entered."""
    if rank.state is not State.RUNNING or not rank.pending:
        return rank
    for key, group in rank.groups.items():
        missing = [group.entered - max(0, _entered(ranks[m], key)) for m in group.members]
        if max(missing, default=0) >= rank.pending:
            seq = group.entered - max(missing) + 1
            signature, where = group.latest.get(seq, ("", ""))
            return replace(
                rank,
                state=State.BLOCKED,
                wait=Wait.COLLECTIVE,
                group=key,
                seq=seq,
                text=f"waits in compiled code for {signature.split(' ')[0]} #{seq}",
                where=where,
            )
    return rank
