"""Docstrings name only modules, names and paths that exist.

If a file is moved, its imports must change too, or nothing runs. Text about it can stay unchanged,
and sends the next reader to a place that no longer exists.
"""

import ast
import builtins
import re

import pytest

from tests.helpers import ROOT

PACKAGES = ("course_lib", "autograder")

QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
NAME = re.compile(r"[a-z]\w*(\.[A-Za-z_]\w*)*")


@pytest.fixture(scope="module")
def trees():
    """Return the syntax tree of every file of the packages."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {path.relative_to(ROOT): ast.parse(path.read_text()) for path in files}


def docstrings(trees):
    """Yield file, node and text."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node, ast.get_docstring(node) or ""


def names_in_code(trees) -> set[str]:
    """Return every name in the code of the packages: of modules, functions, arguments, …"""
    names = {*dir(builtins), *(part for path in trees for part in path.with_suffix("").parts)}
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            if isinstance(value := getattr(node, field, None), str):
                names.update(value.split("."))
    return names


def test_a_docstring_names_what_there_is(trees) -> None:
    """For classes and functions take only names with a dot: a word may be an option's value."""
    names, wrong = names_in_code(trees), []
    for path, node, text in docstrings(trees):
        words = [word for word in QUOTED.findall(text) if NAME.fullmatch(word)]
        if not isinstance(node, ast.Module):
            words = [word for word in words if "." in word]
        ours = [word for word in words if not word.startswith("torch.")]
        wrong += [f"{path}: {word}" for word in ours if not names.issuperset(word.split("."))]
    assert not wrong, "spoken of, and nothing is called so:\n" + "\n".join(wrong)


def test_a_docstring_lists_the_arguments_that_there_are(trees) -> None:
    wrong = []
    for path, node, text in docstrings(trees):
        section = re.search(r"^Args:\n((?:    .*\n|\n)+)", f"{text}\n", re.MULTILINE)
        if section and not isinstance(node, ast.Module):
            listed = re.findall(r"^    (\w+):", section[1], re.MULTILINE)
            if listed != (there := arguments_of(node)):
                wrong.append(f"{path}, line {node.lineno} lists {listed}, and there are {there}")
    assert not wrong, "\n".join(wrong)


def arguments_of(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    """Return the arguments of a function, or of the constructor of a class."""
    if isinstance(node, ast.ClassDef):
        inits = [each for each in node.body if getattr(each, "name", "") == "__init__"]
        if not inits:  # a dataclass
            return [each.target.id for each in node.body if isinstance(each, ast.AnnAssign)]
        node = inits[0]
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [each.arg for each in every if each.arg not in ("self", "cls")]
