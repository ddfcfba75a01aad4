"""A hint for answers that are right but for a rounding: a smaller dtype was used on the way.

Such a number stands beside the right one and looks like it. What a person must be told is not by
how much it differs, but why.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from course_lib.checking.cases import Case, Wrong
from course_lib.checking.judges import Judge

FLOAT32 = 2.0**-21
"""Relative error: some roundings to float32."""
SMALL = 2.0**-8
"""Relative error: a rounding to bfloat16, or two."""


def tells_rounding(judge: Judge) -> Judge:
    """Return the judge; where it has no hint and the number is nearly right, it has this one."""

    @functools.wraps(judge)
    def told(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
        try:
            judge(case, inputs, values)
        except Wrong as wrong:
            raise (wrong if wrong.hint else wrong.with_hint(rounding_of(wrong))) from None

    return told


def rounding_of(wrong: Wrong) -> str:
    """Return the hint if expected and got are numbers and nearly equal, or nothing."""
    try:
        expected, got = float(wrong.expected), float(wrong.got)
    except ValueError:
        return ""
    error = abs(got - expected) / abs(expected) if expected else math.inf
    if not 0 < error <= SMALL:
        return ""
    dtype = "float32" if error <= FLOAT32 else "float16 or bfloat16"
    return (
        f"It is right to {math.floor(-math.log10(error))} digits. Was something rounded to {dtype} "
        "on the way? Then calculate in a wider dtype, and convert only the result."
    )
