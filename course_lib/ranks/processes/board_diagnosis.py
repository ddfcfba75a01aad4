"""Diagnosis of what the board shows; `explain.waiting` puts it into words.

When a rank has ended a call, its part of the board is final. An operation that still needs such a
rank is *unfinished*: it can never complete, even if no rank waits for it yet.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from course_lib.ranks._torch.collective_table import is_uneven
from course_lib.ranks.explain.errors import (
    DeadlockError,
    MismatchError,
    RankError,
    RanksError,
    RankState,
)
from course_lib.ranks.explain.failure import Failure, exit_reason, rank_error
from course_lib.ranks.explain.mismatch import (
    PIECES,
    collective_mismatch,
    differing,
    differing_splits,
    unfinished,
)
from course_lib.ranks.explain.waiting import Skipped, Unmatched, Waiting, deadlock, stuck
from course_lib.ranks.explain.words import counted
from course_lib.ranks.processes.board_views import (
    NEW_GROUPS,
    MessageChannel,
    RankPhase,
    RankView,
    Wait,
)

_ENDED = (RankPhase.FINISHED, RankPhase.RAISED)


def waits_for(rank: RankView, ranks: Sequence[RankView]) -> tuple[int, ...]:
    """Return the ranks that have yet to start what `rank` waits for; empty if all have."""
    if rank.state is not RankPhase.BLOCKED:
        return ()
    if rank.wait is Wait.COLLECTIVE:
        group = rank.groups.get(rank.group)
        members = group.members if group is not None else ()
        return tuple(m for m in members if _entered(ranks[m], rank.group) < rank.seq)
    if rank.from_anyone:
        return _possible_senders(rank, ranks)
    if rank.channel is not None and _missing(rank, rank.channel, rank.seq, ranks):
        return (rank.channel.peer,)
    return ()


def _possible_senders(rank: RankView, ranks: Sequence[RankView]) -> tuple[int, ...]:
    """Return the ranks that may send to a receive from any source; empty if one has sent."""
    assert rank.channel is not None
    members = rank.groups[rank.channel.group].members if rank.channel.group in rank.groups else ()
    senders = tuple(member for member in members if member != rank.rank)
    for sender in senders:
        to_it = MessageChannel(True, rank.rank, rank.channel.tag, rank.channel.group)
        if ranks[sender].count(to_it) > rank.count(to_it.other_end(sender)):
            return ()
    return senders


def _entered(rank: RankView, group: int) -> int:
    """Return how many collectives the rank entered; -1 if it is not connected to the group."""
    return rank.groups[group].entered if group in rank.groups else -1


def _missing(rank: RankView, channel: MessageChannel, count: int, ranks: Sequence[RankView]) -> int:
    """Return how many of `count` messages of `rank` on a channel the peer has yet to start."""
    return max(0, count - ranks[channel.peer].count(channel.other_end(rank.rank)))


def _waiting(ranks: Sequence[RankView]) -> dict[int, Waiting]:
    """Return, for every blocked rank, the operation that it waits in."""
    kinds = {Wait.SEND: "send", Wait.RECV: "recv"}
    all_waiting = {}
    for rank in ranks:
        if rank.state is RankPhase.BLOCKED:
            kind = kinds.get(rank.wait, "collective" if rank.seq else "new_group")
            tag = 0 if rank.channel is None else rank.channel.tag
            group = rank.group if rank.channel is None else rank.channel.group
            awaited = waits_for(rank, ranks)
            all_waiting[rank.rank] = Waiting(
                rank.rank, kind, awaited, rank.seq, tag, group, one_is_enough=rank.from_anyone
            )
    return all_waiting


def stuck_ranks(ranks: Sequence[RankView]) -> dict[int, Waiting]:
    """Return the ranks that can never go on, each with the operation that it waits in."""
    return stuck(_waiting(ranks), {rank.rank for rank in ranks if rank.state in _ENDED})


def _unmatched(ranks: Sequence[RankView]) -> list[Unmatched]:
    """Return the messages that one side has started and the other has not."""
    return [
        Unmatched(rank.rank, channel.sends, channel.peer, channel.tag, channel.group, gap)
        for rank in ranks
        for channel, count in rank.channels.items()
        if (gap := _missing(rank, channel, count, ranks))
    ]


def find_deadlock(ranks: Sequence[RankView], now: float | None = None) -> DeadlockError | None:
    """Return the explained deadlock if the board shows one, else ``None``.

    The board cannot be read in one instant. So a deadlock counts only if a later reading shows the
    same and nothing has changed in between: `DeadlockWatch` reads twice.
    """
    waiting = stuck_ranks(ranks)
    if not waiting:
        return None
    return deadlock(waiting, board_states(ranks, now), _unmatched(ranks))


def find_unfinished(ranks: Sequence[RankView], now: float | None = None) -> DeadlockError | None:
    """Return an explained error for operations that need an ended rank, or ``None``.

    One reading of the board is enough, because the part of a rank that has ended is final.
    """
    finished = {rank.rank for rank in ranks if rank.state is RankPhase.FINISHED}
    return unfinished(
        [left for left in _unmatched(ranks) if left.peer in finished],
        [gap for rank in finished for gap in _skipped_by(ranks[rank], ranks)],
        board_states(ranks, now),
        over=all(rank.state in _ENDED for rank in ranks),
    )


def _skipped_by(ended: RankView, ranks: Sequence[RankView]) -> list[Skipped]:
    """Return the collectives that other ranks have entered and the ended rank has not."""
    gaps: dict[tuple[int, int], Skipped] = {}
    for rank in ranks:
        for key, group in rank.groups.items():
            entered = max(0, _entered(ended, key))
            gap_size = group.entered - entered
            if ended.rank not in group.members or gap_size <= 0:
                continue
            before = gaps.get((key, gap_size))
            ranks_ahead = (*before.others, rank.rank) if before else (rank.rank,)
            signature, line = group.latest.get(entered + 1, ("", ""))
            gaps[key, gap_size] = Skipped(
                ended.rank, ranks_ahead, gap_size, entered + 1, signature, line, _noun(key)
            )
    return list(gaps.values())


def _noun(key: int) -> str:
    return "new_group" if key == NEW_GROUPS else "collective"


def find_mismatch(ranks: Sequence[RankView]) -> MismatchError | None:
    """Return the first collective or message in which two ranks differ, explained, or ``None``."""
    keys = {key for rank in ranks for key in rank.groups}
    for key in sorted(keys):
        entries_by_seq: dict[int, dict[int, tuple[str, str]]] = {}
        members: set[int] = set()
        for rank in ranks:
            if key in rank.groups:
                members.update(rank.groups[key].members)
                for seq, entry in rank.groups[key].latest.items():
                    entries_by_seq.setdefault(seq, {})[rank.rank] = entry
        for seq, entered in sorted(entries_by_seq.items()):
            signature, *other_signatures = {signature for signature, _ in entered.values()}
            splits = ""
            if not other_signatures and is_uneven(signature.split(" ")[0]):
                splits = differing_splits(
                    {rank: ranks[rank].groups[key].read_splits(seq) for rank in entered}
                )
            if other_signatures or splits:
                states, noun = board_states(ranks), _noun(key)
                return collective_mismatch(seq, entered, members, states, noun, splits)
    return _mismatched_message(ranks)


def _mismatched_message(ranks: Sequence[RankView]) -> MismatchError | None:
    for rank in ranks:
        for channel in filter(lambda channel: channel.sends, rank.channels):
            peer, other = ranks[channel.peer], channel.other_end(rank.rank)
            if not peer.count(other):
                continue
            received = peer.read_messages(other)
            for seq, sent in rank.read_messages(channel).items():
                got = received.get(seq, sent)
                if got != sent:
                    sides = (rank.rank, (sent.numel, sent.dtype), peer.rank, (got.numel, got.dtype))
                    return MismatchError(f"{differing(*sides)}.", board_states(ranks), PIECES)
    return None


def board_states(ranks: Sequence[RankView], now: float | None = None) -> list[RankState]:
    """Return one row per rank: what it does, where, and for how long."""
    now = time.monotonic() if now is None else now
    rows = []
    for rank in ranks:
        blocked = rank.state in (RankPhase.BLOCKED, RankPhase.LIMITED)
        running = blocked or rank.state is RankPhase.RUNNING
        doing = rank.text if blocked else rank.state.name.lower()
        if rank.state is RankPhase.RUNNING and rank.pending:
            doing = f"running, {counted(rank.pending, 'operation')} not finished"
        rows.append(
            RankState(
                rank.rank,
                doing,
                rank.where if rank.state is not RankPhase.RUNNING else "",
                max(0.0, now - rank.since) if running else None,
                running=rank.state is RankPhase.RUNNING,
                raised=rank.state is RankPhase.RAISED,
            )
        )
    return rows


class DeadlockWatch:
    """Finds a deadlock whose ranks have not changed anything for `patience` seconds."""

    def __init__(self, patience: float = 0.3) -> None:
        self._patience = patience
        self._changes: dict[int, tuple[int, float]] = {}

    def look(
        self, ranks: Sequence[RankView], asleep: Collection[int] = ()
    ) -> DeadlockError | MismatchError | None:
        """Return the deadlock once it is certain, else ``None``.

        A mismatch is returned instead if a rank has seen one and its error was not raised: other
        ranks may wait because of it.

        `asleep` are the ranks that sleep in compiled code, according to the operating system.
        PyTorch's DDP waits there for its last buckets, and no process group learns of it. Such a
        rank is assumed to wait for the operations that it has launched.
        """
        now = time.monotonic()
        for rank in ranks:
            if self._changes.get(rank.rank, (-1, now))[0] != rank.changes:
                self._changes[rank.rank] = rank.changes, now
        if any(r.state is RankPhase.LIMITED for r in ranks):
            return None  # it will go on by itself, and perhaps help others
        if any(r.saw_mismatch and now - r.since >= self._patience for r in ranks):
            return find_mismatch(ranks)
        if (left := find_unfinished(ranks, now)) is not None:
            # Wait first: a rank may be about to raise an error that explains more.
            if any(
                rank.state is RankPhase.FINISHED and now - rank.since >= self._patience
                for rank in ranks
            ):
                return find_deadlock(ranks, now) or left
            return None
        ranks = [_as_blocked(rank, ranks) if rank.rank in asleep else rank for rank in ranks]
        if all(now - self._changes[r][1] >= self._patience for r in stuck_ranks(ranks)):
            return find_deadlock(ranks, now)
        return None


def _as_blocked(rank: RankView, ranks: Sequence[RankView]) -> RankView:
    """Return `rank` as blocked in its first launched collective that some member has not entered.

    It is returned unchanged if there is none.
    """
    if rank.state is not RankPhase.RUNNING or not rank.pending:
        return rank
    for key, group in rank.groups.items():
        if key == NEW_GROUPS:
            continue
        gaps = [group.entered - max(0, _entered(ranks[m], key)) for m in group.members]
        if max(gaps, default=0) >= rank.pending:
            seq = group.entered - max(gaps) + 1
            signature, line = group.latest.get(seq, ("", ""))
            return replace(
                rank,
                state=RankPhase.BLOCKED,
                wait=Wait.COLLECTIVE,
                group=key,
                seq=seq,
                text=f"waits in compiled code for {signature.split(' ')[0]} #{seq}",
                where=line,
            )
    return rank


def some_raised(
    failures: Mapping[int, Failure],
    views: Sequence[RankView],
    states: Sequence[RankState] | None = None,
) -> RanksError:
    """Return the error for exceptions on some ranks; `states`: what the others do, if known."""
    rows = board_states(views) if states is None else states
    for failure in failures.values():
        if failure.mismatch:
            # The board may no longer show the mismatch: an ended rank may have removed its side.
            summary = f"{failure.message[:1].upper()}{failure.message[1:]}."
            return find_mismatch(views) or MismatchError(summary, rows)
    # The rank whose state began first failed first.
    first = min(failures, key=lambda rank: views[rank].since)
    return rank_error(failures, first, rows, failures[first].original())


def process_ended(
    rank: int, status: int | None, dump: str, views: Sequence[RankView], line: str
) -> RanksError:
    """Return the error for a rank whose process ended; `status` as in `exit_reason`."""
    if (mismatch := find_mismatch(views)) is not None:
        return mismatch
    states = [
        RankState(rank, "process ended", line or state.where) if state.rank == rank else state
        for state in board_states(views)
    ]
    detail = "The other ranks were stopped." if len(views) > 1 else ""
    if dump:
        detail = f"{dump.rstrip()}\n\n{detail}".rstrip()
    return RankError(
        f"Rank {rank}'s process ended: {exit_reason(status)}.", states, detail, rank=rank
    )


def out_of_step(views: Sequence[RankView]) -> RanksError | None:
    """Return the error for a call in which all ranks ended but left communication behind."""
    return find_mismatch(views) or find_unfinished(views)
