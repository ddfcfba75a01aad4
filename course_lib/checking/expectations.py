"""Expectations: demands on a case's communication and memory, as data.

Each function makes one `Expectation`, for `Check.expects`. A limit is a number, or a function of
the case and the rank. The message of a failing expectation says what was expected, what was sent
instead, by which rank to which rank, and on which line. If nothing was recorded, nothing is
checked. Expectations about time are checked only on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from course_lib.checking.cases import COMMUNICATION, Case, Expectation, Observed, Wrong
from course_lib.checking.compare import numbers_apart
from course_lib.checking.traffic import in_words, name_of, operations, received, sent
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
    """Expect a rank to send at most this many bytes; see `traffic` for how they are counted.

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


def calls(**counts: int | Callable[[Case, int], int]) -> Expectation:
    """Expect a rank to call each named operation exactly this often: ``calls(all_reduce=1)``."""

    def test(case: Case, rank: int, trace: Trace) -> None:
        for kind, wanted in counts.items():
            events, number = operations(trace, rank, [kind]), _limit(wanted, case, rank)
            if len(events) != number:
                raise Wrong(
                    f"rank {rank} calls {kind} {counted(len(events), 'time')}, expected {number}. "
                    f"It calls: {in_words(events or operations(trace, rank))}"
                )

    return _each_rank(test)


def calls_at_most(hint: str = "", /, **counts: int | Callable[[Case, int], int]) -> Expectation:
    """Expect a rank to call each named operation at most this often."""

    def test(case: Case, rank: int, trace: Trace) -> None:
        for kind, wanted in counts.items():
            events, number = operations(trace, rank, [kind]), _limit(wanted, case, rank)
            if len(events) > number:
                raise Wrong(
                    f"rank {rank} calls {kind} {counted(len(events), 'time')}, expected at most "
                    f"{number}. It calls: {in_words(events)}",
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
    exactly: bool = False,
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
        exactly: whether less time is also wrong.
        hint: the hint if the ranks need more time.

    """

    def run(case: Case, observed: Observed, trace: Trace) -> None:
        if observed.network is None:
            return
        allowed, took = seconds(case, observed.network), trace.makespan
        if took > allowed * (1 + rel) or (exactly and took < allowed * (1 - rel)):
            unit, scale = unit_of(max(allowed, took))
            bound = "" if exactly else "at most "
            last = max(trace.operations, key=lambda event: event.end, default=None)
            end = (
                ""
                if last is None
                else f". The last operation to end is on rank {last.rank}: {in_words([last])}"
            )
            needed, most = numbers_apart(took * scale, allowed * scale, 4)
            raise Wrong(
                f"the ranks need {needed} {unit}, expected {bound}{most} {unit}{end}",
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
            busy = [e for e in trace.events if e.rank == rank and e.kind == "compute"]

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
            events = operations(trace, rank, [kind])
            busy = [e for e in trace.events if e.rank == rank and e.kind == "compute"]
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
