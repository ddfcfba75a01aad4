"""`by_judge`: a check without a reference, because any answer is right that its judge accepts.

    "train": by_judge(
        "train",
        inputs=race_inputs,     inputs(case, generator): draws one input for each rank
        program=run_race,       program(function, inputs, case): calls it on a rank, returns values
        judge=reaches_target,   judge(case, inputs, values): raises `Wrong`
        cases=(SMALL, LARGE),
    )

The steps of judging are shared with `by_reference`. `equally_likely` judges random results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from course_lib.checking.cases import Case, Check, Wrong, drawn_seed, own_of
from course_lib.checking.on_ranks.effects import LATE, Effect, effects_of
from course_lib.checking.on_ranks.given import Program, RankProgram, without

Test = Callable[[Case, Sequence[Any], Sequence[Any]], None]
"""``test(case, inputs, values)`` raises `Wrong`; both lists are in rank order."""


def by_judge(
    function: str,
    *,
    inputs: Callable[[Case, torch.Generator], Sequence[Any]],
    program: Program,
    judge: Test,
    cases: Sequence[Case],
    answers: Callable[[Any, Any], tuple[Any, float]] | None = None,
    withheld: Sequence[str] = (),
    **options: Any,
) -> Check:
    """Return the check of a task without a reference: its author lists the cases.

    Args:
        function: name of the student's function.
        inputs: ``inputs(case, generator)`` draws one plain value per rank, usually a dict.
        program: ``program(function, inputs, case)`` runs on every rank.
        judge: ``judge(case, inputs, values)`` raises `Wrong`. An odd answer that breaks it is
            wrong.
        cases: the public cases.
        answers: answers what the program asks; see `Check`.
        withheld: keys of the input that only `answers` sees.
        **options: ``expects``, ``worth``, ``seconds`` and ``only_on``; see `Check`.

    """
    rank_program = RankProgram(program, (), answers, tuple(withheld))

    def drawn(case: Case, generator: torch.Generator) -> list[Any]:
        own_inputs = inputs(case, generator)
        return case.given(own_inputs, drawn_seed(generator))

    def judged(case: Case, rank_inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        test = partial(judge, case, own_of(rank_inputs))
        expect_right(rank_program, case, rank_inputs, outputs, test)

    return Check(
        function,
        program=rank_program,
        inputs=drawn,
        judge=judged,
        cases=tuple(cases),
        answers=answers,
        withheld=tuple(withheld),
        **options,
    )


def expect_right(
    program: RankProgram,
    case: Case,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    judge: Callable[[Sequence[Any]], None],
    form: Callable[[int, Any, str], None] = lambda *_: None,
) -> None:
    """Raise `Wrong` for the first finding: a form, an effect, a value, or a late effect.

    An effect that may explain a wrong value, such as a changed input, comes before the value.

    Args:
        program: what ran on the ranks.
        case: the case.
        inputs: what the ranks were given.
        outputs: what the ranks returned.
        judge: called with the values of all ranks.
        form: called first with each rank, its value, and the words that name the rank.

    """
    answers = [opened(rank, output) for rank, output in enumerate(outputs)]
    for rank, (value, _) in enumerate(answers):
        form(rank, value, f"rank {rank}" if case.world_size > 1 else "")
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
    seed, own_input = rank_input["form"]["seed"], without(rank_input["own"], program.withheld)
    try:
        return effects_of(report, own_input, value, may_change=program.may_change, seed=seed)
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
    observed = torch.tensor(list(counts), dtype=torch.float64)
    expected = observed.sum() / kinds
    never = (kinds - len(observed)) * expected
    chi2 = ((observed - expected) ** 2 / expected).sum() + never
    freedom = torch.tensor((kinds - 1) / 2, dtype=torch.float64)
    return bool(torch.special.gammaincc(freedom, chi2 / 2) > CHANCE)
