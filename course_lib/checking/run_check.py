"""Run a check's cases on any kind of ranks, judge each of them, and explain the results.

A case is judged by its handles, then its values, then its communication. This looks at values and
at the trace, and runs nothing of a student. So it is the same for all kinds of ranks.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeGuard

import torch

from course_lib.checking.cases import (
    COMMUNICATION,
    VALUES,
    AuthorError,
    Case,
    Check,
    Observed,
    Wrong,
    case_generator,
)
from course_lib.checking.causes import agreed, cause_of, difficulty_of, in_common
from course_lib.checking.expectations import after_the_barrier, name_of
from course_lib.checking.report import CaseResult, CheckReport
from course_lib.limits import MAX_DETAIL, MAX_EMPTY, MAX_TIMEOUTS
from course_lib.ranks import Trace
from course_lib.ranks.explain.errors import RankError, RanksError, RankTimeout, format_states
from course_lib.ranks.trace.timeline import unit_of
from course_lib.ranks.wire import NotPlainError, Plain

Runner = Callable[[Check, Case, Sequence[Plain]], Observed]
"""Runs a case's program on its ranks, and returns what was observed. Or it raises `RanksError`; the
error's `trace` attribute may hold what was recorded until then."""

MORE_SEEDS = 2
"""If a single case fails, and its error is near the allowed one, it is tried with so many more
seeds before it costs a point: a right answer may be refused by chance once, but not again."""
_FAR = Wrong("")
MAX_REASON = 2000
"""Characters of a reason, which may contain a value that a student's function returned."""
_KEPT = "Each of the two calls is right alone, but something is kept from the call before."
_PROGRAMS_OWN = (
    "This computation is in the check's own program, which calls your function: do not skip or "
    "shorten it."
)


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
            results[index] = replace(results[index], reason=_reason_of(findings[index], hint))
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
    trace, error, judged, reason, cost = None, None, _Judged(), "", dict[str, float]()
    try:
        observed = run(check, case, inputs)
        trace = observed.trace
        if trace is not None and observed.network is not None:
            cost = _cost(trace)
        judged = _judge(check, case, draw, observed, earlier)
    except RanksError as failed:
        error, trace = failed, failed.trace
        if hint := _copies(case, error):
            error.add_detail(hint)
    except NotPlainError as refused:
        reason = str(refused)
    detail = summary = ""
    if (wrong := judged.wrong) is not None:
        reason = _reason_of(wrong, wrong.otherwise)
        detail = wrong.detail
    elif error is not None and _not_written(error):
        reason = f"not written yet: NotImplementedError{f' ({error.where})' if error.where else ''}"
    elif error is not None:
        reason, detail, summary = _in_one_line(error), _explanation(error), error.summary
    at_stake = case.decides or tuple(check.worth)
    result = CaseResult(
        case.name,
        not reason,
        _cut(reason, MAX_REASON),
        _cut(detail, MAX_DETAIL),
        time.monotonic() - start,
        hidden,
        {part: not reason or part in judged.granted for part in at_stake},
        in_short=error.in_short if error is not None else case.in_short,
        limit=error.limit if error is not None else "",
        trouble=judged.trouble,
        summary=_cut(summary, MAX_REASON),
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


# Judging one case -----------------------------------------------------------------------------


@dataclass
class _Judged:
    """The findings of the judges and the expectations in one case.

    Attributes:
        wrong: the finding; ``None`` if nothing is wrong.
        granted: the parts of the points that the case grants although something is wrong.
        trouble: for the author: the traceback of an unexpected exception in the check; else empty.

    """

    wrong: Wrong | None = None
    granted: set[str] = field(default_factory=set)
    trouble: str = ""


def _judge(
    check: Check,
    case: Case,
    draw: Callable[[], Sequence[Plain]],
    observed: Observed,
    earlier: Sequence[CaseResult] = (),
) -> _Judged:
    """Judge one case.

    Communication counts only if the values are right: a function that sends nothing must not earn
    points for that.

    Args:
        check: the check.
        case: the case.
        draw: draws the inputs. They are drawn anew, because a program on the ranks may have changed
            those that it got.
        observed: what the ranks returned and sent.
        earlier: the results of earlier cases, for the hints.

    """
    judged = _Judged()
    try:
        _judge_handles(observed)
        _judge_values(check, case, draw(), observed, earlier, judged)
        findings = _judge_communication(check, case, draw, observed, earlier, judged)
    except Wrong as wrong:
        judged.wrong = wrong
        return judged
    judged.granted = {VALUES, COMMUNICATION, *check.worth} - findings.keys()
    if findings:
        judged.wrong = _together(list(findings.values()))
    return judged


def _judge_handles(observed: Observed) -> None:
    if observed.trace is not None:
        _expect_all_waited_for(observed.trace)
    if observed.touched:
        raise Wrong(
            observed.touched[0].rstrip("."),
            "Use the tensors only after .wait() has returned. Until then the transfer may "
            "still be running: you may read old values, or your write may change what is sent.",
        )


def _judge_values(
    check: Check,
    case: Case,
    inputs: Sequence[Plain],
    observed: Observed,
    earlier: Sequence[CaseResult],
    judged: _Judged,
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # oracles are small: more threads would only wait for each other
    try:
        check.judge(case, inputs, observed.outputs)
    except Wrong as wrong:
        hint = _outside_the_group(case, observed.trace)
        if case.after is not None:
            hint = _KEPT if _right_alone(case, earlier) else ""
        raise wrong.besides(hint) from None
    except (OSError, MemoryError):  # not caused by an answer
        raise
    except Exception:
        judged.trouble = traceback.format_exc()
        raise Wrong(
            "the answer has a form that this check does not expect",
            "Compare the types and shapes that your function returns with those of the task.",
        ) from None
    finally:
        torch.set_num_threads(threads)


def _judge_communication(
    check: Check,
    case: Case,
    draw: Callable[[], Sequence[Plain]],
    observed: Observed,
    earlier: Sequence[CaseResult],
    judged: _Judged,
) -> dict[str, Wrong]:
    """Return part of the points → its first finding."""
    findings: dict[str, Wrong] = {}
    if observed.trace is None:
        return findings
    trace: Trace | None = observed.trace
    if check.computes is not None and observed.network:
        missing = _computed_too_little(check.computes, draw(), observed.trace)
        if missing:
            raise Wrong(missing, _fails_before(case, earlier) or _PROGRAMS_OWN)
    _expect_few_empty(observed.trace)
    if case.after is not None:
        trace = after_the_barrier(observed.trace)
        # The ranks leave the barrier one after the other, so a formula does not give the time.
        observed = replace(observed, network=None)
    if trace is None:
        return findings
    if outside := _outside_the_group(case, trace):
        findings[COMMUNICATION] = Wrong(outside)
    for expectation in check.expects:
        try:
            expectation.test(case, observed, trace)
        except Wrong as wrong:
            findings.setdefault(expectation.part, wrong)
        except Exception:
            judged.trouble = traceback.format_exc()
            words = "the messages have a form that this check does not expect"
            findings.setdefault(expectation.part, Wrong(words))
    return findings


def _together(findings: Sequence[Wrong]) -> Wrong:
    """Return one finding that contains all of them."""
    first, *others = findings
    also = [f"Also: {_reason_of(other, other.hint).rstrip('.')}." for other in others]
    hint = " ".join([each for each in (first.hint, *also) if each])
    return Wrong(first.message, hint, first.detail)


def _reason_of(wrong: Wrong, hint: str) -> str:
    """Return a finding and a hint in one line."""
    return _cut(f"{wrong.message}. {hint}" if hint else wrong.message, MAX_REASON)


def _cut(text: str, most: int) -> str:
    """Return the text, or its beginning if it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[:most]} …"


def _right_alone(case: Case, results: Iterable[CaseResult]) -> bool:
    """Return whether both calls of a case with an earlier call have passed as separate cases.

    `task` names such a case after its two calls: ``3 ranks, after ‘2 ranks’``.
    """
    if case.after is None:
        return False
    alone = {case.after.name, case.name.removesuffix(f", after ‘{case.after.name}’")}
    return alone <= {result.name for result in results if result.passed}


def _fails_before(case: Case, results: Iterable[CaseResult]) -> str:
    """Return a hint if the earlier call of a case has failed as a separate case, else nothing."""
    before = case.after.name if case.after is not None else None
    if not any(result.name == before and not result.passed for result in results):
        return ""
    return (
        f"The call before this one, ‘{before}’, also fails as a case of its own: look there first."
    )


def _expect_few_empty(trace: Trace) -> None:
    empty = Counter(event.rank for event in trace.operations if event.bytes == 0)
    for rank, number in sorted(empty.items()):
        if number > MAX_EMPTY:
            raise Wrong(
                f"rank {rank} takes part in {number} operations that carry nothing; the limit is "
                f"{MAX_EMPTY} for each rank in a case",
                "Empty messages and barriers must not be used to pass on information.",
            )


def _computed_too_little(
    computes: Callable[[Any], Mapping[float, int]], inputs: Sequence[Plain], trace: Trace
) -> str:
    """Return what is wrong if a rank computed less than the check's program makes it compute."""
    for rank, own in enumerate(inputs):
        expected = sum(seconds * times for seconds, times in computes(own).items())
        events = [e for e in trace.events if e.rank == rank and e.kind == "compute"]
        if (spent := sum(e.end - e.start for e in events)) < expected * (1 - 1e-6):
            unit, scale = unit_of(expected)
            return (
                f"rank {rank} computes for only {scale * spent:.4g} of the {scale * expected:.4g} "
                f"{unit} of computation in this check's program"
            )
    return ""


def _outside_the_group(case: Case, trace: Trace | None) -> str:
    """Return what is wrong if a rank communicates with ranks of other groups, else nothing."""
    for event in trace.operations if trace is not None and case.form.groups else ():
        group = case.members(event.rank)
        if event.kind not in ("send", "recv") and not set(event.group) <= set(group):
            return (
                f"Rank {event.rank} communicates with ranks {', '.join(map(str, event.group))} in "
                f"{name_of(event)}. Only ranks {', '.join(map(str, group))} are in its group: "
                "pass group=group to every call."
            )
    return ""


def _expect_all_waited_for(trace: Trace) -> None:
    for event in trace.operations:
        if not event.waited:
            raise Wrong(
                f"rank {event.rank} never waits for the handle of {name_of(event)}",
                "With async_op=True, or isend and irecv, a call returns at once and its tensors "
                "are not ready: keep the handle, and call .wait() before you use them.",
            )
