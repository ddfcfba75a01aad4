"""Checks: cases, oracles and reports.

For students: `check`. For course authors: `Case`, `Check`, `Wrong` and the ``expect_…`` functions
to judge with. Read `cases` first, then `run_check`, `compare`, `report`, `local`, `wire`.
"""

from course_lib.checking.cases import Case, Check, Wrong
from course_lib.checking.compare import (
    expect_close,
    expect_number,
    expect_same_on_all_ranks,
    expect_tensor,
)
from course_lib.checking.local import check
from course_lib.checking.report import CaseResult, CheckFailed, CheckReport
from course_lib.checking.run_check import run_check

__all__ = [
    "Case",
    "CaseResult",
    "Check",
    "CheckFailed",
    "CheckReport",
    "Wrong",
    "check",
    "expect_close",
    "expect_number",
    "expect_same_on_all_ranks",
    "expect_tensor",
    "run_check",
]
