"""Marks for an assignment's ``mutants.py``: what must fail, why, and what must pass."""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

Function = Callable[..., Any]


EVERYWHERE = ("simulated", "cpu", "grader")
"""Where checks run: on simulated ranks, on CPU ranks, and in the grader's sandbox."""

VIRTUAL = ("simulated", "grader")
"""Where time is exact, a message waits for its receiver, and an unwaited handle is found."""


@dataclass(frozen=True)
class Mutant:
    """A solution of one task, with what the check must say about it."""

    task: str
    mistake: str
    function: Function
    reason: str | None
    """Text that the report must contain; ``None`` if the solution is right."""
    where: tuple[str, ...] = EVERYWHERE
    """The places in which it fails."""

    @property
    def source(self) -> str:
        """The function as a student would hand it in: named like the task, without the mark."""
        tree = ast.parse(source_of(self.function))
        definition = tree.body[0]
        assert isinstance(definition, ast.FunctionDef)
        definition.decorator_list = [each for each in definition.decorator_list if not _marks(each)]
        for node in ast.walk(definition):  # one that keeps something calls itself by its name
            if isinstance(node, ast.Name) and node.id == definition.name:
                node.id = self.task
        definition.name = self.task
        return ast.unparse(definition)


def _marks(decorator: ast.expr) -> bool:
    """Return whether a decorator is one of this file's; any other is part of the solution."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Name) and called.id in ("passes", "fails")


@cache
def source_of(function: Function) -> str:
    """Return the source text of a function, also of an `edited` one."""
    return textwrap.dedent("".join(inspect.getsourcelines(function)[0]))


def edited(function: Function, *edits: tuple[str, str]) -> Function:
    """Return a function of the same text but for the edits, each an (old, new) piece of it.

    Raises:
        ValueError: the text does not have the old piece; the mutant would be none.

    """
    text = source_of(function)
    for old, new in edits:
        if old not in text:
            raise ValueError(f"{function.__name__} has no {old!r}")
        text = text.replace(old, new)
    name = f"<{function.__name__} edited, {hashlib.sha256(text.encode()).hexdigest()[:8]}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    namespace = dict(function.__globals__)
    exec(compile(text, name, "exec"), namespace)
    made: Function = namespace[function.__name__]
    made.__dict__.clear()
    return made


def fails(reason: str, *, only: Sequence[str] = EVERYWHERE) -> Callable[[Function], Function]:
    """Mark a wrong solution; the check's report must contain `reason`.

    `only`: the places in which it fails, where it is not found in all. Time is exact on a virtual
    clock alone, gloo keeps small messages and so hides deadlocks, and only the grader hides
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
