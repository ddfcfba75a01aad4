"""`task`: the short way to write a check, with the common judges, forms and effects.

An author writes what a case is, what a rank calls, and which values are right. This module draws
the inputs, looks for side effects, and compares the values:

    "average_gradients": task(
        function="average_gradients",
        inputs=…,            draws what each rank has, in float64
        program=…,           program(function, mine, given): calls it, returns plain values
        judges=(equals(mean, mistakes), same_on_all_ranks),
        expects=(only_calls("all_reduce"), sends_at_most(gradient_bytes)),
        cases=in_many_forms(Case("1 rank", 1), …),
    )
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from course_lib.checking.answers import Judge, Test, expect_form
from course_lib.checking.cases import Case, Check, Expectation, Form, Wrong
from course_lib.checking.causes import degenerate
from course_lib.checking.on_ranks.effects import LATE, Effect, effects_of
from course_lib.checking.on_ranks.given import Program, RankProgram, without
from course_lib.checking.on_ranks.leaves import tensors_in, with_tensors
from course_lib.ranks.wire import encode

Inputs = Callable[[Case, torch.Generator], Sequence[Any]]


def task(
    function: str,
    *,
    inputs: Inputs,
    program: Program,
    judges: Sequence[Judge | Test],
    cases: Sequence[Case],
    expects: Sequence[Expectation] = (),
    may_change: Sequence[str] = (),
    worth: Mapping[str, float] | None = None,
    seconds: float | None = None,
    in_turn: Sequence[tuple[int, int]] = (),
    computes: Callable[[Any], Mapping[float, int]] | None = None,
    answers: Callable[[Any, Any], tuple[Any, float]] | None = None,
    withheld: Sequence[str] = (),
    only_on: Sequence[int] = (),
) -> Check:
    """Return the check of one task.

    Args:
        function: name of the student's function.
        inputs: ``inputs(case, generator)`` draws one plain value per rank, usually a dict. It draws
            in float64; then floating-point tensors are converted to the case's dtype. So they use
            all bits of this dtype, and an answer that went through a narrower dtype is wrong. For
            half precisions, numbers that do not fit are made coarse; see `_coarse`.
        program: ``program(function, mine, given)`` runs on every rank.
        judges: look at the values of all ranks, one judge after the other; the first finding
            counts. A `Judge` sees only answers of its form; a plain function sees anything.
        cases: the public cases; see `in_many_forms`. They are run in the order of `from_plain`.
        expects: the demands on the communication.
        may_change: keys of the input that the function may change or return. It must not change
            the others.
        worth: part → share of the points; see `Check`.
        seconds: time limit of one case; by default `limits.CASE_SECONDS`.
        in_turn: pairs (i, j) of positions in `cases` as given here. Each pair makes one more case:
            case j on ranks that have just run case i. The two cases should differ in all arguments,
            or only in the drawn numbers. Then a function that keeps something from the first call
            fails.
        computes: ``computes(own)``: how long the program declares that a rank computes; see
            `Check`.
        answers: ``answers(own, question)`` answers what the program asks by ``given.ask``: it
            returns the answer and its virtual seconds. See `Check`. There must be no `in_turn`.
        withheld: keys of the input that only `answers` sees.
        only_on: the ranks whose program calls the student's function; empty: all ranks.

    """

    def dressed(case: Case, generator: torch.Generator) -> list[Any]:
        every = _drawn(inputs, case, generator)
        seed = int(torch.randint(2**31, (), generator=generator))
        form = {**vars(case.form), "seed": seed}
        drawn = [{"form": form, "own": own} for own in every]
        if case.after is None:
            return drawn
        before = dressed(case.after, generator)
        return [{**each, "before": first} for each, first in zip(drawn, before, strict=True)]

    def computed(rank_input: Any) -> Mapping[float, int]:
        assert computes is not None
        total = Counter(computes(rank_input["own"]))
        if "before" in rank_input:
            total.update(computed(rank_input["before"]))
        return total

    def answered(rank_input: Any, question: Any) -> tuple[Any, float]:
        assert answers is not None
        return answers(rank_input["own"], question)

    judge = _TaskJudge(
        tuple(each if isinstance(each, Judge) else Judge(each) for each in judges),
        tuple(may_change),
        tuple(withheld),
    )
    return Check(
        function,
        program=RankProgram(program, tuple(may_change), answers, tuple(withheld)),
        inputs=dressed,
        judge=judge,
        cases=from_plain(_in_turn([_with_its_form(case, inputs) for case in cases], in_turn)),
        seconds=seconds,
        expects=tuple(expects),
        worth=dict(worth or {}),
        computes=(lambda case, inputs: [*map(computed, inputs)]) if computes else None,
        refutes=judge.refutes,
        answers=answered if answers else None,
        withheld=tuple(withheld),
        only_on=tuple(only_on),
    )


def _drawn(inputs: Inputs, case: Case, generator: torch.Generator) -> list[Any]:
    dtype = getattr(torch, case.form.dtype)
    with _in_float64():
        drawn = inputs(case, generator)
    return [with_tensors(own, partial(_as_dtype, dtype=dtype)) for own in drawn]


@contextmanager
def _in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _as_dtype(drawn: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not drawn.is_floating_point():
        return drawn
    converted = drawn.to(dtype)
    is_half = dtype in (torch.bfloat16, torch.float16)
    return _coarse(drawn).to(dtype) if is_half and (converted != drawn).any() else converted


def _coarse(drawn: torch.Tensor) -> torch.Tensor:
    """Return the numbers in multiples of a sixteenth of the power of two above the largest one.

    A half precision adds such numbers of some ranks without rounding. So right answers are near
    each other in every order of the additions, and wrong ones are far from them.
    """
    _, exponent = torch.frexp(drawn[drawn.isfinite()].abs().max())
    unit = 2.0 ** (int(exponent) - 4)
    return (drawn / unit).round() * unit


@dataclass(frozen=True)
class _TaskJudge:
    """Unpacks what the ranks' programs returned, looks for side effects, and calls the judges.

    The judges are called only if all answers have the forms that the judges declare. An effect that
    may explain a wrong value, such as a changed input, is reported before the value.
    """

    judges: tuple[Judge, ...]
    may_change: tuple[str, ...]
    withheld: tuple[str, ...]

    def __call__(self, case: Case, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Raise `Wrong` for the first finding."""
        own = [each["own"] for each in inputs]
        opened = [_open(rank, output) for rank, output in enumerate(outputs)]
        for judge in self.judges:
            for rank, (value, _) in enumerate(opened):
                name = f"rank {rank}" if case.world_size > 1 else ""
                expect_form(value, judge.form_of(case, own, rank), name)
        effects = [
            (rank, effect)
            for rank, (value, left) in enumerate(opened)
            for effect in self._effects(rank, inputs[rank], value, left)
        ]
        _raise_first((rank, effect) for rank, effect in effects if effect.code not in LATE)
        for judge in self.judges:
            judge(case, own, [value for value, _ in opened])
        _raise_first(effects)

    def _effects(self, rank: int, rank_input: Any, value: Any, left: Any) -> list[Effect]:
        shown, seed = without(rank_input["own"], self.withheld), rank_input["form"]["seed"]
        try:
            return effects_of(left, shown, value, may_change=self.may_change, seed=seed)
        except ValueError:
            raise _unreadable(rank) from None

    def refutes(self, case: Case, inputs: Sequence[Any], causes: Collection[str]) -> set[str]:
        """Return the known mistakes that a right answer in this case rules out."""
        own = [each["own"] for each in inputs]
        return {cause for judge in self.judges for cause in judge.refutes(case, own, causes)}


def _open(rank: int, output: Any) -> tuple[Any, Any]:
    """Return the value and the report in a rank's answer, if it has the form of `RankProgram`."""
    match output:
        case {"refused": str(reason), **rest} if not rest:
            raise Wrong(f"rank {rank}: {reason[:300]}")
        case {"value": value, "left": left, **rest} if not rest:
            return value, left
    raise _unreadable(rank)


def _unreadable(rank: int) -> Wrong:
    return Wrong(f"rank {rank} gave an answer that cannot be read")


def _raise_first(effects: Iterable[tuple[int, Effect]]) -> None:
    for rank, effect in effects:
        raise Wrong(f"rank {rank}: {effect.sentence}", effect.hint)


def _in_turn(cases: Sequence[Case], pairs: Sequence[tuple[int, int]]) -> tuple[Case, ...]:
    made = []
    for i, j in pairs:
        before, case = cases[i], cases[j]
        if before.world_size != case.world_size:
            raise ValueError(
                f"in_turn=({i}, {j}), counted from 0: ‘{before.name}’ has "
                f"{before.world_size} ranks and ‘{case.name}’ {case.world_size}; both must have "
                "the same number of ranks"
            )
        if before.after is not None or case.after is not None:
            raise ValueError(f"in_turn=({i}, {j}): one of the two already comes after another case")
        made.append(replace(case, name=f"{case.name}, after ‘{before.name}’", after=before))
    return (*cases, *made)


def _with_its_form(case: Case, inputs: Inputs) -> Case:
    """Return the case with the dtype and layout of its tensors in its name.

    They are in the name only if they change an input: Python's numbers have no dtype and no layout,
    and a vector cannot be transposed.
    """
    plain, form, special = Form(), case.form, []

    def drawn(case: Case) -> list[Any]:
        return _drawn(inputs, case, torch.Generator().manual_seed(0))

    if form.dtype != plain.dtype:
        in_plain_dtype = replace(case, form=replace(form, dtype=plain.dtype))
        if [*map(encode, drawn(case))] != [*map(encode, drawn(in_plain_dtype))]:
            special.append(form.dtype)
    if form.layout != plain.layout:
        least = 2 if form.layout == "transposed" else 1
        if any(tensor.dim() >= least for tensor in tensors_in(drawn(case))):
            special.append(form.layout)
    return replace(case, name=f"{case.name} ({', '.join(special)})") if special else case


def from_plain(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Return the cases in the order in which they are run.

    First come plain cases (contiguous float32, one group), and among them the cases that are not
    `degenerate`. Then come other layouts, other dtypes, several groups, and an earlier call. So a
    mistake shows first in a case in which nothing else is special.
    """

    def special(case: Case) -> tuple[int, bool]:
        form, plain = case.form, Form()
        ways = (
            form.layout != plain.layout,
            form.dtype != plain.dtype,
            len(case.groups) > 1,
            case.after is not None,
        )
        return max((i for i, way in enumerate(ways, 1) if way), default=0), degenerate(case, cases)

    return tuple(sorted(cases, key=special))


def in_many_forms(
    *cases: Case,
    dtypes: Sequence[str] = ("float32", "float64", "bfloat16"),
    layouts: Sequence[str] = ("contiguous", "transposed"),
    iterables: Sequence[str] = ("list", "generator", "tuple"),
    modes: Sequence[bool] = (True, False),
    groups: bool = True,
) -> tuple[Case, ...]:
    """Return the cases with forms; each form is used as often as the others.

    A right function does not depend on the form. The first case that is not `degenerate` is plain
    (float32, contiguous, one group, a list), and so are all cases before it. Every second case
    with three ranks or more works in two groups at once: the ranks in the middle, and the ranks
    around them. With groups of even and odd ranks, a function that guesses the members of its group
    could pass. A case that already has a form keeps it.
    """
    order = sorted(range(len(cases)), key=lambda index: degenerate(cases[index], cases))
    plain = next((index for index in order if cases[index].form == Form()), 0)
    formed, many = [], 0
    for index, case in enumerate(cases):
        i = max(0, index - plain)
        split: tuple[tuple[int, ...], ...] = ()
        if case.world_size > 2 and groups:
            many += 1
            if many % 2 == 0 and i:
                split = _around_and_middle(case.world_size)
        form = Form(
            split,
            dtypes[i % len(dtypes)],
            layouts[(i + i // len(layouts)) % len(layouts)],
            iterables[(i + i // len(iterables)) % len(iterables)],
            modes[(i + 1) // 2 % len(modes)],
        )
        formed.append(case if case.form != Form() else replace(case, form=form))
    return tuple(formed)


def _around_and_middle(k: int) -> tuple[tuple[int, ...], ...]:
    middle = range(-(-k // 4), -(-k // 4) + k // 2)
    return tuple(rank for rank in range(k) if rank not in middle), tuple(middle)
