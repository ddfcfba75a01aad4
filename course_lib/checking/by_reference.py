"""`by_reference`: a check whose right answers are those of a function of `course_lib`.

    "average_gradients": by_reference(
        "average_gradients",
        reference="course_lib.gradient_sync:sync_per_parameter",
        program=run_average,    program(function, inputs, case): calls it on a rank, returns values
        draw=draw_gradients,    draw(d): one input for each rank; see `draw.Draw`
        mistakes={"the sum over the ranks, not the mean": lambda inputs, me, expected: …},
    )

A case is a seed. Before the student's ranks start, the reference runs with the case's inputs on
simulated ranks. Its values are the right ones, and what it sends is what a right function may send:
see `communication`. How far a right value may be from the reference's follows from the arithmetic
of the case: see `rounding`. The reference is named as text, so nobody meets it who reads a check.
"""

from __future__ import annotations

import hashlib
import math
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from course_lib.checking.answers import expect_equal, expect_form
from course_lib.checking.cases import (
    NETWORK,
    AuthorError,
    Case,
    Check,
    Expectation,
    Form,
    Wrong,
    drawn_seed,
    own_of,
)
from course_lib.checking.communication import Allowed, after_the_barrier, expect_as_reference
from course_lib.checking.draw import Draw, Variety
from course_lib.checking.judges import expect_right, opened
from course_lib.checking.local import LocalRunner
from course_lib.checking.on_ranks.given import Given, Program, RankProgram
from course_lib.checking.on_ranks.leaves import leaves, same, tensors_in, with_tensors
from course_lib.checking.rounding import as_dtype, bounds_from, moved_inputs
from course_lib.ranks import Network, RanksError, Trace
from course_lib.ranks.costs import computation
from course_lib.ranks.explain.words import counted
from course_lib.ranks.wire import encode

PUBLIC_SEEDS = tuple(range(8))
"""The cases of a task whose seeds nobody has chosen yet; see `seeds`."""
HIDDEN_CASES = 8
"""How many cases a class's secret seed gives, in addition to the public ones."""
OVER_ALL = "the result over all ranks, not over the group: pass group=group to every call"
ALONE = "the result of this rank alone: nothing of the other ranks is in it"

Mistake = Callable[[Sequence[Any], int, Sequence[Any]], Any]
"""``mistake(inputs, me, expected)``: the value that a common mistake gives member `me` of a group.

`inputs` are the inputs of the group's members, `expected` the reference's values. The result may
have only some of the keys of the right value.
"""
Explain = Callable[[Sequence[Any], int, Sequence[Any], Any], str]
DrawNetwork = Callable[[Draw, Sequence[Any]], Network]
Judge = Callable[[Case, Sequence[Any], Sequence[Any], Sequence[Any]], None]
"""``judge(case, inputs, expected, values)`` raises `Wrong`; the lists are in rank order."""


def by_reference(
    function: str,
    *,
    seeds: Sequence[int] = PUBLIC_SEEDS,
    worth: Mapping[str, float] | None = None,
    expects: Sequence[Expectation] = (),
    **options: Any,
) -> Check:
    """Return the check of one task.

    Args:
        function: name of the student's function.
        seeds: the public cases; ``make seeds`` chooses them.
        worth: part → share of the points; see `Check`.
        expects: further demands on the communication.
        **options: the reference, the program, the draw, and what else a `Task` consists of.

    """
    task = Task(function, **options)
    return Check(
        function,
        program=task.rank_program,
        inputs=task.inputs,
        judge=task.judge_answers,
        cases=task.cases(seeds),
        expects=(Expectation(task.communication), *expects),
        worth=worth or {},
        computes=task.computes,
        prepare=task.expected,
        hidden=task.hidden,
        drawn=task.case,
    )


@dataclass
class Expected:
    """What the reference does in a case.

    Attributes:
        case: the case.
        inputs: what the ranks were given.
        values: what its program gives, one value per rank.
        trace: what its ranks send.
        computes: for each rank, the computation that its program declares; see `Check`.
        bounds: for each rank, a name as in `leaves` → the error that a right value may have; made
            when a value is not equal.

    """

    case: Case
    inputs: Sequence[Any]
    values: list[Any]
    trace: Trace
    computes: list[Counter[float]]
    bounds: list[dict[str, float]] | None = None

    def in_its_group(self, rank: int) -> tuple[list[Any], int, list[Any]]:
        """Return the arguments of a `Mistake`; it may write into the inputs."""
        members = self.case.members(rank)
        own_inputs = [with_tensors(self.inputs[member]["own"], torch.clone) for member in members]
        return own_inputs, members.index(rank), [self.values[member] for member in members]


@dataclass(frozen=True, eq=False)
class Task:
    """One task: draws its cases, runs its reference, and judges by what the reference did.

    Attributes:
        function: name of the student's function.
        reference: the function that is right, ``module:name``, with the student's signature.
        program: ``program(function, inputs, case)`` runs on every rank, for student and reference.
        draw: ``draw(d)`` returns one plain value per rank, usually a dict. Floating-point tensors
            are drawn in float64 and then converted to the case's dtype.
        variety: what cases may differ in.
        mistakes: words → `Mistake`. They are run when a case has failed, and one that explains all
            wrong values becomes the hint. The engine itself tries two for every task: the result
            over all ranks, and that of a rank alone.
        as_if: words → a function that changes the ranks' inputs: another kind of mistake, whose
            values are the reference's for the changed inputs.
        explain: ``explain(inputs, me, expected, value)`` returns a hint about the wrong value of
            member `me`, or an empty string, if no mistake explains it.
        judge: decides about the values, if several answers are right; it replaces the comparison
            with the reference's values, and sees only values of their form, see `expect_form`.
        exact: nothing is rounded, so every bit counts.
        same_bits: the members of a group must have the same bits.
        may_change: keys of the input that the function may change or return.
        allowed: what a right function may send that the reference does not.
        network: the network of the virtual clock, or ``network(d, inputs)``, which draws it.

    """

    function: str
    reference: str
    program: Program
    draw: Callable[[Draw], Sequence[Any]]
    variety: Variety = field(default_factory=Variety)
    mistakes: Mapping[str, Mistake] = field(default_factory=dict)
    as_if: Mapping[str, Callable[[Sequence[Any]], Sequence[Any]]] = field(default_factory=dict)
    explain: Explain | None = None
    judge: Judge | None = None
    exact: bool = False
    same_bits: bool = False
    may_change: Sequence[str] = ()
    allowed: Allowed = field(default_factory=Allowed)
    network: DrawNetwork | Network = NETWORK
    _records: dict[bytes, Expected] = field(default_factory=dict)

    @property
    def rank_program(self) -> RankProgram:
        """The program as the ranks run it."""
        return RankProgram(self.program, tuple(self.may_change))

    # Cases ----------------------------------------------------------------------------------------

    def cases(self, seeds: Sequence[int]) -> tuple[Case, ...]:
        """Return the public cases, each with a name of its own, the plain ones first."""
        cases = sorted(map(self.case, seeds), key=lambda case: case.difficulty)
        count = Counter(case.name for case in cases)
        return tuple(
            replace(case, name=f"{case.name}, № {case.parameters['seed']}")
            if count[case.name] > 1
            else case
            for case in cases
        )

    def hidden(self, secret: str) -> tuple[Case, ...]:
        """Return the cases of a class's secret seed."""
        cases = []
        for n in range(HIDDEN_CASES):
            digest = hashlib.sha256(f"{secret}/{self.function}/{n}".encode()).digest()
            case = self.case(int.from_bytes(digest[:6], "big"))
            cases.append(replace(case, name=f"{case.name}, № {n}"))
        return tuple(cases)

    def case(self, seed: int) -> Case:
        """Return the case of a seed."""
        case, before = self._alone(seed)
        if not before:
            return case
        features, *size = case.difficulty
        words, other = "for the second time", case
        if before == "another":
            words, other = "after another call", self._unlike(seed, case)
        name = f"{case.name}, {words}"
        return replace(case, name=name, after=other, difficulty=(features + 2, *size))

    def _unlike(self, seed: int, case: Case) -> Case:
        """Return another case with as many ranks, in other groups if the task has groups."""
        k = case.world_size
        other, _ = self._alone(seed + 1009, k)
        if self.variety.groups and k > 2 and len(other.groups) == len(case.groups):
            groups = () if case.form.groups else ((0, *range(2, k)), (1,))
            other = replace(other, form=replace(other.form, groups=groups))
        return other

    def _alone(self, seed: int, world_size: int | None = None) -> tuple[Case, str]:
        """Return the case of a seed without a call before it, and which call may come before."""
        d, inputs = self._drawn(seed, torch.Generator().manual_seed(0), None, world_size)
        network = self.network if isinstance(self.network, Network) else self.network(d, inputs)
        tensors, features = list(tensors_in(inputs)), list(d.words)
        dims = max((tensor.dim() for tensor in tensors if tensor.is_floating_point()), default=-1)
        if d.groups[1:]:
            features.insert(0, "in two groups")
        if dims >= 0 and d.form.dtype != self.variety.dtypes[0]:
            features.append(d.form.dtype)
        if dims >= {"contiguous": math.inf, "transposed": 2}.get(d.form.layout, 1):
            features.append(d.form.layout)
        largest = max(self.variety.ranks)
        ranks = [counted(d.world_size, "rank")] if largest > 1 else []
        alone = d.world_size == 1 < largest
        size = len(str(sum(tensor.numel() for tensor in tensors)))
        case = Case(
            ", ".join([*ranks, *features]) or "a plain case",
            d.world_size,
            {"seed": seed, "features": tuple(d.features)},
            d.form,
            network,
            difficulty=(len(features) + alone, d.world_size, size),
        )
        return case, d.before

    def _drawn(
        self, seed: int, numbers: torch.Generator, form: Form | None, world_size: int | None
    ) -> tuple[Draw, list[Any]]:
        d = Draw(seed, numbers, self.variety, form, world_size)
        return d, [
            with_tensors(inputs, partial(as_dtype, dtype=d.dtype)) for inputs in self.draw(d)
        ]

    def inputs(self, case: Case, generator: torch.Generator) -> list[Any]:
        """Draw the numbers of a case: one input per rank."""
        _, own_inputs = self._drawn(case.parameters["seed"], generator, case.form, case.world_size)
        inputs = case.given(own_inputs, drawn_seed(generator))
        if case.after is None:
            return inputs
        earlier = self.inputs(case.after, generator)
        return [{**given, "before": before} for given, before in zip(inputs, earlier, strict=True)]

    # The reference --------------------------------------------------------------------------------

    def expected(self, case: Case, inputs: Sequence[Any]) -> Expected:
        """Return what the reference does in a case; it runs once for the same inputs.

        Raises:
            AuthorError: it failed.

        """
        content = b"".join([repr((case.network, case.world_size)).encode(), *map(encode, inputs)])
        key = hashlib.sha256(content).digest()
        if key not in self._records:
            counted_values, trace = self._observe(case, inputs, _counting(self.program))
            values = [answer["value"] for answer in counted_values]
            computes = [Counter(answer["computes"]) for answer in counted_values]
            if case.after is not None:
                trace = after_the_barrier(trace) or trace
            self._records[key] = Expected(case, inputs, values, trace, computes)
        return self._records[key]

    def _observe(
        self, case: Case, inputs: Sequence[Any], program: Program
    ) -> tuple[list[Any], Trace]:
        """Run the reference on simulated ranks; return its values and the trace."""
        rank_program = replace(self.rank_program, program=program)
        # A machine that is busy must not make a reference fail, so its limit is long.
        check = Check(self.function, rank_program, self.inputs, self.judge_answers, (case,), 60)
        right = pkgutil.resolve_name(self.reference)
        try:
            observed = LocalRunner(right, "simulated", echo=None)(check, case, inputs)
            assert observed.trace is not None
            return [opened(r, out)[0] for r, out in enumerate(observed.outputs)], observed.trace
        except (RanksError, Wrong) as error:
            raise AuthorError(
                f"the reference of {self.function}, {self.reference}, failed in the case "
                f"{case.name!r} (seed {case.parameters['seed']}): {error}"
            ) from error

    def computes(self, case: Case, inputs: Sequence[Any]) -> list[Counter[float]]:
        """Return how often each rank's program declares each length of computation."""
        lengths = self.expected(case, inputs).computes
        if case.after is None:
            return lengths
        before = self.computes(case.after, [rank_input["before"] for rank_input in inputs])
        return [counts + first for counts, first in zip(lengths, before, strict=True)]

    def _bounds(self, expected: Expected) -> list[dict[str, float]]:
        """Return how far right values may be from the reference's, for each rank."""
        case, dtype = replace(expected.case, after=None), expected.case.form.dtype
        if self.exact or not getattr(torch, dtype).is_floating_point:
            return [{} for _ in expected.values]
        if expected.bounds is None:
            samples = moved_inputs(own_of(expected.inputs), dtype)
            inputs_in_turn = [list(rows) for rows in zip(*samples, strict=True)]
            given = case.given(inputs_in_turn, expected.inputs[0]["form"]["seed"])
            runs, _ = self._observe(case, given, _in_turn(self.program))
            pairs = zip(expected.values, runs, strict=True)
            expected.bounds = [bounds_from(value, sampled, dtype) for value, sampled in pairs]
        return expected.bounds

    # Judging --------------------------------------------------------------------------------------

    def judge_answers(self, case: Case, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Raise `Wrong` for the first finding: an effect, then a value, then a late effect."""
        expected = self.expected(case, inputs)

        def form(rank: int, value: Any, owner: str) -> None:
            expect_form(value, expected.values[rank], owner, kinds=self.judge is not None)

        def judge(values: Sequence[Any]) -> None:
            if self.judge is not None:
                self.judge(case, own_of(inputs), expected.values, values)
            else:
                self._expect_equal(expected, values)
            if self.same_bits:
                expect_same_bits(case, values)

        expect_right(self.rank_program, case, inputs, outputs, judge, form)

    def _expect_equal(self, expected: Expected, values: Sequence[Any]) -> None:
        for rank, (value, right) in enumerate(zip(values, expected.values, strict=True)):
            expect = partial(expect_equal, value, right, f"rank {rank}", rtol=0, atol=0)
            try:
                expect()
                continue
            except Wrong:
                bounds = self._bounds(expected)[rank]
            try:
                expect(errors=bounds, lookalikes=self._mistaken(expected, rank))
            except Wrong as finding:
                if self.explain is not None:
                    hint = self.explain(*expected.in_its_group(rank), value)
                    finding.otherwise = hint or finding.otherwise
                raise

    def _mistaken(self, expected: Expected, rank: int) -> Iterator[tuple[str, Any]]:
        """Yield common mistakes and the values that they give here."""
        for mistake_name, mistake in self.mistakes.items():
            value = mistake(*expected.in_its_group(rank))
            if value is not None:
                yield mistake_name, value
        case, own_inputs = expected.case, own_of(expected.inputs)
        for mistake_name, change in self.as_if.items():
            changed = change(with_tensors(own_inputs, torch.clone))
            yield mistake_name, self._elsewhere(expected, changed, case.form.groups)[rank]
        if len(case.groups) > 1:
            yield OVER_ALL, self._elsewhere(expected, own_inputs, ())[rank]
        if len(case.members(rank)) > 1:
            alone = tuple((member,) for member in range(case.world_size))
            yield ALONE, self._elsewhere(expected, own_inputs, alone)[rank]

    def _elsewhere(
        self, expected: Expected, own_inputs: Sequence[Any], groups: tuple[tuple[int, ...], ...]
    ) -> list[Any]:
        """Return what the reference gives for other inputs or groups; only None if it fails."""
        form = replace(expected.case.form, groups=groups)
        case = replace(expected.case, form=form, after=None)
        given = case.given(own_inputs, expected.inputs[0]["form"]["seed"])
        try:
            return self._observe(case, given, self.program)[0]
        except AuthorError:  # the inputs of a group need not fit another one
            return [None for _ in own_inputs]

    def communication(self, case: Case, observed: Any, trace: Trace) -> None:
        """Raise `Wrong` if a rank sends what the reference, and `Allowed`, do not explain."""
        right, timed = self.expected(case, observed.inputs).trace, observed.network is not None
        own_inputs = own_of(observed.inputs)
        expect_as_reference(case, own_inputs, trace, right, self.allowed, timed=timed)


def _in_turn(program: Program) -> Program:
    """Return a program that runs a task's program with one input after the other."""
    return lambda function, inputs, case: [program(function, sample, case) for sample in inputs]


def _counting(program: Program) -> Program:
    """Return a program that also returns the seconds of each `compute`, which a trace joins."""

    def run(function: Callable[..., Any], inputs: Any, case: Given) -> Any:
        spend, lengths = computation._local.compute, list[float]()
        assert spend is not None

        def count(seconds: float) -> None:
            lengths.append(seconds)
            spend(seconds)

        computation._local.compute = count
        try:
            return {"value": program(function, inputs, case), "computes": lengths}
        finally:
            computation._local.compute = spend

    return run


def expect_same_bits(case: Case, values: Sequence[Any]) -> None:
    """Raise `Wrong` unless all ranks of a group hold exactly the same bits."""
    for members in case.groups:
        first = dict(leaves(values[members[0]]))
        for rank in members[1:]:
            for place, value in leaves(values[rank]):
                if not _same_bits(value, first.get(place)):
                    raise Wrong(
                        f"{place} differs between rank {members[0]} and rank {rank}",
                        "Replicas must hold the same bits after every step, or they drift apart.",
                    )


def _same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same(a, b)
    return type(a) is type(b) and repr(a) == repr(b)  # here NaN equals NaN
