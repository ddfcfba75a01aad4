"""What a right function may send: as much as the reference, in as many calls, and no other kinds.

Nothing here knows a task. The limits of a case are read from the trace of the reference's run on
the same inputs. `Allowed` names what a task permits beyond that, if several algorithms are right.

In a message, the sender sends the tensor and the receiver receives it. In a collective, a rank
*sends* the data that it hands over and *receives* the data that it has at the end; the algorithm
does not matter. For an all-reduce of n bytes, a rank sends n bytes and receives n. For an
all-gather among K ranks, it sends n and receives K·n.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from course_lib.checking.answers import numbers_apart
from course_lib.checking.cases import Case, Wrong
from course_lib.checking.expectations import (
    computations,
    in_words,
    name_of,
    operations,
    received,
    sent,
)
from course_lib.ranks import Trace
from course_lib.ranks.explain.words import counted, format_bytes, names_inside
from course_lib.ranks.trace.event import Event
from course_lib.ranks.trace.timeline import unit_of


@dataclass(frozen=True)
class Allowed:
    """What a right function may do that the reference does not.

    Attributes:
        kinds: further kinds of operations.
        roles: the roles of the ranks may differ, for example who is where in a tree. So the limits
            of a rank are those of the rank of its group that does most, and any ranks may talk.
        calls: how many calls of a kind more than the reference a rank may make; None: any number.
        slack: bytes more that a rank may send, or a function of its input that gives them; None:
            any number.
        least: the share of the reference's bytes that a rank must receive. Numbers of other ranks
            must come in messages, not from a file or from memory that the ranks of a process share.
        in_order: a rank's calls must have the kinds and bytes of the reference's calls, in their
            order, and begin after as much computation as these.
        time: how many times as long as the reference the ranks may need on the virtual clock;
            None: any time.
        hint: what to do, if a rank sends too much, or the ranks need too long.

    """

    kinds: tuple[str, ...] = ()
    roles: bool = False
    calls: int | None = 0
    slack: int | Callable[[Any], int] | None = 0
    least: float = 0.5
    in_order: bool = False
    time: float | None = None
    hint: str = ""


def expect_as_reference(
    case: Case, own: Sequence[Any], trace: Trace, right: Trace, allowed: Allowed, *, timed: bool
) -> None:
    """Raise `Wrong` if a rank does not communicate as the reference does, or as is `allowed`.

    Args:
        case: the case.
        own: the ranks' inputs.
        trace: what the student's function did.
        right: what the reference did.
        allowed: the exceptions.
        timed: whether the times of `trace` are those of the virtual clock.

    """
    ours = [operations(right, rank) for rank in range(case.world_size)]
    kinds = {event.kind for event in right.operations}
    for rank in range(case.world_size):
        events = operations(trace, rank)
        like = [ours[other] for other in case.members(rank)] if allowed.roles else [ours[rank]]
        _expect_kinds(rank, events, kinds.union(allowed.kinds))
        if not allowed.kinds and not allowed.roles:
            _expect_peers(rank, events, ours[rank])
        if allowed.calls is not None:
            _expect_calls(rank, events, like, allowed)
        if allowed.slack is not None:
            slack = allowed.slack if isinstance(allowed.slack, int) else allowed.slack(own[rank])
            _expect_bytes(rank, events, max(map(_sent, like)) + slack, allowed.hint)
        alone = len(case.members(rank)) == 1
        if not alone:
            _expect_received(rank, events, ours[rank], allowed.least)
        if allowed.in_order and (events or not alone):
            _expect_order(rank, events, ours[rank], allowed.hint)
            if timed:
                _expect_computed(rank, events, ours[rank], trace, right)
    if timed and allowed.time is not None and case.after is None:
        _expect_time(trace, right, allowed.time, allowed.hint)


def _expect_kinds(rank: int, events: Sequence[Event], kinds: set[str]) -> None:
    if others := [event for event in events if event.kind not in kinds]:
        names = f"{' and '.join(sorted(kinds))} only" if kinds else "no communication"
        raise Wrong(f"rank {rank} calls {in_words(others)}; this task allows {names}")


def _expect_peers(rank: int, events: Sequence[Event], ours: Sequence[Event]) -> None:
    """Raise `Wrong` if a rank exchanges messages with a rank that it need not know."""
    peers = {event.peer for event in ours if event.kind in ("send", "recv")}
    messages = [event for event in events if event.kind in ("send", "recv")]
    if strangers := [event for event in messages if event.peer not in peers]:
        known = sorted(peer for peer in peers if peer is not None)
        raise Wrong(
            f"rank {rank} may exchange messages only with "
            f"{names_inside(known) if known else 'nobody'} here, but calls {in_words(strangers)}"
        )


def _expect_calls(
    rank: int, events: Sequence[Event], like: Sequence[Sequence[Event]], allowed: Allowed
) -> None:
    assert allowed.calls is not None
    for kind, count in Counter(event.kind for event in events).items():
        most = max(sum(event.kind == kind for event in ours) for ours in like) + allowed.calls
        if count > most:
            of_kind = [event for event in events if event.kind == kind]
            raise Wrong(
                f"rank {rank} calls {kind} {counted(count, 'time')}, expected at most {most}. "
                f"It calls: {in_words(of_kind)}",
                allowed.hint,
            )


def _sent(events: Sequence[Event]) -> int:
    return sum(map(sent, events))


def _expect_bytes(rank: int, events: Sequence[Event], most: int, hint: str) -> None:
    if (total := _sent(events)) > most:
        raise Wrong(
            f"rank {rank} sends {format_bytes(total)}, expected at most {format_bytes(most)}. "
            f"It sends: {in_words([event for event in events if sent(event)])}",
            hint,
        )


def _expect_received(
    rank: int, events: Sequence[Event], ours: Sequence[Event], least: float
) -> None:
    total, wanted = sum(map(received, events)), least * sum(map(received, ours))
    if total < wanted:
        raise Wrong(
            f"rank {rank} receives {format_bytes(total)}, expected at least "
            f"{format_bytes(int(wanted))}. It receives: "
            f"{in_words([event for event in events if received(event)])}",
            "A rank must get numbers of other ranks in messages, not from files or shared memory.",
        )


def _expect_order(rank: int, events: Sequence[Event], ours: Sequence[Event], hint: str) -> None:
    launched, right = ([(e.kind, e.bytes) for e in each] for each in (events, ours))
    if launched != right:
        sizes, wanted = (
            ", ".join(f"{kind} {format_bytes(size)}" for kind, size in each) or "nothing"
            for each in (launched, right)
        )
        raise Wrong(f"rank {rank} launches: {sizes}; expected in this order: {wanted}", hint)


def _expect_computed(
    rank: int, events: Sequence[Event], ours: Sequence[Event], trace: Trace, right: Trace
) -> None:
    """Raise `Wrong` if a call begins before its numbers can have been computed.

    A rank reports its computation itself, and could report all of it at the most favourable moment.
    """
    for event, of_ours in zip(events, ours, strict=True):
        had, need = _computed(trace, rank, event.start), _computed(right, rank, of_ours.start)
        if had < need * (1 - 1e-6) - 1e-9:
            unit, scale = unit_of(need)
            raise Wrong(
                f"rank {rank}: {name_of(event)} is launched after {scale * had:.4g} {unit} of "
                f"computation, expected at least {scale * need:.4g} {unit}",
                "In this check's program, computation comes before the communication that needs "
                "it. Leave compute() as it is.",
            )


def _computed(trace: Trace, rank: int, until: float) -> float:
    """Return for how many seconds a rank has computed by a time."""
    busy = computations(trace, rank)
    return sum(max(0.0, min(event.end, until) - event.start) for event in busy)


def _expect_time(trace: Trace, right: Trace, factor: float, hint: str) -> None:
    took, most = trace.makespan, right.makespan * factor
    if took > most + 1e-9:
        unit, scale = unit_of(max(most, took))
        needed, allowed = numbers_apart(took * scale, most * scale, 4)
        last = max(trace.operations, key=lambda event: event.end, default=None)
        end = (
            ""
            if last is None
            else f". The last operation to end is on rank {last.rank}: {in_words([last])}"
        )
        raise Wrong(f"the ranks need {needed} {unit}, expected at most {allowed} {unit}{end}", hint)
