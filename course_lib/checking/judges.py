"""The common judges: equal to one process, equal on all ranks.

A judge is a function of a case, the inputs and the values of all ranks; it raises `Wrong` if a
value is wrong. If a case has several groups, each group is judged separately.

A right answer is not always exact. A sum in another order is also right, or one with one rounding
more. If large terms cancel, its error is far larger than a fixed share of the small result. So the
allowed error comes from the case: the oracle is computed in float64 several times, each time from
inputs whose numbers are moved at random by one rounding of the dtype. The results differ by what
roundings do to this case. This is Monte Carlo arithmetic (Parker, Pierce and Eggert, 2000). Every
second time the numbers of a rank's tensor move together, as they do if the rank's own sum or mean
is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from course_lib.checking.answers import (
    ANYTHING,
    Judge,
    Test,
    differs,
    expect_containers,
    expect_equal,
    expect_form,
    sees,
)
from course_lib.checking.cases import Case, Check, Expectation, Wrong
from course_lib.checking.causes import cause_of
from course_lib.checking.on_ranks.effects import LATE, Effect, effects_of
from course_lib.checking.on_ranks.given import Program, RankProgram, without
from course_lib.checking.on_ranks.leaves import leaves, same, with_tensors

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
    `rounding_errors`. This is not so where the tolerance is 0.

    """

    def everyone(case: Case, inputs: Sequence[Any]) -> Iterator[tuple[int, Sequence[Any], int]]:
        """Yield each rank, the inputs of its group, and its place in the group."""
        for members in case.groups:
            theirs = [inputs[rank] for rank in members]
            yield from ((rank, theirs, me) for me, rank in enumerate(members))

    def over_all(case: Case, inputs: Sequence[Any], rank: int) -> Any:
        if len(case.groups) == 1:
            return None
        everybody = replace(case, form=replace(case.form, groups=()))
        try:
            return oracle(everybody, inputs, rank)
        except Exception:  # an oracle need not have a value for more ranks
            return None

    def known(
        case: Case,
        inputs: Sequence[Any],
        rank: int,
        theirs: Sequence[Any],
        me: int,
        causes: Collection[str] | None = None,
    ) -> Iterator[tuple[str, Any]]:
        """Yield known mistakes and their values, which are seldom needed, one by one.

        If `causes` are given, of `mistakes` only those that `cause_of` writes so.
        """
        if named is not None:
            yield from named(case, theirs, me).items()
        for words, of in {
            **(mistakes or {}),
            _OVER_ALL: lambda *_: over_all(case, inputs, rank),
        }.items():
            if causes is None or cause_of(words) in causes:
                yield words, of(case, theirs, me)

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
        for rank, theirs, me in everyone(case, inputs):
            right = oracle(case, theirs, me)
            for words, value in known(case, inputs, rank, theirs, me, causes):
                if differs(value, right, **exact):
                    found.add(cause_of(words))
        return found

    def judge(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
        for rank, theirs, me in everyone(case, inputs):
            right, value, whose = oracle(case, theirs, me), values[rank], f"rank {rank}"
            expect_containers(value, right, whose)
            options = tolerances(case)
            try:
                expect_equal(value, right, whose, **options)
                continue
            except Wrong:
                if options["rtol"]:
                    options["errors"] = errors(case, theirs, me)
            options["lookalikes"] = known(case, inputs, rank, theirs, me)
            try:
                expect_equal(value, right, whose, **options)
            except Wrong as wrong:
                if explain is not None:
                    wrong.otherwise = explain(case, theirs, me, value) or wrong.otherwise
                raise

    return Judge(judge, ANYTHING, refutes)


_OVER_ALL = "the result over all ranks, not over the group: pass group=group to every call"


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
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same(a, b)
    return type(a) is type(b) and repr(a) == repr(b)  # here NaN equals NaN


# What rounding allows ---------------------------------------------------------------------------

SAMPLES = 16
"""Of numbers that move each by itself, and as many of tensors that move as a whole."""
ROUNDINGS = 8
"""Roundings in a row that a right computation may make beyond those that an input goes through."""


def rounding_errors(
    right: Callable[[Sequence[Any]], Any], inputs: Sequence[Any], dtype: torch.dtype
) -> dict[str, float]:
    """Return the absolute error that a right answer may have at each of its places.

    Args:
        right: the right answer for some inputs. It is called with inputs in float64.
        inputs: the inputs of the members of a group.
        dtype: the dtype in which a right computation rounds.

    Returns:
        A name as in `leaves` → `ROUNDINGS` times the largest difference in this tensor. One
        number for a whole tensor, because intermediate results are shared by its elements.

    """
    generator = torch.Generator().manual_seed(0)
    unit = torch.finfo(dtype).eps / 2

    def moved(tensor: Tensor, by: float, together: bool) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        shape = () if together else tensor.shape
        signs = torch.randint(2, shape, generator=generator, dtype=torch.int8) * 2 - 1
        return tensor.double() * (1 + by * signs)

    def results(by: float, together: bool = False) -> Iterator[tuple[str, Any]]:
        return leaves(right(with_tensors(inputs, partial(moved, by=by, together=together))))

    exact = dict(results(0.0))
    errors = dict.fromkeys(exact, 0.0)
    for together in (False, True) * SAMPLES:
        for place, value in results(unit, together):
            if place in exact:
                errors[place] = max(errors[place], _distance(value, exact[place]))
    return {place: ROUNDINGS * error for place, error in errors.items()}


def _distance(value: Any, exact: Any) -> float:
    if isinstance(value, Tensor) and isinstance(exact, Tensor):
        if value.shape != exact.shape or not value.is_floating_point() or not value.numel():
            return 0.0
        return float((value.double() - exact.double()).abs().nan_to_num().max())
    number = isinstance(value, float) and isinstance(exact, float)
    return abs(value - exact) if number else 0.0


# A check whose answers a judge decides ------------------------------------------------------------


def by_judge(
    function: str,
    *,
    inputs: Callable[[Case, torch.Generator], Sequence[Any]],
    program: Program,
    judge: Judge | Test,
    cases: Sequence[Case],
    expects: Sequence[Expectation] = (),
    worth: Mapping[str, float] | None = None,
    seconds: float | None = None,
    answers: Callable[[Any, Any], tuple[Any, float]] | None = None,
    withheld: Sequence[str] = (),
    only_on: Sequence[int] = (),
) -> Check:
    """Return the check of a task without a reference: its author lists the cases.

    Args:
        function: name of the student's function.
        inputs: ``inputs(case, generator)`` draws one plain value per rank, usually a dict.
        program: ``program(function, own, given)`` runs on every rank.
        judge: ``judge(case, inputs, values)`` raises `Wrong`. ``@sees(form)`` declares which form
            of values it can look at.
        cases: the public cases.
        expects: the demands on the communication.
        worth: part → share of the points; see `Check`.
        seconds: time limit of one case.
        answers: answers what the program asks; see `Check`.
        withheld: keys of the input that only `answers` sees.
        only_on: the ranks whose program calls the student's function; empty: all ranks.

    """
    rank_program = RankProgram(program, (), answers, tuple(withheld))
    tester = judge if isinstance(judge, Judge) else Judge(judge)

    def drawn(case: Case, generator: torch.Generator) -> list[Any]:
        every = inputs(case, generator)
        form = {**vars(case.form), "seed": int(torch.randint(2**31, (), generator=generator))}
        return [{"form": form, "own": own} for own in every]

    def judged(case: Case, rank_inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        own = [each["own"] for each in rank_inputs]
        expect_right(
            *(rank_program, case, rank_inputs, outputs),
            lambda rank, value, name: expect_form(value, tester.form_of(case, own, rank), name),
            lambda values: tester.test(case, own, values),
        )

    return Check(
        function,
        program=rank_program,
        inputs=drawn,
        judge=judged,
        cases=tuple(cases),
        seconds=seconds,
        expects=tuple(expects),
        worth=dict(worth or {}),
        answers=None if answers is None else lambda own, question: answers(own["own"], question),
        withheld=tuple(withheld),
        only_on=tuple(only_on),
    )


def expect_right(
    program: RankProgram,
    case: Case,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    expect_form_of: Callable[[int, Any, str], None],
    judge: Callable[[Sequence[Any]], None],
) -> None:
    """Raise `Wrong` for the first finding: a form, an effect, a value, or a late effect.

    An effect that may explain a wrong value, such as a changed input, comes before the value.

    Args:
        program: what ran on the ranks.
        case: the case.
        inputs: what the ranks were given.
        outputs: what the ranks returned.
        expect_form_of: called with a rank, its value, and the words that name the rank.
        judge: called with the values of all ranks.

    """
    answers = [opened(rank, output) for rank, output in enumerate(outputs)]
    for rank, (value, _) in enumerate(answers):
        expect_form_of(rank, value, f"rank {rank}" if case.world_size > 1 else "")
    effects = [
        (rank, effect)
        for rank, (value, report) in enumerate(answers)
        for effect in _effects(program, rank, inputs[rank], value, report)
    ]
    _raise_first((rank, effect) for rank, effect in effects if effect.code not in LATE)
    judge([value for value, _ in answers])
    _raise_first(effects)


def opened(rank: int, output: Any) -> tuple[Any, Any]:
    """Return the value and the report in a rank's answer, if it has the form of `RankProgram`."""
    match output:
        case {"refused": str(reason), **rest} if not rest:
            raise Wrong(f"rank {rank}: {reason[:300]}")
        case {"value": value, "left": report, **rest} if not rest:
            return value, report
    raise Wrong(f"rank {rank} gave an answer that cannot be read")


def _effects(
    program: RankProgram, rank: int, rank_input: Any, value: Any, report: Any
) -> list[Effect]:
    seed, own = rank_input["form"]["seed"], without(rank_input["own"], program.withheld)
    try:
        return effects_of(report, own, value, may_change=program.may_change, seed=seed)
    except ValueError:
        raise Wrong(f"rank {rank} gave an answer that cannot be read") from None


def _raise_first(effects: Iterable[tuple[int, Effect]]) -> None:
    for rank, effect in effects:
        raise Wrong(f"rank {rank}: {effect.sentence}", effect.hint)


# Random results, judged by counting ---------------------------------------------------------------

ENOUGH = 50
"""A distribution is judged if each result is expected at least so often."""
CHANCE = 1e-9
"""If a right function gives such counts more rarely, they are wrong."""


def equally_likely(counts: Iterable[int], kinds: int) -> bool:
    """Return whether chance alone may give these counts, by Pearson's χ².

    Args:
        counts: how often each result came; those that never came may be missing.
        kinds: the number of results that are possible, at least two, all equally likely.

    """
    seen = torch.tensor(list(counts), dtype=torch.float64)
    expected = seen.sum() / kinds
    never = (kinds - len(seen)) * expected
    chi2 = ((seen - expected) ** 2 / expected).sum() + never
    freedom = torch.tensor((kinds - 1) / 2, dtype=torch.float64)
    return bool(torch.special.gammaincc(freedom, chi2 / 2) > CHANCE)
