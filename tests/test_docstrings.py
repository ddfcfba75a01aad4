"""Docstrings name only modules, names and paths that exist.

If a file is moved, its imports must change too, or nothing runs. Text about it can stay unchanged,
and sends the next reader to a place that no longer exists.
"""

import ast
import builtins
import re
from functools import cache

import pytest

from tests.helpers import ROOT

PACKAGES = ("course_lib", "autograder")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@pytest.fixture(scope="module", autouse=True)
def forget():
    yield
    parsed.cache_clear()  # of a tenth of a gigabyte


@cache
def parsed(path) -> ast.Module:
    return ast.parse(path.read_text())


def docstrings(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, ast.get_docstring(node) or ""


@cache
def names_in_code() -> set[str]:
    """Return every name in the code of the packages: of modules, functions, arguments, …"""
    names = {*dir(builtins), *(part for path in FILES for part in path.with_suffix("").parts)}
    for path in FILES:
        for node in ast.walk(parsed(path)):
            for field in ("id", "attr", "arg", "name", "asname", "module"):
                if isinstance(value := getattr(node, field, None), str):
                    names.update(value.split("."))
    return names


def unknown(words: list[str]) -> list[str]:
    """Return those of the quoted words that look like names and are none, of ours or of PyTorch."""
    return [
        word
        for word in words
        if NAME.fullmatch(word)
        and not word.startswith("torch.")
        and not names_in_code().issuperset(word.split("."))
    ]


def lower(words: list[str]) -> list[str]:
    return [word for word in words if word[0].islower()]


def shown(path) -> str:
    return str(path.relative_to(ROOT))


def in_files(problems_of, files=FILES) -> str:
    """Return what is wrong, a line for each file, in all of them: they are read once, here."""
    assert files
    found = ((path, problems_of(path)) for path in files)
    return "\n".join(f"{shown(path)}: {', '.join(wrong)}" for path, wrong in found if wrong)


def test_a_docstring_names_what_there_is() -> None:
    """For classes and functions take only names with a dot: a word may be an option's value."""

    def misnamed(path) -> list[str]:
        wrong = []
        for node, text in docstrings(path):
            words = lower(QUOTED.findall(text))
            if not isinstance(node, ast.Module):
                words = [word for word in words if "." in word]
            wrong += unknown(words)
        return wrong

    assert not (wrong := in_files(misnamed)), f"spoken of, and nothing is called so:\n{wrong}"


def test_a_docstring_lists_the_arguments_that_there_are() -> None:
    def others(path) -> list[str]:
        wrong = []
        for node, text in docstrings(path):
            section = re.search(r"^Args:\n((?:    .*\n|\n)+)", f"{text}\n", re.MULTILINE)
            if section and not isinstance(node, ast.Module):
                listed = re.findall(r"^    (\w+):", section[1], re.MULTILINE)
                if listed != (there := arguments_of(node)):
                    wrong.append(f"line {node.lineno} lists {listed}, and there are {there}")
        return wrong

    assert not (wrong := in_files(others)), wrong


def arguments_of(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    """Return the arguments of a function, or of the constructor of a class."""
    if isinstance(node, ast.ClassDef):
        inits = [each for each in node.body if getattr(each, "name", "") == "__init__"]
        if not inits:  # a dataclass
            return [each.target.id for each in node.body if isinstance(each, ast.AnnAssign)]
        node = inits[0]
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [each.arg for each in every if each.arg not in ("self", "cls")]
