"""Run a check's cases, wherever the ranks are, and explain what comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from course_lib.checking.cases import Case, Check, Wrong, case_generator
from course_lib.checking.report import CaseResult, CheckReport
from course_lib.checking.wire import NotPlainError, Plain
from course_lib.ranks.explain.errors import RankError, RanksError, format_states

Runner = Callable[[Check, Case, Sequence[Plain]], list[Any]]
"""Runs a case's program on its ranks: returns one output per rank, or raises `RanksError`."""


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
        progress: called after every case.

    """
    results = []
    cases = [(case, False) for case in check.cases] + [(case, True) for case in hidden]
    for case, is_hidden in cases:
        result = _run_case(name, check, case, run, seed, is_hidden)
        results.append(result)
        progress(result)
    return CheckReport(name, tuple(results))


def _run_case(
    name: str, check: Check, case: Case, run: Runner, seed: str, hidden: bool
) -> CaseResult:
    inputs = check.inputs(case, case_generator(seed, name, case))
    start = time.monotonic()
    reason, detail = "", ""
    try:
        outputs = run(check, case, inputs)
        # Drawn again, so that the judge does not rely on what a program on the ranks changed.
        check.judge(case, check.inputs(case, case_generator(seed, name, case)), outputs)
    except Wrong as wrong:
        reason, detail = wrong.message, wrong.hint
        if wrong.hint:
            reason, detail = f"{wrong.message}. {wrong.hint}", ""
    except RanksError as error:
        reason, detail = _in_one_line(error), _explanation(error)
    except NotPlainError as error:
        reason = str(error)
    return CaseResult(case.name, not reason, reason, detail, time.monotonic() - start, hidden)


def _in_one_line(error: RanksError) -> str:
    """Return the error with what the ranks wait for, where that is the point."""
    waiting = [f"rank {s.rank} {s.doing}" for s in error.states if s.doing.startswith("waits in")]
    if isinstance(error, RankError) or not waiting:
        return error.summary
    return f"{error.summary} {'; '.join(waiting)}."


def _explanation(error: RanksError) -> str:
    return "\n\n".join(part for part in (format_states(error.states), error.detail) if part)
