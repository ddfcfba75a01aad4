"""Expectations: demands on a case's communication and memory, as data.

Each function makes one `Expectation`, for `Check.expects`. A limit is a number, or a function of
the case and the rank. The message of a failing expectation says what was expected, what was sent
instead, by which rank to which rank, and on which line. If nothing was recorded, nothing is
checked. Expectations about time are checked only on a virtual clock.

In a message, the sender sends the tensor and the receiver receives it. In a collective, a rank
*sends* the data that it hands over and *receives* the data that it has at the end; the algorithm
does not matter. For an all-reduce of n bytes, a rank sends n bytes and receives n. For an
all-gather among K ranks, it sends n and receives K·n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from course_lib.checking.answers import numbers_apart
from course_lib.checking.cases import COMMUNICATION, Case, Expectation, Observed, Wrong
from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.words import counted, format_bytes, names_inside
from course_lib.ranks.trace.event import Event
from course_lib.ranks.trace.timeline import unit_of
from course_lib.ranks.trace.trace import Trace

Limit = int | Callable[[Case, int], int]


def _each_rank(test: Callable[[Case, int, Trace], None]) -> Expectation:
    def run(case: Case, observed: Observed, trace: Trace) -> None:
        for rank in range(case.world_size):
            test(case, rank, trace)

    return Expectation(run)


def _limit(limit: Limit, case: Case, rank: int) -> int:
    return limit if isinstance(limit, int) else limit(case, rank)


def sends_at_most(
    limit: Limit, *, kinds: Iterable[str] | None = None, besides: Iterable[str] = (), hint: str = ""
) -> Expectation:
    """Expect a rank to send at most this many bytes; see above for how they are counted.

    Args:
        limit: bytes of one rank in one case.
        kinds: count only operations of these kinds.
        besides: do not count operations of these kinds.
        hint: the hint if a rank sends more.

    """
    return _bytes("sends", sent, limit, kinds, besides, hint)


def receives_at_most(
    limit: Limit, *, kinds: Iterable[str] | None = None, besides: Iterable[str] = (), hint: str = ""
) -> Expectation:
    """Expect a rank to receive at most this many bytes; see `sends_at_most`."""
    return _bytes("receives", received, limit, kinds, besides, hint)


def receives_at_least(limit: Limit, *, kinds: Iterable[str] | None = None) -> Expectation:
    """Expect a rank to receive at least the bytes that it cannot know by itself.

    If a rank has the right numbers but received fewer bytes, it got the numbers without messages:
    from a file, the store, or memory that the ranks of one process share.
    """
    hint = "A rank must get numbers of other ranks in messages, not from files or shared memory."
    return _bytes("receives", received, limit, kinds, (), hint, at_least=True)


def _bytes(
    verb: str,
    size: Callable[[Event], int],
    limit: Limit,
    kinds: Iterable[str] | None,
    besides: Iterable[str],
    hint: str,
    at_least: bool = False,
) -> Expectation:
    bound = "at least" if at_least else "at most"
    wanted, spared = None if kinds is None else tuple(kinds), frozenset(besides)
    by = f" by {', '.join(wanted)}" if wanted else ""
    by += f" (without {', '.join(sorted(spared))})" if spared else ""

    def test(case: Case, rank: int, trace: Trace) -> None:
        allowed = _limit(limit, case, rank)
        events = [e for e in operations(trace, rank, wanted) if e.kind not in spared and size(e)]
        total = sum(map(size, events))
        if total < allowed if at_least else total > allowed:
            raise Wrong(
                f"rank {rank} {verb} {format_bytes(total)}{by}, expected {bound} "
                f"{format_bytes(allowed)}. It {verb}: {in_words(events)}",
                hint,
            )

    return _each_rank(test)


def calls(**counts: Limit) -> Expectation:
    """Expect a rank to call each named operation exactly this often: ``calls(all_reduce=1)``."""
    return _calls(counts, "", lambda number, wanted: number == wanted)


def calls_at_most(hint: str = "", /, **counts: Limit) -> Expectation:
    """Expect a rank to call each named operation at most this often."""
    return _calls(counts, hint, lambda number, wanted: number <= wanted, "at most ")


def _calls(
    counts: Mapping[str, Limit], hint: str, fits: Callable[[int, int], bool], bound: str = ""
) -> Expectation:
    def test(case: Case, rank: int, trace: Trace) -> None:
        for kind, wanted in counts.items():
            events, number = operations(trace, rank, [kind]), _limit(wanted, case, rank)
            if not fits(len(events), number):
                raise Wrong(
                    f"rank {rank} calls {kind} {counted(len(events), 'time')}, expected {bound}"
                    f"{number}. It calls: {in_words(events or operations(trace, rank))}",
                    hint,
                )

    return _each_rank(test)


def only_calls(*kinds: str) -> Expectation:
    """Expect no operations except these."""

    def test(case: Case, rank: int, trace: Trace) -> None:
        if others := [e for e in operations(trace, rank) if e.kind not in kinds]:
            allowed = f"{' and '.join(kinds)} only" if kinds else "no communication"
            raise Wrong(f"rank {rank} calls {in_words(others)}; this task allows {allowed}")

    return _each_rank(test)


def only_peers(neighbours: Callable[[Case, int], Iterable[int]]) -> Expectation:
    """Expect messages only between a rank and its neighbours, and no collectives.

    `neighbours(case, rank)`: the global numbers of the ranks with which `rank` may exchange
    messages.
    """

    def test(case: Case, rank: int, trace: Trace) -> None:
        allowed = set(neighbours(case, rank))
        strangers = [
            e
            for e in operations(trace, rank)
            if e.kind not in ("send", "recv") or e.peer not in allowed
        ]
        if strangers:
            names = names_inside(sorted(allowed)) if allowed else "nobody"
            raise Wrong(
                f"rank {rank} may exchange messages only with {names}, but calls "
                f"{in_words(strangers)}"
            )

    return _each_rank(test)


def time_within(
    seconds: Callable[[Case, Network], float],
    *,
    rel: float = 0.005,
    hint: str = "",
) -> Expectation:
    """Expect the case to take at most the time of a formula on the virtual clock.

    A difference of half a percent does not count: 44.06 µs is within 44.03 µs. The reason is that
    the bytes of a few numbers take a thousandth of a message's latency, so the time depends
    slightly on which chunk is longer by one number. One message too many costs several percent in
    every case. Too many bytes cost as much only in a case with many numbers, so a check of time
    needs such a case.

    Args:
        seconds: ``seconds(case, network)``, in virtual seconds.
        rel: allowed relative error, for formulas that need a different one.
        hint: the hint if the ranks need more time.

    """

    def run(case: Case, observed: Observed, trace: Trace) -> None:
        if observed.network is None:
            return
        allowed, took = seconds(case, observed.network), trace.makespan
        if took > allowed * (1 + rel):
            unit, scale = unit_of(max(allowed, took))
            last = max(trace.operations, key=lambda event: event.end, default=None)
            end = (
                ""
                if last is None
                else f". The last operation to end is on rank {last.rank}: {in_words([last])}"
            )
            needed, most = numbers_apart(took * scale, allowed * scale, 4)
            raise Wrong(
                f"the ranks need {needed} {unit}, expected at most {most} {unit}{end}",
                hint,
            )

    return Expectation(run)


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

    def run(case: Case, observed: Observed, trace: Trace) -> None:
        if observed.network is None:
            return
        for rank in range(case.world_size):
            busy = computations(trace, rank)

            def computed(until: float, busy: Sequence[Event] = busy) -> float:
                return sum(max(0.0, min(e.end, until) - e.start) for e in busy)

            events = operations(trace, rank, kinds)
            for event, (least, most) in zip(events, bounds(case, observed, rank), strict=False):
                early, late = computed(event.start), computed(event.end)
                short, error = early < least - 1e-9 - 1e-6 * least, 1e-9 + 1e-6 * most
                if not short and late <= most + error:
                    continue
                unit, scale = unit_of(max(early, late, least))
                when, had, need = (
                    ("is launched after", early, f"at least {scale * least:.4g}")
                    if short
                    else ("ends after", late, f"at most {scale * most:.4g}")
                )
                raise Wrong(
                    f"rank {rank}: {name_of(event)} {when} {scale * had:.4g} {unit} of "
                    f"computation, expected {need} {unit}",
                    "In this check's program, computation comes before the communication that "
                    "needs it, and waits for what it needs. Leave compute() as it is.",
                )

    return Expectation(run, part=part)


def overlaps(kind: str, fraction: float) -> Expectation:
    """Expect each rank to compute during at least this fraction of its time in `kind`.

    This is checked only on a virtual clock, for computation that the program declares (`compute`).
    """

    def run(case: Case, observed: Observed, trace: Trace) -> None:
        if observed.network is None:
            return
        for rank in range(case.world_size):
            events, busy = operations(trace, rank, [kind]), computations(trace, rank)
            total = sum(e.end - e.start for e in events)
            hidden = sum(
                max(0.0, min(e.end, c.end) - max(e.start, c.start)) for e in events for c in busy
            )
            if hidden < fraction * total * (1 - 1e-9):
                raise Wrong(
                    f"rank {rank} computes during {100 * hidden / total:.0f} % of its time in "
                    f"{kind}, expected at least {100 * fraction:.0f} %: {in_words(events)}"
                )

    return Expectation(run)


# What ranks send and receive --------------------------------------------------------------------

_SAID = 4


def operations(trace: Trace, rank: int, kinds: Iterable[str] | None = None) -> list[Event]:
    """Return the rank's operations in the order of their launch; if given, only of these kinds."""
    wanted = None if kinds is None else set(kinds)
    return [
        event
        for event in trace.operations
        if event.rank == rank and (wanted is None or event.kind in wanted)
    ]


def computations(trace: Trace, rank: int) -> list[Event]:
    """Return the times in which the rank computes, in their order."""
    return [event for event in trace.events if (event.rank, event.kind) == (rank, "compute")]


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
        f"{len(sizes)} × {_in_words(*named, sizes)}"
        for named, sizes in list(groups.items())[:_SAID]
    ]
    if rest := sum(map(len, list(groups.values())[_SAID:])):
        lines.append(f"{counted(rest, 'more operation')}")
    return "; ".join(lines) or "nothing"


def name_of(event: Event) -> str:
    """Return one operation in words: what, to whom, its bytes, on which line."""
    return _in_words(event.kind, event.peer, event.where, [event.bytes])


def _in_words(kind: str, peer: int | None, where: str, sizes: Sequence[int]) -> str:
    size = format_bytes(min(sizes))
    if max(sizes) > min(sizes):
        size += f" to {format_bytes(max(sizes))}"
    named = {"send": f" to rank {peer}", "recv": f" from rank {peer}"}
    whom = "" if peer is None else named.get(kind, f" with root {peer}")
    return f"{kind}{whom}, {size}" + (f" ({where})" if where else "")
