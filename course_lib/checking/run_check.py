"""Run a check's cases on any kind of ranks, and explain the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

from course_lib.checking.cases import (
    AuthorError,
    Case,
    Check,
    Observed,
    Wrong,
    case_generator,
)
from course_lib.checking.causes import agreed, cause_of, difficulty_of, in_common
from course_lib.checking.judging import MAX_REASON, Judged, cut, judge_case, reason_of
from course_lib.checking.limits import MAX_DETAIL, MAX_TIMEOUTS
from course_lib.checking.report import CaseResult, CheckReport
from course_lib.ranks import Trace
from course_lib.ranks.explain.errors import RankError, RanksError, RankTimeout, format_states
from course_lib.ranks.wire import NotPlainError, Plain

Runner = Callable[[Check, Case, Sequence[Plain]], Observed | list[Any]]
"""Runs a case's program on its ranks. It returns what was observed, or only a list with one output
per rank. Or it raises `RanksError`; the error's `trace` attribute may hold what was recorded until
then."""

MORE_SEEDS = 2
"""If a single case fails, and its error is near the allowed one, it is tried with so many more
seeds before it costs a point: a right answer may be refused by chance once, but not again."""
_FAR = Wrong("")


def run_on_each(
    name: str,
    check: Check,
    runners: Mapping[str, Runner],
    *,
    seed: str,
    hidden: Iterable[Case] = (),
    progress: Callable[[CaseResult], None] = lambda _: None,
) -> CheckReport:
    """Run a check on one kind of ranks after the other, until it fails; return the last report.

    Args:
        name: see `run_check`, as for the other arguments.
        check: the check.
        runners: the kind of ranks in words, for the report → runs one case on such ranks.
        seed: the inputs are drawn from it.
        hidden: further cases.
        progress: called after every case.

    """
    places: tuple[str, ...] = ()
    for place, run in runners.items():
        report = run_check(name, check, run, seed=seed, hidden=hidden, progress=progress)
        # A function that fails only on these ranks failed there, so name only these ranks.
        places = (*places, place) if report.passed else (place,)
        if not report.passed:
            break
    return replace(report, places=tuple(filter(None, places)))


def run_check(
    name: str,
    check: Check,
    run: Runner,
    *,
    seed: str,
    hidden: Iterable[Case] = (),
    progress: Callable[[CaseResult], None] = lambda _: None,
) -> CheckReport:
    """Run the check's public cases, then the hidden ones, and return the report.

    Args:
        name: ``assignment/check``, for the report and the random numbers.
        check: the check.
        run: runs one case on its ranks.
        seed: the inputs are drawn from it; the same seed draws the same inputs.
        hidden: further cases, whose inputs and names stay out of the report's text.
        progress: called with the result after every case, before a case is tried with more seeds;
            see `MORE_SEEDS`. This result names no known mistake yet,
            because the mistake is chosen only after all cases have run.

    Raises:
        AuthorError: the inputs of a case could not be drawn.

    """
    results: list[CaseResult] = []
    findings: dict[int, Wrong] = {}
    traces: list[tuple[CaseResult, Trace]] = []
    timeouts = 0
    cases = [(case, False) for case in check.cases] + [(case, True) for case in hidden]
    for case, is_hidden in cases:
        if timeouts >= MAX_TIMEOUTS:
            reason = f"not run, because {timeouts} earlier cases took longer than their limit"
            lost = dict.fromkeys(case.decides or check.worth, False)
            result = CaseResult(case.name, False, reason, "", 0.0, is_hidden, lost, ran=False)
        else:
            examined = _examine(name, check, case, run, seed, results, is_hidden)
            result, trace = examined.result, examined.trace
            timeouts += examined.timed_out
            if examined.finding is not None:
                findings[len(results)] = examined.finding
            if not result.passed and not is_hidden and trace is not None and trace.makespan > 0:
                traces.append((result, trace))
        results.append(result)
        progress(result)
    failed_alone = [index for index, result in enumerate(results) if not result.passed]
    if len(failed_alone) == 1 and findings.get(failed_alone[0], _FAR).near:
        (index,) = failed_alone
        case, is_hidden = cases[index]
        tried = [
            _examine(name, check, case, run, f"{seed}, again {n}", results, is_hidden).result
            for n in range(MORE_SEEDS)
        ]
        if all(result.passed for result in tried):
            results[index] = tried[0]
            findings.clear()
            traces.clear()
    passed_cases = [case for i, (case, _) in enumerate(cases) if results[i].passed]
    refuted = _refuted(name, check, seed, passed_cases, findings)
    for is_hidden in (False, True):
        indices = [index for index in findings if results[index].hidden == is_hidden]
        hints = agreed([findings[i] for i in indices], refuted)
        for index, hint in zip(indices, hints, strict=True):
            results[index] = replace(results[index], reason=reason_of(findings[index], hint))
    ran = [(i, case) for i, case in enumerate(check.cases) if results[i].ran]
    failed, passed = ([ic for ic in ran if results[ic[0]].passed == good] for good in (False, True))
    # If every case names a known mistake, other common properties of the cases may be chance.
    named = all(i in findings and _is_named(findings[i], refuted) for i, _ in failed)
    common = "" if named else in_common([case for _, case in failed], [case for _, case in passed])
    options: dict[str, Any] = {"function": check.function, "common": common}
    report = CheckReport(name, tuple(results), check.worth, **options)
    if not traces:
        return report
    shown, trace = min(traces, key=lambda each: tuple(each[0].difficulty))
    return replace(report, trace=trace, traced=shown.name)


def _refuted(
    name: str, check: Check, seed: str, passed: Sequence[Case], findings: Mapping[int, Wrong]
) -> set[str]:
    """Return the named mistakes that cannot be, because some passed cases would have failed."""
    fit = [words for each in findings.values() for words, hint in each.known.items() if hint]
    causes = set(map(cause_of, fit))
    if not causes:
        return set()
    return {
        cause
        for case in passed
        for cause in check.refutes(case, _drawn(name, check, case, seed), causes)
    }


def _drawn(name: str, check: Check, case: Case, seed: str) -> Sequence[Plain]:
    try:
        return check.inputs(case, case_generator(seed, name, case))
    except Exception as error:
        raise AuthorError(
            f"{name}: the inputs of the case {case.name!r} could not be made"
        ) from error


def _is_named(wrong: Wrong, refuted: set[str]) -> bool:
    return any(hint and cause_of(words) not in refuted for words, hint in wrong.known.items())


@dataclass
class _Examined:
    """One case that was run.

    Attributes:
        result: its result, without a known mistake.
        finding: what is wrong with its values or its communication.
        trace: what was recorded.
        timed_out: whether it took longer than its limit.

    """

    result: CaseResult
    finding: Wrong | None = None
    trace: Trace | None = None
    timed_out: bool = False


def _examine(
    name: str,
    check: Check,
    case: Case,
    run: Runner,
    seed: str,
    earlier: Sequence[CaseResult],
    hidden: bool,
) -> _Examined:
    """Run, judge and explain one case."""
    draw = partial(_drawn, name, check, case, seed)
    inputs, start = draw(), time.monotonic()
    trace, error, judged, reason, cost = None, None, Judged(), "", dict[str, float]()
    try:
        observed = run(check, case, inputs)
        if not isinstance(observed, Observed):
            observed = Observed(observed)
        trace = observed.trace
        if trace is not None and observed.network is not None:
            cost = _cost(trace)
        judged = judge_case(check, case, draw, observed, earlier)
    except RanksError as failed:
        error, trace = failed, failed.trace
        if hint := _copies(case, error):
            error.add_detail(hint)
    except NotPlainError as refused:
        reason = str(refused)
    detail = summary = expected = got = ""
    if (wrong := judged.wrong) is not None:
        reason = reason_of(wrong, wrong.otherwise)
        detail, expected, got = wrong.detail, wrong.expected, wrong.got
    elif error is not None and _not_written(error):
        reason = f"not written yet: NotImplementedError{f' ({error.where})' if error.where else ''}"
    elif error is not None:
        reason, detail, summary = _in_one_line(error), _explanation(error), error.summary
    at_stake = case.decides or tuple(check.worth)
    result = CaseResult(
        case.name,
        not reason,
        cut(reason, MAX_REASON),
        cut(detail, MAX_DETAIL),
        time.monotonic() - start,
        hidden,
        {part: not reason or part in judged.granted for part in at_stake},
        in_short=error.in_short if error is not None else case.in_short,
        limit=error.limit if error is not None else "",
        trouble=judged.trouble,
        summary=cut(summary, MAX_REASON),
        expected=cut(expected, MAX_REASON),
        got=cut(got, MAX_REASON),
        difficulty=difficulty_of(case, inputs, next(iter(check.cases), case)),
        cost=cost,
    )
    return _Examined(result, wrong, trace, isinstance(error, RankTimeout))


def _cost(trace: Trace) -> dict[str, float]:
    ranks = range(trace.world_size)
    computed = [
        sum(e.end - e.start for e in trace.events if (e.rank, e.kind) == (rank, "compute"))
        for rank in ranks
    ]
    return {
        "seconds": trace.makespan,
        "computed": max(computed),
        "sent": max(trace.bytes_sent(rank) for rank in ranks),
        "rounds": sum(event.rank == 0 for event in trace.operations),
    }


def _not_written(error: RanksError) -> TypeGuard[RankError]:
    """Return whether the cell is as handed out: it raises this exception without a message."""
    return (
        isinstance(error, RankError)
        and error.kind == NotImplementedError.__name__
        and not error.message
    )


def _in_one_line(error: RanksError) -> str:
    """Return the error in one line; if no rank failed, with what the ranks wait for."""
    waiting = [
        f"Rank {s.rank} {s.doing}" for s in error.states if s.seconds is not None and not s.running
    ]
    if isinstance(error, RankError) or not waiting:
        return error.summary
    return f"{error.summary} {'. '.join(waiting)}."


def _copies(case: Case, error: RanksError) -> str:
    """Return what to know about tensors of this layout, if PyTorch may have refused a view."""
    layout = case.form.layout
    if layout not in case.name or getattr(error, "kind", "") != RuntimeError.__name__:
        return ""
    return (
        f"The tensors of this case are {layout}: .view fails; .reshape works, and makes a copy. To "
        "change such a tensor in place, write the result back with tensor.copy_."
    )


def _explanation(error: RanksError) -> str:
    return "\n\n".join(part for part in (format_states(error.states), error.detail) if part)
