"""Checks: a student's function beside the reference, on the same drawn cases.

For students: `check` and `ask`. For course authors: `by_reference` and its parts.
Read in this order:

- `cases`: a check is data
- `by_reference`: a check as a reference, a program and a draw; `draw`: what a case is made of
- `answers`: what a rank returned, compared with its form and with the right value; `rounding`: how
  far a right value may be from the reference's
- `communication`: what the ranks send, and the demands on it
- `judges`: a check without a reference, and what judges share; those of a single assignment are in
  its folder, `assignments/NN_name`
- `on_ranks`: the code that runs in the same process as the student's code: the forms of arguments,
  and what a call leaves behind and must not change
- `run_check`: runs the cases of a check on any kind of ranks, and judges each
- `report`: the result, for the student and for the grader
- `loading`: finds a check by its name, and packs it for ranks
- `local`: `check`, on ranks of this machine; `box`: what a notebook shows
- `asking`: a question with a place for the answer, which a run decides
- `defence`: questions on a student's own run; `testing`: a task whose solution is a check
- `forbidden`: classes and functions of PyTorch that do what a task asks for
- `mutants`: wrong solutions, which must fail; `seeds`: chooses the public cases by them
"""

from course_lib.checking.answers import expect_equal, expect_tensor
from course_lib.checking.asking import ask
from course_lib.checking.by_reference import by_reference
from course_lib.checking.cases import NETWORK, Case, Check, Expectation, Form, Observed, Wrong
from course_lib.checking.communication import (
    Allowed,
    computes_between,
    sends_at_most,
)
from course_lib.checking.defence import defend
from course_lib.checking.draw import Draw, Variety
from course_lib.checking.judges import by_judge
from course_lib.checking.local import check
from course_lib.checking.on_ranks.given import Given
from course_lib.checking.report import CheckFailed, CheckReport
from course_lib.checking.run_check import run_check
