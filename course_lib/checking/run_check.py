"""Run a check's cases on any kind of ranks, judge each of them, and explain the results.

A case is judged by its handles, then its values, then its communication. This looks at values and
at the trace, and runs nothing of a student. So it is the same for all kinds of ranks.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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

MORE_SEEDS = 2
"""If a single case fails, and its error is near the allowed one, it is tried with so many more
seeds before it costs a point: a right answer may be refused by chance once, but not again."""
MAX_REASON = 2000
"""Characters of a reason, which may contain a value that a student's function returned."""
_KEPT = "This call is right alone, but something is kept from the call before."
_SIMPLER: tuple[tuple[str, Any, str], ...] = (
    (
        "iterable",
        "list",
        "With a list in place of a {iterable}, the same case passes: a second loop over a "
        "generator finds nothing.",
    ),
    (
        "layout",
        "contiguous",
        "With contiguous tensors, the same case passes. These are {layout}: .view fails, and "
        ".flatten(), .reshape() and .contiguous() make a copy; what goes into a copy does not "
        "reach the tensor. Write the result back with tensor.copy_.",
    ),
    (
        "groups",
        (),
        "In one group of all ranks, the same case passes: pass group=group to every call, and take "
        "ranks and world size from the group.",
    ),
    ("dtype", "float32", "In float32, the same case passes."),
    ("training", True, "With the model in training mode, the same case passes."),
)
"""A part of a case's form, its plain value, and what to say if only this makes the case pass."""


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
    progress: Callable[[CaseResult], None] = lambda _: None,
    explain: bool = True,
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
        explain: if the simplest case that failed is not plain, run it again without what is
            special, one by one, and say what made it fail.

    Raises:
        AuthorError: the inputs of a case could not be drawn, or cannot be sent.

    """
    examined: list[_Examined] = []
    for case, is_hidden in [*((c, False) for c in check.cases), *((c, True) for c in hidden)]:
        current = _Examined(case, is_hidden)
        timeouts = sum(isinstance(trial.error, RankTimeout) for trial in examined)
        if timeouts >= MAX_TIMEOUTS:
            reason = f"not run, because {timeouts} earlier cases took longer than their limit"
            lost = dict.fromkeys(case.decides or check.worth, False)
            current.result = CaseResult(
                case.name, False, reason, "", 0.0, is_hidden, lost, ran=False
            )
        else:
            _examine(name, check, current, run, seed)
        examined.append(current)
        progress(current.result)
    _try_again(name, check, run, seed, examined)
    for is_hidden in (False, True):
        refused = [trial for trial in examined if trial.finding and trial.hidden == is_hidden]
        hints = agreed([trial.finding for trial in refused if trial.finding])
        for trial, hint in zip(refused, hints, strict=True):
            assert trial.finding is not None
            trial.result = replace(trial.result, reason=_reason_of(trial.finding, hint))
    ran = [trial for trial in examined if trial.result.ran and not trial.hidden]
    if explain and check.drawn is not None:
        _explain(name, check, run, seed, [trial for trial in ran if not trial.result.passed])
    failed = [trial for trial in ran if not trial.result.passed]
    # With `only_on`, the messages are the check's own: no student has sent one.
    timed = [trial for trial in failed if trial.trace is not None and trial.trace.makespan > 0]
    shown = min(
        [] if check.only_on else timed,
        key=lambda trial: tuple(trial.result.difficulty),
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


def _try_again(name: str, check: Check, run: Runner, seed: str, examined: list[_Examined]) -> None:
    """Try a case that alone has failed, and nearly passed, with more seeds; see `MORE_SEEDS`."""
    failed = [index for index, trial in enumerate(examined) if not trial.result.passed]
    suspect = examined[failed[0]] if len(failed) == 1 else None
    if suspect is None or suspect.finding is None or not suspect.finding.near:
        return
    tried = [_Examined(suspect.case, suspect.hidden) for _ in range(MORE_SEEDS)]
    for n, trial in enumerate(tried):
        _examine(name, check, trial, run, f"{seed}, again {n}")
    if all(trial.result.passed for trial in tried):
        examined[failed[0]] = tried[0]


def _explain(name: str, check: Check, run: Runner, seed: str, failed: list[_Examined]) -> None:
    """Find out by trial which special thing makes the simplest failed case fail, and say so."""
    simplest = min(failed, key=lambda trial: trial.case.difficulty, default=None)
    if simplest is None or isinstance(simplest.error, RankTimeout):
        return

    def passes(case: Case) -> bool:
        trial = _Examined(case, False)
        _examine(name, check, trial, run, seed)
        return trial.result.passed

    case, sentence = simplest.case, ""
    if case.after is not None and passes(replace(case, after=None)):
        sentence = _KEPT
    for part, plain, explanation in _SIMPLER:
        special = getattr(case.form, part) != plain
        if (
            not sentence
            and special
            and passes(replace(case, form=replace(case.form, **{part: plain})))
        ):
            sentence = explanation.format(**vars(case.form))
    if sentence:
        reason = f"{simplest.result.reason.rstrip('. ')}. {sentence}"
        simplest.result = replace(simplest.result, reason=_cut(reason, MAX_REASON))


def agreed(findings: Sequence[Wrong]) -> list[str]:
    """Return the hint of each failing case, so that no two hints contradict each other.

    In a single case, a known mistake may fit by chance. So a mistake is named only if it explains
    all the cases that it could explain. If two mistakes may be named, the one that explains more
    cases is.
    """
    fits = [[mistake for mistake, hint in finding.mistakes.items() if hint] for finding in findings]
    could, explains = Counter[str](), Counter[str]()
    for finding, fitting in zip(findings, fits, strict=True):
        could.update(finding.mistakes.keys())
        explains.update(fitting)
    hints = []
    for finding, fitting in zip(findings, fits, strict=True):
        sure = [mistake for mistake in fitting if explains[mistake] == could[mistake]]
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
        hidden: whether students do not get it.
        result: its result; it names a known mistake only after all cases have run.
        trace: what was recorded.
        error: why the ranks did not run to their end; else ``None``.
        finding: what is wrong with its values or its communication; else ``None``.
        granted: the parts of the points that the case grants although something is wrong.
        trouble: for the author: the traceback of an unexpected exception in the check; else empty.

    """

    case: Case
    hidden: bool
    result: CaseResult = field(init=False)
    trace: Trace | None = None
    error: RanksError | None = None
    finding: Wrong | None = None
    granted: Collection[str] = ()
    trouble: str = ""


def _examine(name: str, check: Check, trial: _Examined, run: Runner, seed: str) -> None:
    """Run, judge and explain one case."""
    case, cost = trial.case, dict[str, float]()
    draw = partial(_drawn, name, check, case, seed)
    inputs, start = draw(), time.monotonic()
    check.prepare(case, inputs)
    try:
        observed = replace(run(check, case, inputs), inputs=draw())
        trial.trace = observed.trace
        if trial.trace is not None and observed.network is not None:
            cost = _cost(trial.trace)
        _judge(check, trial, observed)
    except RanksError as failed:
        trial.error, trial.trace = failed, failed.trace
    except NotPlainError as refused:
        raise AuthorError(f"{name}: the inputs of the case {case.name!r}: {refused}") from refused
    reason = detail = summary = ""
    if (finding := trial.finding) is not None:
        reason, detail = _reason_of(finding, finding.otherwise), finding.detail
    elif (error := trial.error) is not None and _not_written(error):
        reason = f"not written yet: NotImplementedError{f' ({error.where})' if error.where else ''}"
    elif error is not None:
        reason, detail, summary = _in_one_line(error), _explanation(error), error.summary
    trial.result = CaseResult(
        case.name,
        not reason,
        _cut(reason, MAX_REASON),
        _cut(detail, MAX_DETAIL),
        time.monotonic() - start,
        trial.hidden,
        {part: not reason or part in trial.granted for part in case.decides or check.worth},
        in_short=case.in_short if trial.error is None else trial.error.in_short,
        limit="" if trial.error is None else trial.error.limit,
        trouble=trial.trouble,
        summary=_cut(summary, MAX_REASON),
        difficulty=case.difficulty,
        cost=cost,
    )


def _cost(trace: Trace) -> dict[str, float]:
    ranks = range(trace.world_size)
    return {
        "seconds": trace.makespan,
        "computed": max(computed(trace, rank) for rank in ranks),
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


def _explanation(error: RanksError) -> str:
    return "\n\n".join(part for part in (format_states(error.states), error.detail) if part)


# Judging one case -----------------------------------------------------------------------------


def _judge(check: Check, trial: _Examined, observed: Observed) -> None:
    """Judge one case: note the finding, the parts of the points that it grants, and the trouble.

    Communication counts only if the values are right: a function that sends nothing must not earn
    points for that.

    Args:
        check: the check.
        trial: the case.
        observed: what the ranks returned and sent. Its inputs were drawn anew, because a program
            on the ranks may have changed those that it got.

    """
    try:
        _judge_handles(observed)
        _judge_values(check, trial, observed)
        findings = _judge_communication(check, trial, observed)
    except Wrong as finding:
        trial.finding = finding
        return
    trial.granted = {VALUES, COMMUNICATION, *check.worth} - findings.keys()
    if findings:
        trial.finding = _together(list(findings.values()))


def _judge_handles(observed: Observed) -> None:
    if observed.trace is not None:
        _expect_all_waited_for(observed.trace)
    if observed.touched:
        raise Wrong(
            observed.touched[0].rstrip("."),
            "Use the tensors only after .wait() has returned. Until then the transfer may "
            "still be running: you may read old values, or your write may change what is sent.",
        )


def _judge_values(check: Check, trial: _Examined, observed: Observed) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # oracles are small: more threads would only wait for each other
    try:
        check.judge(trial.case, observed.inputs, observed.outputs)
    except Wrong as finding:
        alone = trial.case.after is None  # else the trace has another call, too
        raise finding.besides(
            _outside_the_group(trial.case, observed.trace) if alone else ""
        ) from None
    except (AuthorError, OSError, MemoryError):  # not caused by an answer
        raise
    except Exception:
        trial.trouble = traceback.format_exc()
        raise Wrong(
            "the answer has a form that this check does not expect",
            "Compare the types and shapes that your function returns with those of the task.",
        ) from None
    finally:
        torch.set_num_threads(threads)


def _judge_communication(check: Check, trial: _Examined, observed: Observed) -> dict[str, Wrong]:
    """Return part of the points → its first finding."""
    case, trace, findings = trial.case, observed.trace, dict[str, Wrong]()
    if trace is not None and check.computes is not None and observed.network:
        _expect_computed(check.computes(case, observed.inputs), trace)
    if trace is not None:
        _expect_few_empty(trace)
    if trace is not None and case.after is not None:
        trace = after_the_barrier(trace)
        # The ranks leave the barrier one after the other, so a formula does not give the time.
        observed = replace(observed, network=None)
    if trace is None:
        return findings
    if outside := _outside_the_group(case, trace):
        findings[COMMUNICATION] = Wrong(outside)
    for expectation in check.expects:
        try:
            expectation.test(case, observed, trace)
        except Wrong as finding:
            findings.setdefault(expectation.part, finding)
        except AuthorError:
            raise
        except Exception:
            trial.trouble = traceback.format_exc()
            message = "the messages have a form that this check does not expect"
            findings.setdefault(expectation.part, Wrong(message))
    return findings


def _together(findings: Sequence[Wrong]) -> Wrong:
    """Return one finding that contains all of them."""
    first, *further = findings
    also = [f"Also: {_reason_of(other, other.hint).rstrip('.')}." for other in further]
    hint = " ".join([sentence for sentence in (first.hint, *also) if sentence])
    return Wrong(first.message, hint, first.detail)


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
