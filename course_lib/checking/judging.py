"""Judge what was observed of one case: handles, then values, then communication.

This looks at values and at the trace, and runs nothing of a student. So it is the same for all
kinds of ranks.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from course_lib.checking.cases import COMMUNICATION, VALUES, Case, Check, Observed, Wrong
from course_lib.checking.limits import MAX_EMPTY
from course_lib.checking.report import CaseResult
from course_lib.checking.traffic import after_the_barrier, name_of
from course_lib.ranks import Trace
from course_lib.ranks.trace.timeline import unit_of
from course_lib.ranks.wire import Plain

MAX_REASON = 2000
"""Characters of a reason, which may contain a value that a student's function returned."""
_KEPT = "Each of the two calls is right alone, but something is kept from the call before."
_PROGRAMS_OWN = (
    "This computation is in the check's own program, which calls your function: do not skip or "
    "shorten it."
)


@dataclass
class Judged:
    """What the judges and the expectations found in one case.

    Attributes:
        wrong: the finding; ``None`` if nothing is wrong.
        granted: the parts of the points that the case grants although something is wrong.
        trouble: for the author: the traceback of an unexpected exception in the check; else empty.

    """

    wrong: Wrong | None = None
    granted: set[str] = field(default_factory=set)
    trouble: str = ""


def judge_case(
    check: Check,
    case: Case,
    draw: Callable[[], Sequence[Plain]],
    observed: Observed,
    earlier: Sequence[CaseResult] = (),
) -> Judged:
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
    judged = Judged()
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
    judged: Judged,
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
    judged: Judged,
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
    also = [f"Also: {reason_of(other, other.hint).rstrip('.')}." for other in others]
    hint = " ".join([each for each in (first.hint, *also) if each])
    return Wrong(first.message, hint, first.detail, expected=first.expected, got=first.got)


def reason_of(wrong: Wrong, hint: str) -> str:
    """Return a finding and a hint in one line."""
    return cut(f"{wrong.message}. {hint}" if hint else wrong.message, MAX_REASON)


def cut(text: str, most: int) -> str:
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
