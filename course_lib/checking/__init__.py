"""Checks: cases, oracles and reports.

For students: `check` and `ask`. For course authors: `task` and its parts.
Read in this order:

- `cases`: a check is data
- `answers`: what a rank returned, compared with its form and with the right value
- `on_ranks`: the code that runs in the same process as the student's code: the forms of arguments,
  and what a call leaves behind and must not change
- `judges`: the common judges, and the error that the arithmetic of a case allows
- `communication`: what the ranks send, and the demands on it
- `task`: a check in thirty lines
- `shared`: inputs, programs and judges that several assignments need; those of a single assignment
  are in its folder, `assignments/NN_name`
- `forbidden`: classes and functions of PyTorch that do what a task asks for
- `run_check`: runs the cases of a check on any kind of ranks, and judges each
- `causes`: which failing cases have the same cause, and which of them is the simplest
- `report`: the result, for the student and for the grader
- `loading`: finds a check by its name, and packs it for ranks
- `local`: `check`, on ranks of this machine
- `asking`: a question with a place for the answer, which a run decides
- `defence`: questions on a student's own run; `testing`: a task whose solution is a check
- `mutants`: wrong solutions, which must fail
"""

from course_lib.checking.answers import (
    expect_close,
    expect_equal,
    expect_number,
    expect_tensor,
)
from course_lib.checking.asking import Question, ask
from course_lib.checking.by_reference import by_reference
from course_lib.checking.cases import (
    NETWORK,
    Case,
    Check,
    Expectation,
    Form,
    Observed,
    Wrong,
)
from course_lib.checking.communication import (
    Allowed,
    calls_at_most,
    computes_between,
    sends_at_most,
)
from course_lib.checking.defence import defend
from course_lib.checking.draw import Draw, Variety
from course_lib.checking.judges import by_judge, equals, same_on_all_ranks
from course_lib.checking.local import check
from course_lib.checking.on_ranks.given import Given
from course_lib.checking.report import CaseResult, CheckFailed, CheckReport
from course_lib.checking.run_check import run_check
from course_lib.checking.task import in_many_forms, task

__all__ = [
    "NETWORK",
    "Allowed",
    "Case",
    "CaseResult",
    "Check",
    "CheckFailed",
    "CheckReport",
    "Draw",
    "Expectation",
    "Form",
    "Given",
    "Observed",
    "Question",
    "Variety",
    "Wrong",
    "ask",
    "by_judge",
    "by_reference",
    "calls_at_most",
    "check",
    "computes_between",
    "defend",
    "equals",
    "expect_close",
    "expect_equal",
    "expect_number",
    "expect_tensor",
    "in_many_forms",
    "run_check",
    "same_on_all_ranks",
    "sends_at_most",
    "task",
]
