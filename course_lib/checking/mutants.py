"""Mark the solutions in an assignment's ``mutants.py``: which must fail and why, or must pass."""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

from course_lib.checking.report import CaseResult, CheckReport

Function = Callable[..., Any]


EVERYWHERE = ("simulated", "cpu", "grader")
"""Where checks run: on simulated ranks, on CPU ranks, and in the grader's sandbox."""

VIRTUAL = ("simulated", "grader")
"""Where time is exact, a message waits for its receiver, and a missing ``wait()`` is found."""


@dataclass(frozen=True)
class Mutant:
    """A solution of one task, with the reason that the check must give if it is wrong."""

    task: str
    mistake: str
    function: Function
    reason: str | None
    """Text that the report has for a failed case, see `says`; ``None`` for a right solution."""
    where: tuple[str, ...] = EVERYWHERE
    """The places in which it fails."""

    @property
    def source(self) -> str:
        """The source as a student would hand it in: named like the task, without the decorator."""
        tree = ast.parse(source_of(self.function))
        definition = tree.body[0]
        assert isinstance(definition, ast.FunctionDef)
        definition.decorator_list = [each for each in definition.decorator_list if not _marks(each)]
        for node in ast.walk(definition):  # a function that keeps state refers to its own name
            if isinstance(node, ast.Name) and node.id == definition.name:
                node.id = self.task
        definition.name = self.task
        return ast.unparse(definition)


def says(report: CheckReport, reason: str) -> bool:
    """Return whether the report says `reason` about a failed case.

    The text about a case is ``✗``, its name, its reason and its details. For a hidden case it is
    ``✗ hidden case`` and the reason. `reason` may also be in the sentence about what the failed
    cases have in common.
    """
    return reason in report.only or any(
        reason in " ".join(f"✗ {_said_of(result)}".split())
        for result in report.results
        if not result.passed
    )


def _said_of(result: CaseResult) -> str:
    if result.hidden:
        return f"hidden case {result.reason}"
    return f"{result.name} {result.reason} {result.detail}"


def _marks(decorator: ast.expr) -> bool:
    """Return whether a decorator is from this file; all others are part of the solution."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Name) and called.id in ("passes", "fails")


@cache
def source_of(function: Function) -> str:
    """Return the source text of a function, which may be an `edited` one."""
    return textwrap.dedent("".join(inspect.getsourcelines(function)[0]))


def edited(function: Function, *edits: tuple[str, str]) -> Function:
    """Return a function with the same text except for the edits, each an (old, new) pair of pieces.

    Every occurrence of the old piece is replaced by the new one. A piece of several lines consists
    of whole lines, without their indentation.

    Raises:
        ValueError: the text does not have the old piece, so the mutant would equal the function.

    """
    text = source_of(function)
    for old, new in edits:
        if "\n" in old + new:
            lines = r"\n\1".join(map(re.escape, old.split("\n")))
            indented = partial(_indented, new)
            text, found = re.subn(rf"^( *){lines}$", indented, text, flags=re.MULTILINE)
        else:
            text, found = text.replace(old, new), text.count(old)
        if not old or not found:
            raise ValueError(f"the source of {function.__name__} has no {old!r} to replace")
    name = f"<{function.__name__} edited, {hashlib.sha256(text.encode()).hexdigest()[:8]}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    namespace = dict(function.__globals__)
    exec(compile(text, name, "exec"), namespace)
    made: Function = namespace[function.__name__]
    made.__dict__.clear()
    return made


def _indented(lines: str, found: re.Match[str]) -> str:
    return textwrap.indent(lines, found[1])


def edits_of(function: Function) -> Callable[[str], None]:
    """Return a function that defines mutants in the module of `function`, as edits of its text.

    ``edits_of(step__by_hand)(text)`` reads mutants such as these from the text::

        climbs: the sign is wrong
            param -= lr * param.grad → param += lr * param.grad
        waits_at_once (simulated, grader): expected at most 3 ms
            work = start(param) → …; work.wait()
        walks_backwards passes
            for param in params:
                param -= lr * param.grad
          → for param in reversed(params):
          →     param -= lr * param.grad

    A mutant's first line has its mistake, the places in which it fails (if it does not fail in all
    of them), and the text that the report must contain. An edit is ``old → new``, or several old
    lines followed by several new lines with an arrow each; see `edited`. ``…`` in the new piece
    stands for the old piece. If first lines follow each other, their mutants have the same edits.

    Raises:
        ValueError: a first line has the wrong form, a mutant exists already, or the text does not
            have an edit's old piece.

    """
    task = function.__name__.partition("__")[0]

    def define(text: str) -> None:
        for heads, edits in _entries(text):
            for head in heads:
                name = f"{task}__{head['mistake']}"
                if name in function.__globals__:
                    raise ValueError(f"there is already a mutant {name}: choose another name")
                where = head["where"].split(", ") if head["where"] else EVERYWHERE
                mark = fails(head["reason"], only=where) if head["reason"] else passes
                try:
                    function.__globals__[name] = mark(edited(function, *edits))
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None

    return define


_PLACE = "|".join(EVERYWHERE)
_WHERE = rf" \((?P<where>({_PLACE})(, ({_PLACE}))*)\)"
_HEAD = re.compile(rf"(?P<mistake>\w+)( passes|({_WHERE})?: (?P<reason>.+))")
_Edits = list[tuple[str, str]]


def _entries(text: str) -> list[tuple[list[re.Match[str]], _Edits]]:
    """Return first lines and edits; mutants with the same edits are in the same entry."""
    entries: list[tuple[list[re.Match[str]], list[str]]] = []
    for line in text.strip("\n").splitlines():
        if line.startswith("  ") and entries:
            entries[-1][1].append(line)
            continue
        head = _HEAD.fullmatch(line)
        if head is None:
            raise ValueError(f"{line!r}: expected ‘mistake: words of the report’")
        if not entries or entries[-1][1]:
            entries.append(([], []))
        entries[-1][0].append(head)
    return [(heads, _edits(lines)) for heads, lines in entries]


def _edits(lines: list[str]) -> _Edits:
    """Return the edits in the lines below a first line; the code begins in column 4."""
    edits: list[tuple[list[str], list[str]]] = []
    for line in lines:
        if edits and line.startswith("  →"):
            edits[-1][1].append(line[4:])
            continue
        if not edits or edits[-1][1]:
            edits.append(([], []))
        old, arrow, new = line[4:].partition(" →")
        edits[-1][0].append(old)
        if arrow:
            edits[-1][1].append(new.strip())
    if edits and not edits[-1][1]:
        raise ValueError(f"{lines[-1].strip()!r}: expected a → and what comes in its place")
    pieces = [("\n".join(old), "\n".join(new)) for old, new in edits]
    return [(old, new.replace("…", old)) for old, new in pieces]


def fails(reason: str, *, only: Sequence[str] = EVERYWHERE) -> Callable[[Function], Function]:
    """Mark a wrong solution; the check's report must contain `reason`.

    `only`: the places in which it fails, if it does not fail in all of them. Time is exact only on
    a virtual clock. Gloo buffers small messages and so hides deadlocks. Only the grader hides
    modules.
    """

    def mark(function: Function) -> Function:
        function.__dict__.update(fails=reason, where=tuple(only))
        return function

    return mark


def passes(function: Function) -> Function:
    """Mark a right solution that differs from the reference."""
    function.__dict__["fails"] = None
    return function


def mutants_of(module: ModuleType) -> list[Mutant]:
    """Return the marked functions of a ``mutants.py``, in their order."""
    found = []
    for name, function in vars(module).items():
        if callable(function) and "fails" in getattr(function, "__dict__", {}):
            task, separator, mistake = name.partition("__")
            if not separator:
                raise ValueError(f"{name}: a mutant is named task__mistake")
            where = function.__dict__.get("where", EVERYWHERE)
            found.append(Mutant(task, mistake, function, function.__dict__["fails"], where))
    return found
