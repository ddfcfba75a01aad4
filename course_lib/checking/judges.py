"""The common judges: equal to one process, equal on all ranks.

A judge is a function of a case, the inputs and the values of all ranks; it raises `Wrong` if a
value is wrong. If a case has several groups, each group is judged separately.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from course_lib.checking.answers import ANYTHING, Judge, expect_containers, sees
from course_lib.checking.cases import Case, Wrong
from course_lib.checking.causes import cause_of
from course_lib.checking.compare import differs, expect_equal
from course_lib.checking.on_ranks.leaves import leaves
from course_lib.checking.rounding import rounding_errors
from course_lib.checking.side_effects import same

Oracle = Callable[[Case, Sequence[Any], int], Any]
"""``oracle(case, inputs, me)`` returns the right value of member `me` of a group whose members have
these inputs, or the value that a well-known mistake gives for that member."""

Explain = Callable[[Case, Sequence[Any], int, Any], str]
"""``explain(case, inputs, me, value)`` returns a hint about the wrong value of member `me`, or an
empty string."""

TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 3e-2, "float16": 4e-3}
"""Allowed relative error by dtype: enough for some hundred roundings."""
HALVES = ("bfloat16", "float16")


def equals(
    oracle: Oracle,
    mistakes: Mapping[str, Oracle] | None = None,
    *,
    named: Oracle | None = None,
    explain: Explain | None = None,
    tolerance: Mapping[str, float] | None = None,
    absolute: Mapping[str, float] | None = None,
) -> Judge:
    """Return a judge that compares with what one process computes from all inputs of the group.

    Args:
        oracle: gives the right value. The report uses its keys as words:
            ``{"gradient of parameter {}": [...]}`` says "rank 2: gradient of parameter 1".
        mistakes: words → the value that this mistake gives; the value may have only some of the
            oracle's keys. A mistake that explains every wrong value of a rank's answer becomes the
            hint.
        named: gives more mistakes, words → value, if the words depend on the case. These mistakes
            come first.
        explain: looks at a wrong answer if no known mistake is named, and returns a hint or an
            empty string.
        tolerance: dtype → allowed relative error, if it differs from `TOLERANCE`.
        absolute: dtype → allowed absolute error, if it is not a tenth of the relative error.

    An answer is also right if its error is one that the arithmetic allows in this case; see
    `rounding`. This is not so where the tolerance is 0.

    """

    def whole(rank: int, inputs: Sequence[Any]) -> dict[str, Oracle]:
        def of_all(case: Case, _: Sequence[Any], __: int) -> Any:
            if len(case.groups) == 1:
                return None
            everybody = replace(case, form=replace(case.form, groups=()))
            try:
                return oracle(everybody, inputs, rank)
            except Exception:  # an oracle need not have a value for more ranks
                return None

        return {
            "the result over all ranks, not over the group: pass group=group to every call": of_all
        }

    def errors(case: Case, inputs: Sequence[Any], me: int) -> dict[str, float]:
        dtype = getattr(torch, case.form.dtype)
        if not dtype.is_floating_point:
            return {}
        return rounding_errors(lambda moved: oracle(case, moved, me), inputs, dtype)

    def tolerances(case: Case) -> dict[str, Any]:
        rtol = {**TOLERANCE, **(tolerance or {})}.get(case.form.dtype, 1e-4)
        return {"rtol": rtol, "atol": (absolute or {}).get(case.form.dtype, rtol / 10)}

    def refutes(case: Case, inputs: Sequence[Any], causes: Collection[str]) -> set[str]:
        exact, found = tolerances(case), set[str]()
        if exact["rtol"] and case.form.dtype in HALVES:  # a right answer is only nearly right
            return found
        for members in case.groups:
            theirs = [inputs[rank] for rank in members]
            for me, rank in enumerate(members):
                right = oracle(case, theirs, me)
                known = {**(mistakes or {}), **whole(rank, inputs)}
                for words, value in _Lazy(known, named, case, theirs, me, causes).items():
                    if differs(value, right, **exact):
                        found.add(cause_of(words))
        return found

    def judge(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
        for members in case.groups:
            theirs = [inputs[rank] for rank in members]
            for me, rank in enumerate(members):
                right = oracle(case, theirs, me)
                expect_containers(values[rank], right, f"rank {rank}")
                known = {**(mistakes or {}), **whole(rank, inputs)}
                lookalikes = _Lazy(known, named, case, theirs, me)
                options = tolerances(case)
                try:
                    expect_equal(values[rank], right, f"rank {rank}", **options)
                except Wrong:
                    if options["rtol"]:
                        options["errors"] = errors(case, theirs, me)
                else:
                    continue
                try:
                    expect_equal(
                        values[rank], right, f"rank {rank}", lookalikes=lookalikes, **options
                    )
                except Wrong as wrong:
                    if explain is None:
                        raise
                    raise wrong.otherwise_said(explain(case, theirs, me, values[rank])) from None

    return Judge(judge, ANYTHING, refutes)


class _Lazy(dict[str, Any]):
    """Known mistakes, whose values are computed only when they are read; most are never read.

    If `causes` are given, only the mistakes that `cause_of` writes so are computed.
    """

    def __init__(
        self,
        mistakes: Mapping[str, Oracle],
        named: Oracle | None,
        case: Case,
        inputs: Sequence[Any],
        me: int,
        causes: Collection[str] | None = None,
    ) -> None:
        if causes is not None:
            mistakes = {words: of for words, of in mistakes.items() if cause_of(words) in causes}
        super().__init__(mistakes)
        self._named, self._arguments = named, (case, inputs, me)

    def items(self) -> Any:
        if self._named is not None:
            yield from self._named(*self._arguments).items()
        for name, oracle in super().items():
            yield name, oracle(*self._arguments)


@sees(ANYTHING)
def same_on_all_ranks(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Raise `Wrong` unless all ranks of a group hold exactly the same bits."""
    for members in case.groups:
        first = dict(leaves(values[members[0]]))
        for rank in members[1:]:
            for what, value in leaves(values[rank]):
                if not _same_bits(value, first.get(what)):
                    raise Wrong(
                        f"{what} differs between rank {members[0]} and rank {rank}",
                        "Replicas must hold the same bits after every step, or they drift apart.",
                    )


def _same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same(a, b)
    return type(a) is type(b) and repr(a) == repr(b)  # here NaN equals NaN


def form_of(case: Case) -> dict[str, Any]:
    """Return the case's form as a plain value, for its ranks."""
    form = case.form
    return {
        "seed": None,
        "groups": [list(members) for members in form.groups],
        "layout": form.layout,
        "iterable": form.iterable,
        "training": form.training,
    }
