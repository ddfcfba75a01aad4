"""Run a check's cases on any kind of ranks, and explain the results."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
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
from course_lib.checking.limits import MAX_DETAIL, MAX_EMPTY, MAX_TIMEOUTS
from course_lib.checking.report import CaseResult, CheckReport
from course_lib.checking.traffic import after_the_barrier, name_of
from course_lib.ranks import Trace
from course_lib.ranks.explain.errors import RankError, RanksError, RankTimeout, format_states
from course_lib.ranks.trace.timeline import unit_of
from course_lib.ranks.wire import NotPlainError, Plain

Runner = Callable[[Check, Case, Sequence[Plain]], Observed | list[Any]]
"""Runs a case's program on its ranks. It returns what was observed, or only a list with one output
per rank. Or it raises `RanksError`; the error's `trace` attribute may hold what was recorded until
then."""

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
            result = CaseResult(case.name, False, reason, "", 0.0, is_hidden, ran=False)
        else:
            examination = _Examination(name, check, case, run, seed, results)
            result = examination.result(is_hidden)
            timeouts += examination.timed_out
            if examination.finding is not None:
                findings[len(results)] = examination.finding
            trace = examination.trace
            if not result.passed and not is_hidden and trace is not None and trace.makespan > 0:
                traces.append((result, trace))
        results.append(result)
        progress(result)
    failed_alone = [index for index, result in enumerate(results) if not result.passed]
    if len(failed_alone) == 1 and findings.get(failed_alone[0], _FAR).near:
        (index,) = failed_alone
        again = [
            _Examination(name, check, cases[index][0], run, f"{seed}, again {number}", results)
            for number in range(MORE_SEEDS)
        ]
        tried = [each.result(cases[index][1]) for each in again]
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
            results[index] = replace(results[index], reason=_reason(findings[index], hint))
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


def _reason(wrong: Wrong, hint: str) -> str:
    return _cut(f"{wrong.message}. {hint}" if hint else wrong.message, MAX_REASON)


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


class _Examination:
    """Runs, judges and explains one case."""

    def __init__(
        self,
        name: str,
        check: Check,
        case: Case,
        run: Runner,
        seed: str,
        earlier: Sequence[CaseResult],
    ) -> None:
        self._name, self._check, self._case, self._run, self._seed = name, check, case, run, seed
        self._kept = _KEPT if _right_alone(case, earlier) else ""
        self._fails_before = _fails_before(case, earlier)
        self.trace: Trace | None = None
        self.timed_out = False
        self.finding: Wrong | None = None
        self._trouble = ""
        self._cost: Mapping[str, float] = {}
        self._granted: set[str] = set()

    def _inputs(self) -> Sequence[Plain]:
        return _drawn(self._name, self._check, self._case, self._seed)

    def result(self, hidden: bool) -> CaseResult:
        inputs = self._inputs()
        start = time.monotonic()
        reason = detail = summary = expected = got = in_short = limit = ""
        try:
            observed = self._run(self._check, self._case, inputs)
            self._judge(observed if isinstance(observed, Observed) else Observed(observed))
        except Wrong as wrong:
            self.finding, reason = wrong, _reason(wrong, wrong.otherwise)
            detail, expected, got = wrong.detail, wrong.expected, wrong.got
        except RanksError as error:
            self.timed_out = isinstance(error, RankTimeout)
            in_short, limit = error.in_short, error.limit
            self.trace = getattr(error, "trace", None)
            if hint := _copies(self._case, error):
                error.add_detail(hint)
            reason, detail, summary = _in_one_line(error), _explanation(error), error.summary
            if _not_written(error):
                line = f" ({error.where})" if error.where else ""
                reason, detail, summary = f"not written yet: NotImplementedError{line}", "", ""
        except NotPlainError as error:
            reason = str(error)
        at_stake = self._case.decides or tuple(self._check.worth)
        parts = {
            part: not reason or part in self._granted or part not in at_stake
            for part in self._check.worth
        }
        return CaseResult(
            self._case.name,
            not reason,
            _cut(reason, MAX_REASON),
            _cut(detail, MAX_DETAIL),
            time.monotonic() - start,
            hidden,
            parts,
            in_short=in_short or self._case.told,
            limit=limit,
            trouble=self._trouble,
            summary=_cut(summary, MAX_REASON),
            expected=_cut(expected, MAX_REASON),
            got=_cut(got, MAX_REASON),
            difficulty=difficulty_of(self._case, inputs, next(iter(self._check.cases), self._case)),
            cost=self._cost,
        )

    def _judge(self, observed: Observed) -> None:
        """Raise `Wrong` for the first finding: handles, then values, then communication.

        Communication counts only if the values are right: a function that sends nothing must not
        earn points for that.
        """
        self.trace = observed.trace
        if self.trace is not None and observed.network is not None:
            self._cost = _cost(self.trace)
        if self.trace is not None:
            _expect_all_waited_for(self.trace)
        if observed.touched:
            raise Wrong(
                observed.touched[0].rstrip("."),
                "Use the tensors only after .wait() has returned. Until then the transfer may "
                "still be running: you may read old values, or your write may change what is sent.",
            )
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # oracles are small: more threads would only wait for each other
        try:
            # Draw the inputs again, because a program on the ranks may have changed the others.
            self._check.judge(self._case, self._inputs(), observed.outputs)
        except Wrong as wrong:
            after, trace = self._case.after is not None, self.trace
            hint = self._kept if after else _outside_the_group(self._case, trace)
            raise wrong.besides(hint) from None
        except (OSError, MemoryError):  # not caused by an answer
            raise
        except Exception:
            self._trouble = traceback.format_exc()
            raise Wrong(
                "the answer has a form that this check does not expect",
                "Compare the types and shapes that your function returns with those of the task.",
            ) from None
        finally:
            torch.set_num_threads(threads)
        findings: dict[str, Wrong] = {}  # part of the points → its first finding
        if self._check.computes is not None and observed.network and self.trace is not None:
            missing = _computed_too_little(self._check.computes, self._inputs(), self.trace)
            if missing:
                raise Wrong(missing, self._fails_before or _PROGRAMS_OWN)
        if self.trace is not None:
            _expect_few_empty(self.trace)
        trace = self.trace
        if trace is not None and self._case.after is not None:
            trace = after_the_barrier(trace)
            # The ranks leave the barrier one after the other, so a formula does not give the time.
            observed = replace(observed, network=None)
        if outside := _outside_the_group(self._case, trace):
            findings[COMMUNICATION] = Wrong(outside)
        if trace is not None:
            for expectation in self._check.expects:
                try:
                    expectation.test(self._case, observed, trace)
                except Wrong as wrong:
                    findings.setdefault(expectation.part, wrong)
                except Exception:
                    self._trouble = traceback.format_exc()
                    words = "the messages have a form that this check does not expect"
                    findings.setdefault(expectation.part, Wrong(words))
        self._granted = {VALUES, COMMUNICATION, *self._check.worth} - findings.keys()
        if findings:
            raise _together(list(findings.values()))


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


def _together(findings: Sequence[Wrong]) -> Wrong:
    """Return one finding that contains all of them."""
    first, *others = findings
    also = [f"Also: {_reason(other, other.hint).rstrip('.')}." for other in others]
    hint = " ".join([each for each in (first.hint, *also) if each])
    return Wrong(first.message, hint, first.detail, expected=first.expected, got=first.got)


def _not_written(error: RanksError) -> TypeGuard[RankError]:
    """Return whether the cell is as handed out: it raises this exception without a message."""
    return (
        isinstance(error, RankError)
        and error.kind == NotImplementedError.__name__
        and not error.message
    )


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} …"


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
