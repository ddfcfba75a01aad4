"""What a right function may send: as much as the reference, in as many calls, and no other kinds.

Nothing here knows a task. The limits of a case are read from the trace of the reference's run on
the same inputs. `Allowed` names what a task permits beyond that, if several algorithms are right.
What the trace of the reference cannot say is a further demand: `sends_at_most`, `computes_between`,
or an `Expectation` of the task's own. If nothing was recorded, nothing is checked; what is said of
time is checked only on a virtual clock.

In a message, the sender sends the tensor and the receiver receives it. In a collective, a rank
*sends* the data that it hands over and *receives* the data that it has at the end; the algorithm
does not matter. For an all-reduce of n bytes, a rank sends n bytes and receives n. For an
all-gather among K ranks, it sends n and receives K·n.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from course_lib.checking.answers import numbers_apart
from course_lib.checking.cases import COMMUNICATION, Case, Expectation, Observed, Wrong
from course_lib.ranks import Trace
from course_lib.ranks.explain.words import counted, format_bytes, names_inside
from course_lib.ranks.trace.event import Event
from course_lib.ranks.trace.timeline import unit_of

# What the reference does, and what is allowed besides ---------------------------------------------


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
        least: the share of the reference's bytes that the ranks of a group must receive. Numbers
            of other ranks must come in messages, not from a file or from memory that the ranks of
            a process share.
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
    case: Case, inputs: Sequence[Any], trace: Trace, right: Trace, allowed: Allowed, *, timed: bool
) -> None:
    """Raise `Wrong` if a rank does not communicate as the reference does, or as is `allowed`.

    Args:
        case: the case.
        inputs: the ranks' inputs.
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
            _expect_calls(rank, events, like, allowed.calls, allowed.hint)
        if allowed.slack is not None:
            slack = allowed.slack if isinstance(allowed.slack, int) else allowed.slack(inputs[rank])
            most = max(sum(map(sent, calls)) for calls in like)
            expect_bytes(rank, events, most + slack, allowed.hint)
        if allowed.in_order and (events or len(case.members(rank)) > 1):
            _expect_order(rank, events, ours[rank], allowed.hint)
            if timed:
                limits = [(computed(right, rank, e.start), math.inf) for e in ours[rank]]
                _expect_computed(rank, events, limits, trace)
    for members in dict.fromkeys(tuple(case.members(rank)) for rank in range(case.world_size)):
        _expect_received(members, trace, ours, allowed.least)
    if timed and allowed.time is not None and case.after is None:
        _expect_time(trace, right, allowed.time, allowed.hint)


def _expect_kinds(rank: int, events: Sequence[Event], kinds: set[str]) -> None:
    if strangers := [event for event in events if event.kind not in kinds]:
        names = f"{' and '.join(sorted(kinds))} only" if kinds else "no communication"
        raise Wrong(f"rank {rank} calls {in_words(strangers)}; this task allows {names}")


def _expect_peers(rank: int, events: Sequence[Event], ours: Sequence[Event]) -> None:
    """Raise `Wrong` if a rank exchanges messages with a rank that it need not know."""
    talks = [event for event in ours if event.kind in ("send", "recv")]
    peers = sorted({event.peer for event in talks if event.peer is not None})
    messages = [event for event in events if event.kind in ("send", "recv")]
    if strangers := [event for event in messages if event.peer not in peers]:
        raise Wrong(
            f"rank {rank} may exchange messages only with "
            f"{names_inside(peers) if peers else 'nobody'} here, but calls {in_words(strangers)}"
        )


def _expect_calls(
    rank: int, events: Sequence[Event], like: Sequence[Sequence[Event]], more: int, hint: str
) -> None:
    for kind, count in Counter(event.kind for event in events).items():
        limit = more + max(sum(event.kind == kind for event in calls) for calls in like)
        if count > limit:
            of_kind = [event for event in events if event.kind == kind]
            raise Wrong(
                f"rank {rank} calls {kind} {counted(count, 'time')}, expected at most {limit}. "
                f"It calls: {in_words(of_kind)}",
                hint,
            )


def expect_bytes(
    rank: int, events: Sequence[Event], limit: int, hint: str, verb: str = "sends", scope: str = ""
) -> None:
    """Raise `Wrong` if a rank sends, or receives, more bytes than `limit`; see above."""
    size = sent if verb == "sends" else received
    if (total := sum(map(size, events))) > limit:
        raise Wrong(
            f"rank {rank} {verb} {format_bytes(total)}{scope}, expected at most "
            f"{format_bytes(limit)}. It {verb}: {in_words([e for e in events if size(e)])}",
            hint,
        )


def _expect_received(
    members: Sequence[int], trace: Trace, ours: Sequence[Sequence[Event]], share: float
) -> None:
    """Raise `Wrong` if the ranks of a group receive too little, all together.

    How much one of them receives may depend on the direction in which numbers go around.
    """
    events = [event for rank in members for event in operations(trace, rank)]
    total = sum(map(received, events))
    needed = math.ceil(share * sum(received(event) for rank in members for event in ours[rank]))
    if len(members) > 1 and total < needed:
        raise Wrong(
            f"{names_inside(members)} receive {format_bytes(total)}, expected at least "
            f"{format_bytes(needed)}. They receive: {in_words([e for e in events if received(e)])}",
            "A rank must get numbers of other ranks in messages, not from files or shared memory.",
        )


def _expect_order(rank: int, events: Sequence[Event], ours: Sequence[Event], hint: str) -> None:
    launched, right = ([(e.kind, e.bytes) for e in calls] for calls in (events, ours))
    if launched != right:
        sizes, expected = (
            ", ".join(f"{kind} {format_bytes(size)}" for kind, size in calls) or "nothing"
            for calls in (launched, right)
        )
        raise Wrong(f"rank {rank} launches: {sizes}; expected in this order: {expected}", hint)


def _expect_computed(
    rank: int, events: Sequence[Event], limits: Iterable[tuple[float, float]], trace: Trace
) -> None:
    """Raise `Wrong` if a rank has computed too little when a call begins, or too much at its end.

    A rank reports its computation itself, and could report all of it at the most favourable moment.
    """
    for event, (lower, upper) in zip(events, limits, strict=False):
        early = computed(trace, rank, event.start)
        late = computed(trace, rank, event.end)
        if early < lower * (1 - 1e-6) - 1e-9:
            verb, seconds, bound, limit = "is launched after", early, "at least", lower
        elif late > upper * (1 + 1e-6) + 1e-9:
            verb, seconds, bound, limit = "ends after", late, "at most", upper
        else:
            continue
        unit, scale = unit_of(max(early, late, lower))
        raise Wrong(
            f"rank {rank}: {name_of(event)} {verb} {scale * seconds:.4g} {unit} of computation, "
            f"expected {bound} {scale * limit:.4g} {unit}",
            "In this check's program, computation comes before the communication that needs it, "
            "and waits for what it needs. Leave compute() as it is.",
        )


def _expect_time(trace: Trace, right: Trace, factor: float, hint: str) -> None:
    took, longest = trace.makespan, right.makespan * factor
    if took > longest + 1e-9:
        unit, scale = unit_of(max(longest, took))
        needed, allowed = numbers_apart(took * scale, longest * scale, 4)
        last = max(trace.operations, key=lambda event: event.end, default=None)
        end = (
            ""
            if last is None
            else f". The last operation to end is on rank {last.rank}: {in_words([last])}"
        )
        raise Wrong(f"the ranks need {needed} {unit}, expected at most {allowed} {unit}{end}", hint)


# Further demands ----------------------------------------------------------------------------------


def sends_at_most(limit: int, *, besides: Collection[str] = (), hint: str = "") -> Expectation:
    """Expect a rank to send at most this many bytes; see above for how they are counted.

    Args:
        limit: bytes of one rank in one case.
        besides: do not count operations of these kinds.
        hint: the hint if a rank sends more.

    """
    scope = f" (without {', '.join(sorted(besides))})" if besides else ""

    def test(case: Case, observed: Observed, trace: Trace) -> None:
        for rank in range(case.world_size):
            events = [event for event in operations(trace, rank) if event.kind not in besides]
            expect_bytes(rank, events, limit, hint, scope=scope)

    return Expectation(test)


def computes_between(
    bounds: Callable[[Case, Observed, int], Sequence[tuple[float, float]]],
    *kinds: str,
    part: str = COMMUNICATION,
) -> Expectation:
    """Expect computation and communication in the order of the check's program.

    A rank reports its computation itself, and could report all of it at the most favourable moment.
    So for each operation, the program says how much must have been computed before its launch, and
    how much at most at its end.

    This is checked only on a virtual clock.

    Args:
        bounds: ``bounds(case, observed, rank)``: for each operation, in the order of their launch,
            the least seconds at its launch, and the most at its end.
        *kinds: the kinds of these operations.
        part: the part of the points that is lost.

    """

    def test(case: Case, observed: Observed, trace: Trace) -> None:
        if observed.network is None:
            return
        for rank in range(case.world_size):
            limits = bounds(case, observed, rank)
            _expect_computed(rank, operations(trace, rank, kinds), limits, trace)

    return Expectation(test, part=part)


# What ranks send and receive ----------------------------------------------------------------------

_SAID = 4


def operations(trace: Trace, rank: int, kinds: Collection[str] | None = None) -> list[Event]:
    """Return the rank's operations in the order of their launch; if given, only of these kinds."""
    events = [event for event in trace.operations if event.rank == rank]
    return events if kinds is None else [event for event in events if event.kind in kinds]


def computed(trace: Trace, rank: int, until: float = math.inf) -> float:
    """Return for how many seconds a rank has computed by a time."""
    busy = [event for event in trace.events if (event.rank, event.kind) == (rank, "compute")]
    return sum(max(0.0, min(event.end, until) - event.start) for event in busy)


def after_the_barrier(trace: Trace) -> Trace | None:
    """Return what follows the only barrier of all ranks; None unless there is exactly one."""
    barriers = [
        event
        for event in trace.operations
        if event.kind == "barrier" and len(event.group) == trace.world_size
    ]
    began = {event.rank: event.start for event in barriers}
    if not len(barriers) == len(began) == trace.world_size:
        return None
    later = [event for event in trace.events if event.start > began[event.rank]]
    return Trace(later, trace.world_size, network=trace.network)


def sent(event: Event) -> int:
    """Return the bytes that the event's rank sent."""
    root = event.peer == event.rank
    if event.kind in ("recv", "barrier") or (event.kind == "broadcast" and not root):
        return 0
    if event.kind == "scatter":
        return event.bytes * len(event.group) if root else 0
    return event.bytes


def received(event: Event) -> int:
    """Return the bytes that the event's rank received."""
    root, k = event.peer == event.rank, max(1, len(event.group))
    match event.kind:
        case "send" | "barrier":
            return 0
        case "broadcast":
            return 0 if root else event.bytes
        case "reduce":
            return event.bytes if root else 0
        case "gather":
            return event.bytes * k if root else 0
        case "all_gather":
            return event.bytes * k
        case "reduce_scatter":
            return event.bytes // k
    return event.bytes


def in_words(events: Sequence[Event]) -> str:
    """Return operations in words, equal ones together: how many, what, to whom, on which line."""
    groups: dict[tuple[str, int | None, str], list[int]] = {}
    for event in events:
        groups.setdefault((event.kind, event.peer, event.where), []).append(event.bytes)
    lines = [
        f"{len(sizes)} × {_in_words(*operation, sizes)}"
        for operation, sizes in list(groups.items())[:_SAID]
    ]
    if left := sum(map(len, list(groups.values())[_SAID:])):
        lines.append(f"{counted(left, 'more operation')}")
    return "; ".join(lines) or "nothing"


def name_of(event: Event) -> str:
    """Return one operation in words: what, to whom, its bytes, on which line."""
    return _in_words(event.kind, event.peer, event.where, [event.bytes])


def _in_words(kind: str, peer: int | None, line: str, sizes: Sequence[int]) -> str:
    size = format_bytes(min(sizes))
    if max(sizes) > min(sizes):
        size += f" to {format_bytes(max(sizes))}"
    direction = {"send": f" to rank {peer}", "recv": f" from rank {peer}"}
    whom = "" if peer is None else direction.get(kind, f" with root {peer}")
    return f"{kind}{whom}, {size}" + (f" ({line})" if line else "")
