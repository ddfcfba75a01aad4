"""Run a check's cases on any kind of ranks, judge each of them, and explain the results.

A case is judged by its handles, then its values, then its communication. This looks at values and
at the trace, and runs nothing of a student. So it is the same for all kinds of ranks.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from course_lib.checking.cases import (
    COMMUNICATION,
    VALUES,
    AuthorError,
    Case,
    Check,
    Form,
    Observed,
    Wrong,
    case_generator,
)
from course_lib.checking.communication import after_the_barrier, computed, name_of
from course_lib.checking.report import CaseResult, CheckReport
from course_lib.limits import MAX_DETAIL, MAX_EMPTY, MAX_TIMEOUTS
from course_lib.ranks import Trace
from course_lib.ranks.explain.errors import RankError, RanksError, RankTimeout, format_states
from course_lib.ranks.trace.timeline import unit_of
from course_lib.ranks.wire import NotPlainError, Plain

Runner = Callable[[Check, Case, Sequence[Plain]], Observed]
"""Runs a case's program on its ranks, and returns what was observed. Or it raises `RanksError`; the
error's `trace` attribute may hold what was recorded until then."""

MAX_REASON = 2000
"""Characters of a reason, which may contain a value that a student's function returned."""
_NOT_WRITTEN = ("NotImplementedError", "")
"""Kind and message of the exception that a cell raises as it is handed out."""
_KEPT = "This call is right alone, but something is kept from the call before."
_SIMPLER = {
    "iterable": "With a list in place of a {iterable}, the same case passes: a second loop over a "
    "generator finds nothing.",
    "layout": "With contiguous tensors, the same case passes. These are {layout}: .view fails, and "
    ".flatten(), .reshape() and .contiguous() make a copy; what goes into a copy does not reach "
    "the tensor. Write the result back with tensor.copy_.",
    "groups": "In one group of all ranks, the same case passes: pass group=group to every call, "
    "and take ranks and world size from the group.",
    "dtype": "In float32, the same case passes.",
    "training": "With the model in training mode, the same case passes.",
}
"""Part of a case's form → what to say if the case passes only with the plain `Form`'s part."""


def run_on_each(
    name: str,
    check: Check,
    runners: Mapping[str, Runner],
    *,
    seed: str,
    hidden: Iterable[Case] = (),
) -> CheckReport:
    """Run a check on one kind of ranks after the other, until it fails; return the last report.

    Args:
        name: see `run_check`, as for the other arguments.
        check: the check.
        runners: the kind of ranks in words, for the report → runs one case on such ranks.
        seed: the inputs are drawn from it.
        hidden: further cases.

    """
    places: tuple[str, ...] = ()
    for place, run in runners.items():
        report = run_check(name, check, run, seed=seed, hidden=hidden)
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
    explain: bool = True,
) -> CheckReport:
    """Run the check's public cases, then the hidden ones, and return the report.

    Args:
        name: ``assignment/check``, for the report and the random numbers.
        check: the check.
        run: runs one case on its ranks.
        seed: the inputs are drawn from it; the same seed draws the same inputs.
        hidden: further cases, whose inputs and names stay out of the report's text.
        explain: if the simplest case that failed is not plain, run it again without what is
            special, one by one, and say what made it fail.

    Raises:
        AuthorError: the inputs of a case could not be drawn, or cannot be sent.

    """
    examine = partial(_examine, name, check, run)
    examined: list[_Examined] = []
    for case, is_hidden in [*((c, False) for c in check.cases), *((c, True) for c in hidden)]:
        timeouts = sum(isinstance(trial.error, RankTimeout) for trial in examined)
        if timeouts >= MAX_TIMEOUTS:
            reason = f"not run, because {timeouts} earlier cases took longer than their limit"
            lost = dict.fromkeys(case.decides or check.worth, False)
            result = CaseResult(case.name, False, reason, "", 0.0, is_hidden, lost, ran=False)
            examined.append(_Examined(case, result))
        else:
            examined.append(examine(case, seed, is_hidden))
    for is_hidden in (False, True):
        refused = [t for t in examined if t.finding and t.result.hidden == is_hidden]
        hints = agreed([trial.finding for trial in refused if trial.finding])
        for trial, hint in zip(refused, hints, strict=True):
            assert trial.finding is not None
            trial.result = replace(trial.result, reason=_reason_of(trial.finding, hint))
    failed = [t for t in examined if t.result.ran and not (t.result.hidden or t.result.passed)]
    if explain and check.drawn is not None:
        _explain(examine, seed, failed)
    # With `only_on`, the messages are the check's own: no student has sent one.
    shown = min(
        [t for t in failed if t.trace is not None and t.trace.makespan > 0 and not check.only_on],
        key=lambda trial: trial.case.difficulty,
        default=None,
    )
    return CheckReport(
        name,
        tuple(trial.result for trial in examined),
        check.worth,
        trace=shown.trace if shown is not None else None,
        traced=shown.case.name if shown is not None else "",
        function=check.function,
    )


def _explain(examine: Callable[..., _Examined], seed: str, failed: list[_Examined]) -> None:
    """Find out by trial which special thing makes the simplest failed case fail, and say so."""
    simplest = min(failed, key=lambda trial: trial.case.difficulty, default=None)
    if simplest is None or isinstance(simplest.error, RankTimeout):
        return
    case = simplest.case
    simpler = [(replace(case, after=None), _KEPT)] if case.after is not None else []
    simpler += [
        (replace(case, form=replace(case.form, **{part: getattr(Form(), part)})), sentence)
        for part, sentence in _SIMPLER.items()
        if getattr(case.form, part) != getattr(Form(), part)
    ]
    passing = (sentence for case, sentence in simpler if examine(case, seed).result.passed)
    if sentence := next(passing, "").format(**vars(case.form)):
        reason = f"{simplest.result.reason.rstrip('. ')}. {sentence}"
        simplest.result = replace(simplest.result, reason=_cut(reason, MAX_REASON))


def agreed(findings: Sequence[Wrong]) -> list[str]:
    """Return the hint of each failing case, so that no two hints contradict each other.

    In a single case, a known mistake may fit by chance. So a mistake is named only if it explains
    all the cases that it could explain. If two mistakes may be named, the one that explains more
    cases is.
    """
    could = Counter(mistake for finding in findings for mistake in finding.mistakes)
    explains = Counter(m for finding in findings for m, hint in finding.mistakes.items() if hint)
    hints = []
    for finding in findings:
        sure = [m for m, hint in finding.mistakes.items() if hint and explains[m] == could[m]]
        best = max(sure, key=lambda mistake: explains[mistake], default="")
        hints.append(finding.mistakes[best] if best else finding.otherwise)
    return hints


def _drawn(name: str, check: Check, case: Case, seed: str) -> Sequence[Plain]:
    try:
        return check.inputs(case, case_generator(seed, name, case))
    except Exception as error:
        raise AuthorError(
            f"{name}: the inputs of the case {case.name!r} could not be made"
        ) from error


@dataclass
class _Examined:
    """One case, and what was found out about it.

    Attributes:
        case: the case.
        result: its result; it names a known mistake only after all cases have run.
        trace: what was recorded.
        error: why the ranks did not run to their end; else ``None``.
        finding: what is wrong with its values or its communication; else ``None``.

    """

    case: Case
    result: CaseResult
    trace: Trace | None = None
    error: RanksError | None = None
    finding: Wrong | None = None


def _examine(
    name: str, check: Check, run: Runner, case: Case, seed: str, is_hidden: bool = False
) -> _Examined:
    """Run, judge and explain one case."""
    draw = partial(_drawn, name, check, case, seed)
    inputs, start = draw(), time.monotonic()
    check.prepare(case, inputs)
    findings, error, cost = dict[str, Wrong](), None, dict[str, float]()
    try:
        observed = replace(run(check, case, inputs), inputs=draw())
        trace = observed.trace
        if trace is not None and observed.network is not None:
            cost = _cost(trace)
        findings = _judge(check, case, observed)
    except RanksError as failed:
        error, trace = failed, failed.trace
    except NotPlainError as refused:
        raise AuthorError(f"{name}: the inputs of the case {case.name!r}: {refused}") from refused
    finding, reason, detail, summary = _together(list(dict.fromkeys(findings.values()))), "", "", ""
    if finding is not None:
        reason, detail = _reason_of(finding, finding.otherwise), finding.detail
    elif isinstance(error, RankError) and (error.kind, error.message) == _NOT_WRITTEN:
        reason = f"not written yet: NotImplementedError{f' ({error.where})' if error.where else ''}"
    elif error is not None:
        reason, summary = _in_one_line(error), error.summary
        detail = "\n\n".join(filter(None, [format_states(error.states), error.detail]))
    result = CaseResult(
        case.name,
        not reason,
        _cut(reason, MAX_REASON),
        _cut(detail, MAX_DETAIL),
        time.monotonic() - start,
        is_hidden,
        {part: error is None and part not in findings for part in case.decides or check.worth},
        in_short=case.in_short if error is None else error.in_short,
        trouble=next(filter(None, map(_trouble_of, findings.values())), ""),
        summary=_cut(summary, MAX_REASON),
        difficulty=case.difficulty,
        cost=cost,
    )
    return _Examined(case, result, trace, error, finding)


def _cost(trace: Trace) -> dict[str, float]:
    ranks = range(trace.world_size)
    return {
        "seconds": trace.makespan,
        "computed": max(computed(trace, rank) for rank in ranks),
        "sent": max(trace.bytes_sent(rank) for rank in ranks),
        "rounds": sum(event.rank == 0 for event in trace.operations),
    }


def _in_one_line(error: RanksError) -> str:
    """Return the error in one line; if no rank failed, with what the ranks wait for."""
    waiting = [
        f"Rank {s.rank} {s.doing}" for s in error.states if s.seconds is not None and not s.running
    ]
    if isinstance(error, RankError) or not waiting:
        return error.summary
    return f"{error.summary} {'. '.join(waiting)}."


# Judging one case -----------------------------------------------------------------------------


def _judge(check: Check, case: Case, observed: Observed) -> dict[str, Wrong]:
    """Judge one case; return part of the points → its first finding.

    Communication counts only if the values are right: a function that sends nothing must not earn
    points for that.

    Args:
        check: the check.
        case: the case.
        observed: what the ranks returned and sent. Its inputs were drawn anew, because a program
            on the ranks may have changed those that it got.

    """
    trace = observed.trace
    try:
        if trace is not None:
            _expect_all_waited_for(trace)
        if observed.touched:
            raise Wrong(
                observed.touched[0].rstrip("."),
                "Use the tensors only after .wait() has returned. Until then the transfer may "
                "still be running: you may read old values, or your write may change what is sent.",
            )
        _judge_values(check, case, observed)
        return {} if trace is None else _judge_communication(check, case, observed, trace)
    except Wrong as finding:
        return dict.fromkeys([VALUES, COMMUNICATION, *check.worth], finding)


def _judge_values(check: Check, case: Case, observed: Observed) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # oracles are small: more threads would only wait for each other
    try:
        with _kept_for_the_author(
            "the answer has a form that this check does not expect",
            "Compare the types and shapes that your function returns with those of the task.",
        ):
            check.judge(case, observed.inputs, observed.outputs)
    except Wrong as finding:
        if case.after is None:  # else the trace has another call, too
            finding.otherwise = finding.otherwise or _outside_the_group(case, observed.trace)
        raise
    finally:
        torch.set_num_threads(threads)


def _judge_communication(
    check: Check, case: Case, observed: Observed, trace: Trace
) -> dict[str, Wrong]:
    """Return part of the points → its first finding."""
    findings = dict[str, Wrong]()
    if check.computes is not None and observed.network:
        _expect_computed(check.computes(case, observed.inputs), trace)
    _expect_few_empty(trace)
    if case.after is not None:
        own_trace = after_the_barrier(trace)
        if own_trace is None:
            return findings
        # The ranks leave the barrier one after the other, so a formula does not give the time.
        trace, observed = own_trace, replace(observed, network=None)
    if outside := _outside_the_group(case, trace):
        findings[COMMUNICATION] = Wrong(outside)
    for expectation in check.expects:
        try:
            with _kept_for_the_author("the messages have a form that this check does not expect"):
                expectation.test(case, observed, trace)
        except Wrong as finding:
            findings.setdefault(expectation.part, finding)
    return findings


@contextmanager
def _kept_for_the_author(message: str, hint: str = "") -> Iterator[None]:
    """Turn an exception that a judge raises by mistake into a finding, which holds it."""
    try:
        yield
    except (Wrong, AuthorError, OSError, MemoryError):  # the last ones no answer has caused
        raise
    except Exception as error:
        raise Wrong(message, hint) from error


def _trouble_of(finding: Wrong) -> str:
    """Return the traceback of the exception in the check that led to the finding; or nothing."""
    error = finding.__cause__
    return "" if error is None else "".join(traceback.format_exception(error))


def _together(findings: Sequence[Wrong]) -> Wrong | None:
    """Return one finding that contains all of them; None if there is none."""
    if len(findings) < 2:
        return findings[0] if findings else None
    first, *further = findings
    also = [f"Also: {_reason_of(other, other.hint).rstrip('.')}." for other in further]
    return Wrong(first.message, " ".join(filter(None, [first.hint, *also])), first.detail)


def _reason_of(finding: Wrong, hint: str) -> str:
    """Return a finding and a hint in one line."""
    return _cut(f"{finding.message}. {hint}" if hint else finding.message, MAX_REASON)


def _cut(text: str, limit: int) -> str:
    """Return the text, or its beginning if it is longer than `most` characters."""
    return text if len(text) <= limit else f"{text[:limit]} …"


def _expect_few_empty(trace: Trace) -> None:
    empty = Counter(event.rank for event in trace.operations if event.bytes == 0)
    for rank, number in sorted(empty.items()):
        if number > MAX_EMPTY:
            raise Wrong(
                f"rank {rank} takes part in {number} operations that carry nothing; the limit is "
                f"{MAX_EMPTY} for each rank in a case",
                "Empty messages and barriers must not be used to pass on information.",
            )


def _expect_computed(declared: Sequence[Mapping[float, int]], trace: Trace) -> None:
    for rank, lengths in enumerate(declared):
        expected = sum(seconds * times for seconds, times in lengths.items())
        if (spent := computed(trace, rank)) < expected * (1 - 1e-6):
            unit, scale = unit_of(expected)
            raise Wrong(
                f"rank {rank} computes for only {scale * spent:.4g} of the {scale * expected:.4g} "
                f"{unit} of computation in this check's program",
                "This computation is in the check's own program, which calls your function: do not "
                "skip or shorten it.",
            )


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
