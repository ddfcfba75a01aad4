"""Docstrings and the READMEs beside the code name only modules, names and paths that exist.

If a file is moved, its imports must change too, or nothing runs. Text about it can stay unchanged,
and sends the next reader to a place that no longer exists.
"""

import ast
import builtins
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.helpers import ROOT

PACKAGES = ("course_lib", "autograder")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
READMES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("README.md"))

QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
# "- `rooted`: broadcast, reduce" or "1. `errors`, `reducer`: …", and further ones in the same item.
ITEM = re.compile(r"^ *(?:-|\d+\.) (.*(?:\n(?! *(?:-|\d+\.) ).+)*)", re.MULTILINE)
HEAD = re.compile(r"((?:`[a-z_][\w.]*`(?:,| and) )*`[a-z_][\w.]*`):")
DRAWING = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"[\w./-]+(?:/|\.(?:py|md|ipynb|json))(?![\w/])")


@pytest.fixture(scope="module", autouse=True)
def forget() -> Iterator[None]:
    yield
    parsed.cache_clear()  # of a tenth of a gigabyte


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def docstrings(path: Path) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, ast.get_docstring(node) or ""


def module_docstring(path: Path) -> str:
    return ast.get_docstring(parsed(path)) or ""


def is_there(name: str, folder: Path) -> bool:
    """Whether `name`, such as ``ring`` or ``passes.rebuild``, is a module or a room of a folder."""
    path = folder.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def heads(text: str) -> list[str]:
    """Return what the items of a list in a docstring are about: the names before the colons."""
    found = (head for item in ITEM.findall(text) for head in HEAD.findall(item))
    return [name for head in found for name in QUOTED.findall(head)]


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


def missing_paths(text: str, folder: Path) -> list[str]:
    """Return the paths, in backquotes or in a drawing, that are neither here nor in the root."""
    drawings, rest = DRAWING.findall(text), DRAWING.sub("", text)
    links = re.findall(r"\]\(([^)#:]+)\)", rest)
    paths = [path for part in (*drawings, *QUOTED.findall(rest)) for path in PATH.findall(part)]
    left_out = not (ROOT / "instructor").is_dir()  # from a student's copy
    return [
        path
        for path in (*paths, *links)
        if not ((folder / path).exists() or (ROOT / path).exists())
        and not (left_out and path.startswith("instructor/"))
    ]


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def in_files(problems_of: Callable[[Path], list[str]], files: Sequence[Path] = FILES) -> str:
    """Return what is wrong, a line for each file, in all of them: they are read once, here."""
    assert files
    found = ((path, problems_of(path)) for path in files)
    return "\n".join(f"{shown(path)}: {', '.join(wrong)}" for path, wrong in found if wrong)


def test_what_a_list_is_about_stands_beside_it() -> None:
    def missing(path: Path) -> list[str]:
        return [name for name in heads(module_docstring(path)) if not is_there(name, path.parent)]

    assert not (wrong := in_files(missing)), f"listed, and not beside it:\n{wrong}"


def test_a_face_that_lists_its_parts_leaves_none_out() -> None:
    def left_out(path: Path) -> list[str]:
        text = module_docstring(path)
        parts = {
            entry.stem
            for entry in path.parent.iterdir()
            if not entry.name.startswith("__") and is_there(entry.stem, path.parent)
        }
        named = {word.partition(".")[0] for word in QUOTED.findall(text)}
        return sorted(parts - named) if parts & set(heads(text)) else []

    faces = [path for path in FILES if path.name == "__init__.py"]
    assert not (wrong := in_files(left_out, faces)), f"not listed:\n{wrong}"


def test_a_docstring_names_what_there_is() -> None:
    """For classes and functions take only names with a dot: a word may be an option's value."""

    def misnamed(path: Path) -> list[str]:
        wrong = []
        for node, text in docstrings(path):
            words = lower(QUOTED.findall(text))
            if not isinstance(node, ast.Module):
                words = [word for word in words if "." in word]
            wrong += unknown(words)
        return wrong

    assert not (wrong := in_files(misnamed)), f"spoken of, and nothing is called so:\n{wrong}"


def test_a_docstring_lists_the_arguments_that_there_are() -> None:
    def others(path: Path) -> list[str]:
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


@pytest.mark.parametrize("path", READMES, ids=shown)
def test_a_readme_names_what_there_is(path: Path) -> None:
    text = path.read_text()
    missing = missing_paths(text, path.parent)
    assert not missing, f"{shown(path)} names paths that do not exist: {missing}"
    methods = re.findall(r"\b[A-Z]\w+\.\w+", "".join(DRAWING.findall(text)))
    words = QUOTED.findall(DRAWING.sub("", text)) + methods
    wrong = unknown([word for word in words if not PATH.fullmatch(word)])
    assert not wrong, f"{shown(path)} speaks of {wrong}, which nothing is called"


def test_what_is_not_there_is_found() -> None:
    here = ROOT / "course_lib"
    text = "- `data`: here; `gone`: not\n- `sgd`, `went`\n  and `ddp.left`: `no`\n\n`aside`: no"
    assert [name for name in heads(text) if not is_there(name, here)] == ["gone", "ddp.left"]
    assert unknown(["shard_bounds", "cost_model.Link", "torch.gone", "2 x", "wait_graph"]) == [
        "wait_graph"
    ]
    drawing = "`ranks/gone.py`, `ranks/ranks.py`\n```text\nranks/lost.py → ranks/explain/\n```\n"
    assert missing_paths(drawing, here) == ["ranks/lost.py", "ranks/gone.py"]
