"""Checks: cases, oracles and reports.

For students: `check`. For course authors: `Case`, `Check`, `Wrong` and the ``expect_…`` functions
to judge with. Read in this order:

- `cases`: a check is data
- `run_check`: runs its cases, wherever the ranks are
- `compare`: what a judge judges with
- `report`: how it went, for the student and for the grader
- `local`: `check`, on ranks of this machine
- `program`: what of a check goes to the ranks
- `wire`, `frames`: plain values, as bytes, to and from ranks that nobody trusts
- `mutants`: wrong solutions, which must fail
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
