"""Whose fault it was: a machine that stood still, or was out of memory, and nobody else."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from autograder.examination.verdict import CheckVerdict, Verdict
from autograder.pool import witness as module
from autograder.pool.witness import InfrastructureFailure, Witness
from course_lib.ranks.explain.failure import exit_reason

LATE = ["time: 02/a, 2 ranks"]


def verdict(limits: list[str], status: int = 0) -> Verdict:
    found = Verdict("02", "ada", "02", "5eed", "0", limits=limits)
    reason = f"Rank 1's process ended: {exit_reason(status)}."
    found.checks.append(CheckVerdict("02/a", 0.0, 3.0, reason, [{"reason": reason}]))
    return found


def test_a_machine_that_stood_still_is_to_blame_for_limits_of_time_only() -> None:
    with Witness() as seen:
        pass
    seen.still = module.STILL + 1
    seen.testify(verdict([]))
    seen.testify(verdict(["memory: cell 3"]))
    with pytest.raises(InfrastructureFailure, match="stood still for 4 s"):
        seen.testify(verdict(LATE))
    seen.still = module.STILL / 2
    seen.testify(verdict(LATE))


def test_time_that_was_not_ours_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 0.2, 60.0, *[60.1] * 10_000])
    monkeypatch.setattr(module, "_now", lambda: next(now))
    monkeypatch.setattr(module, "_BEAT", 0.001)
    with Witness() as seen:
        while seen.still < 1:
            pass
    assert 59 < seen.still < 60


@pytest.mark.parametrize(
    ("before", "after", "status", "fault"),
    [
        (3, 4, -signal.SIGKILL, True),
        (3, 3, -signal.SIGKILL, False),
        (3, 4, -signal.SIGSEGV, False),
        (3, 4, 1, False),
    ],
)
def test_a_rank_that_the_machine_killed_for_memory(
    monkeypatch: pytest.MonkeyPatch, before: int, after: int, status: int, fault: bool
) -> None:
    kills: Any = iter([before, after])
    monkeypatch.setattr(module, "_oom_kills", lambda: next(kills))
    with Witness() as seen:
        pass
    if fault:
        with pytest.raises(InfrastructureFailure, match="out of memory"):
            seen.testify(verdict([], status))
    else:
        seen.testify(verdict([], status))
