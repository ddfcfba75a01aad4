"""A task whose solution is a check: the student's function tells right solutions from wrong ones.

A case is one solution, right or wrong, of an earlier task. Rank 0 calls the student's function. The
solution runs on the other ranks, so the student's function cannot look at it: it can only run it,
with inputs of its own, and look at the results. Each case has fresh ranks in the grader, so nothing
is remembered from one solution to the next.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from course_lib.checking.answers import describe
from course_lib.checking.cases import Case, Check, Wrong
from course_lib.checking.judges import by_judge
from course_lib.checking.mutants import edited
from course_lib.checking.on_ranks.given import Given
from course_lib.ranks.wire import decode, encode

MOST = 3
"""Ranks on which a solution can be run."""

Call = Callable[[Callable[..., Any], Any, Any], Any]
"""``call(solution, mine, group)``: call the solution with one rank's input; return its result."""
Expect = Callable[[Sequence[Any]], None]
"""``expect(inputs)`` raises ``ValueError`` if a solution cannot be run with the ranks' inputs."""


@dataclass(frozen=True)
class Candidate:
    """A solution that the student's function has to judge.

    Attributes:
        function: the solution. It uses no name from outside but ``torch`` and ``dist``.
        kind: what is special, after "a solution that", for example ``does not divide``.
        part: the part of the points that this solution can cost.
        right: whether it is right.
        edits: changes of its text, each an (old, new) pair; see `mutants.Mutant`.

    """

    function: Callable[..., Any]
    kind: str
    part: str
    right: bool = False
    edits: tuple[tuple[str, str], ...] = ()

    def case(self) -> Case:
        """Return the case in which this solution is judged."""
        name = self.function.__name__
        text = textwrap.dedent(inspect.getsource(self.function))
        parameters = {
            "source": edited(text, self.edits, f"the text of {name}"),
            "name": name,
            "right": self.right,
            "kind": self.kind,
        }
        return Case(
            f"a {'right' if self.right else 'wrong'} solution: it {self.kind}",
            *(1 + MOST, parameters),
            decides=(self.part,),
            in_short=_verdict(self.right, self.kind),
        )


class SolutionError(RuntimeError):
    """The unknown solution has raised an exception."""


def testing_task(
    function: str,
    *,
    call: Call,
    expect: Expect,
    candidates: Sequence[Candidate],
    worth: Mapping[str, float],
) -> Check:
    """Return the check of a task in which a student writes ``function(run) -> bool``.

    ``run(inputs)`` runs an unknown solution on ``len(inputs)`` ranks, 1 to `MOST`, and returns the
    ranks' results. If the solution raises, so does ``run``. The function returns whether the
    solution is right; one that lets this exception pass refuses the solution, too.

    Args:
        function: name of the student's function.
        call: calls a solution on one of its ranks.
        expect: refuses inputs that the solution's ranks could not be given.
        candidates: the solutions to judge.
        worth: part → its share of the points. A part is earned if all of its wrong solutions are
            found and all of its right ones are accepted. So every part needs both.

    """

    def program(is_right: Callable[..., Any], solution: Any, case: Given) -> Any:
        groups = [  # the first k ranks with the solution, and the rest
            case.group_among([list(range(1, 1 + k)), [0, *range(1 + k, 1 + MOST)]])
            for k in range(1, 1 + MOST)
        ]
        if dist.get_rank() > 0:
            _serve(solution, case, groups, call)
            case.watch.seed_generators()  # a test may draw random numbers, and so may a solution
            return None

        def request(inputs: Sequence[Any]) -> None:
            for rank in range(1, 1 + MOST):
                rank_input = inputs[rank - 1] if rank <= len(inputs) else None
                _send({"ranks": len(inputs), "input": rank_input}, rank, case)

        def run(inputs: Sequence[Any]) -> list[Any]:
            inputs = list(inputs)
            if not 1 <= len(inputs) <= MOST:
                raise ValueError(
                    f"a solution runs on 1 to {MOST} ranks: pass a list with one input per rank, "
                    f"got {len(inputs)}"
                )
            expect(inputs)
            request(inputs)
            answers = [_receive(rank, case) for rank in range(1, 1 + len(inputs))]
            for rank, answer in enumerate(answers):
                if "error" in answer:
                    raise SolutionError(f"the solution raised on rank {rank}: {answer['error']}")
            return [answer["result"] for answer in answers]

        try:
            verdict = is_right(run)
        except SolutionError:
            verdict = False
        finally:
            request([])  # this ends the other ranks
        case.watch.seed_generators()
        return verdict.item() if isinstance(verdict, torch.Tensor) else verdict

    return by_judge(
        function,
        inputs=_inputs,
        program=program,
        judge=_right_verdict,
        cases=[candidate.case() for candidate in candidates],
        worth=worth,
        only_on=(0,),
    )


def _inputs(case: Case, generator: torch.Generator) -> list[dict[str, str]]:
    """Give the solution to all ranks but the one that runs the student's function."""
    solution = {key: case.parameters[key] for key in ("source", "name")}
    return [{}] + [dict(solution) for _ in range(MOST)]


def _right_verdict(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    if not isinstance(values[0], bool):
        raise Wrong(f"the answer is {describe(values[0])}, expected True or False")
    if values[0] != case.parameters["right"]:
        raise Wrong(_verdict(case.parameters["right"], case.parameters["kind"]))


def _verdict(right: bool, kind: str) -> str:
    if right:
        return f"your check refuses a right solution. It {kind}"
    return f"a wrong solution survives your check. It {kind}"


# On the ranks -----------------------------------------------------------------------------------


def _serve(
    solution: Mapping[str, str], case: Given, groups: Sequence[dist.ProcessGroup], call: Call
) -> None:
    """Run the solution each time that rank 0 asks for it."""
    namespace: dict[str, Any] = {"torch": torch, "dist": dist}
    exec(compile(solution["source"], "<solution>", "exec"), namespace)
    while k := (request := _receive(0, case))["ranks"]:
        if dist.get_rank() > k:
            continue
        try:
            answer = {"result": call(namespace[solution["name"]], request["input"], groups[k - 1])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        _send(answer, 0, case)


def _send(value: Any, rank: int, case: Given) -> None:
    data = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8).to(case.device)
    dist.send(torch.tensor([len(data)], device=case.device), rank)
    dist.send(data, rank)


def _receive(rank: int, case: Given) -> Any:
    length = torch.zeros(1, dtype=torch.int64, device=case.device)
    dist.recv(length, rank)
    data = torch.zeros(int(length), dtype=torch.uint8, device=case.device)
    dist.recv(data, rank)
    return decode(data.cpu().numpy().tobytes())
