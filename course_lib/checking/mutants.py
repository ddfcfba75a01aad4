"""What an assignment's ``mutants.py`` is made of: right solutions, wrong ones, and edits.

Try a file of such solutions on a check, with the public cases and those of a secret seed:

    python -m course_lib.checking.mutants 02_data_parallel_sgd my_solutions.py --seed 7
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import linecache
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from course_lib.checking.cases import Check
from course_lib.checking.loading import find_assignment, load_checks, load_module
from course_lib.checking.local import LocalRunner
from course_lib.checking.report import CheckReport
from course_lib.checking.run_check import run_check

Function = Callable[..., Any]


EVERYWHERE = ("simulated", "cpu", "grader")
"""Where checks run: on simulated ranks, on CPU ranks, and in the grader's sandbox."""

VIRTUAL = ("simulated", "grader")
"""Where time is exact, a message waits for its receiver, and a missing ``wait()`` is found."""


@dataclass(frozen=True)
class Solution:
    """A solution of one task, with the reason that the check must give if it is wrong."""

    task: str
    mistake: str
    text: str
    """A function definition, as `mutants.py` has it."""
    reason: str | None
    """Text that the report has for a failed case, see `says`; ``None`` for a right solution."""
    where: tuple[str, ...] = EVERYWHERE
    """The places in which it fails."""
    names: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """What the function may refer to."""

    @cached_property
    def source(self) -> str:
        """The source as a student would hand it in: named like the task, without the mark."""
        definition = ast.parse(self.text).body[0]
        assert isinstance(definition, ast.FunctionDef)
        definition.decorator_list = [
            decorator for decorator in definition.decorator_list if not _marks(decorator)
        ]
        for node in ast.walk(definition):  # a function that keeps state refers to its own name
            if isinstance(node, ast.Name) and node.id == definition.name:
                node.id = self.task
        definition.name = self.task
        return ast.unparse(definition)

    @cached_property
    def function(self) -> Function:
        """The function; a traceback shows its lines."""
        text = self.source
        name = f"<{self.task}__{self.mistake}, {hashlib.sha256(text.encode()).hexdigest()[:8]}>"
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
        namespace = dict(self.names)
        exec(compile(text, name, "exec"), namespace)
        function: Function = namespace[self.task]
        return function


def _marks(decorator: ast.expr) -> bool:
    """Return whether a decorator is from this file; all others are part of the solution."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Name) and called.id in ("passes", "fails")


def passes(function: Function) -> Solution:
    """Mark a right solution that differs from the reference; its name is ``task__mistake``."""
    return _solution(function, None, EVERYWHERE)


def fails(reason: str, places: tuple[str, ...] = EVERYWHERE) -> Callable[[Function], Solution]:
    """Mark a wrong solution, named ``task__mistake``; the check's report must contain `reason`.

    `places`: the places in which it fails, if it does not fail in all of them. Time is exact only
    on a virtual clock. Gloo buffers small messages and so hides deadlocks. Only the grader hides
    modules.
    """
    return lambda function: _solution(function, reason, places)


def _solution(function: Function, reason: str | None, places: tuple[str, ...]) -> Solution:
    task, separator, mistake = function.__name__.partition("__")
    if not separator:
        raise ValueError(f"{function.__name__}: a solution is named task__mistake")
    text = textwrap.dedent(inspect.getsource(function))
    return Solution(task, mistake, text, reason, places, inspect.unwrap(function).__globals__)


@dataclass(frozen=True)
class Mutant:
    """An edit of a solution: in its text, every `old` piece becomes `new`.

    A piece of several lines consists of whole lines; how far they are indented does not matter.
    """

    name: str
    says: str | None
    """Text that the report must contain; ``None`` if the edited solution is right."""
    old: str
    new: str
    where: tuple[str, ...] = EVERYWHERE
    """The places in which it fails."""
    also: tuple[tuple[str, str], ...] = ()
    """Further edits of the same text, each an (old, new) pair."""


def edits_of(solution: Solution, *mutants: Mutant) -> list[Solution]:
    """Return the edited solutions.

    Raises:
        ValueError: the text does not have one of a mutant's old pieces.

    """
    solutions = []
    for mutant in mutants:
        label = f"{mutant.name}: the text of {solution.task}__{solution.mistake}"
        text = edited(solution.text, ((mutant.old, mutant.new), *mutant.also), label)
        new = replace(solution, mistake=mutant.name, text=text, reason=mutant.says)
        solutions.append(replace(new, where=mutant.where))
    return solutions


def edited(text: str, edits: Iterable[tuple[str, str]], label: str) -> str:
    """Return the text after all edits, each an (old, new) pair; see `Mutant`.

    Raises:
        ValueError: the text, called `label`, does not have one of the old pieces.

    """
    for old, new in edits:
        before, text = text, replaced(text, old, new)
        if not old or text == before:
            raise ValueError(f"{label} has no {old!r} to replace")
    return text


def replaced(text: str, old: str, new: str) -> str:
    """Return the text with `new` for every `old`; see `Mutant`."""
    if "\n" not in old + new:
        return text.replace(old, new)
    old, new = (textwrap.dedent(piece).strip("\n ") for piece in (old, new))
    first, *following = map(re.escape, old.split("\n"))
    further_lines = "".join(rf"\n\1{line}" if line else r"\n" for line in following)
    return re.sub(
        rf"^( *){first}{further_lines}$",
        lambda match: textwrap.indent(new, match[1]),
        text,
        flags=re.MULTILINE,
    )


def mutants_of(module: ModuleType) -> list[Solution]:
    """Return the solutions that a ``mutants.py`` defines, in their order.

    Raises:
        ValueError: two solutions of a task have the same name.

    """
    solutions: dict[tuple[str, str], Solution] = {}
    for value in vars(module).values():
        for solution in value if isinstance(value, list) else [value]:
            if not isinstance(solution, Solution):
                continue
            key = solution.task, solution.mistake
            if key in solutions:
                raise ValueError(f"there are two solutions {'__'.join(key)}: choose another name")
            solutions[key] = solution
    return list(solutions.values())


def says(report: CheckReport, reason: str) -> bool:
    """Return whether the report says `reason` about a failed case.

    The text about a case is ``✗``, its name, its reason and its details. For a hidden case it is
    ``✗ hidden case`` and the reason.
    """
    texts = (
        f"✗ hidden case {result.reason}"
        if result.hidden
        else f"✗ {result.name} {result.reason} {result.detail}"
        for result in report.results
        if not result.passed
    )
    return any(reason in " ".join(text.split()) for text in texts)


# The command --------------------------------------------------------------------------------------


def report_on(
    name: str, check: Check, solution: Solution, secret: str | None = None, explain: bool = True
) -> CheckReport:
    """Return the report on one solution: public cases, and those of a secret if there is one."""
    hidden = () if secret is None else check.hidden(secret)
    with LocalRunner(solution.function, "simulated", echo=None) as runner:
        return run_check(
            name, check, runner, seed=secret or "public", hidden=hidden, explain=explain
        )


def main() -> int:
    """Run a file of solutions; return 1 if a wrong one passes or a right one is refused."""
    parser = argparse.ArgumentParser(
        prog="python -m course_lib.checking.mutants",
        description="Run right and wrong solutions on an assignment's checks, on simulated ranks. "
        'The file has functions named task__mistake, marked with @passes or @fails(""), as in '
        "instructor/NN_name/mutants.py.",
    )
    parser.add_argument("assignment", help="its name or its number")
    parser.add_argument("file", type=Path, help="a Python file with solutions")
    parser.add_argument("--seed", help="try the hidden cases of this secret, too")
    options = parser.parse_args()
    assignment, folder = find_assignment(options.assignment)
    checks = load_checks(folder / "checks.py")
    amiss: list[str] = []
    solutions = mutants_of(load_module(options.file))
    if not solutions:
        parser.error(f"{options.file} has no function that is marked with @passes or @fails")
    for solution in solutions:
        if "simulated" not in solution.where:
            continue
        label = f"{solution.task}__{solution.mistake}"
        if solution.task not in checks:
            amiss.append(f"{label}: {assignment} has no check of this name")
            continue
        report = report_on(
            f"{assignment}/{solution.task}", checks[solution.task], solution, options.seed
        )
        failed = [result for result in report.results if not result.passed]
        kind = "right" if solution.reason is None else "wrong"
        says = f": {failed[0].reason}" if failed else ""
        line = f"{kind} {label}: refused by {len(failed)} of {len(report.results)} cases{says}"
        print(line[:240], flush=True)
        if bool(failed) == (solution.reason is None):
            amiss.append(line)
    print(f"\n{len(amiss)} surprises: wrong ones that survive, and right ones that are refused")
    print("\n".join(amiss))
    return 1 if amiss else 0


if __name__ == "__main__":
    # A file of solutions imports this module by its name, and not as __main__.
    from course_lib.checking import mutants

    raise SystemExit(mutants.main())
