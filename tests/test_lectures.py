"""Notebooks keep to the rules of notebook_rules.py, and core lectures execute from scratch."""

import ast
import re
import tomllib

import nbformat
import pytest

from course_lib.checking.asking import _reasons_of_lectures
from tests.helpers import ROOT
from tests.helpers.course_folders import FURTHER, RELEASED, SOURCES, assignments
from tests.helpers.lecture_size import CELLS, WORDS, size_of
from tests.helpers.notebook_rules import ASSIGNMENT, LECTURE, problems
from tests.helpers.printed_again import executed_again

CORE = sorted((ROOT / "lectures").glob("*.ipynb"))
LECTURES = [*CORE, *FURTHER]


def name(path) -> str:
    return path.stem


@pytest.mark.parametrize("path", LECTURES, ids=name)
def test_a_lecture_keeps_to_the_rules(path) -> None:
    assert not (found := problems(path, LECTURE)), "\n".join(found)


def test_each_option_of_a_guess_has_a_reason() -> None:
    """And no question has reasons that no lecture asks any more."""
    sources = [cell.source for path in LECTURES for cell in nbformat.read(path, 4).cells]
    calls = [
        node
        for source in sources
        if re.search(r"^\w+ = ask\(", source, re.MULTILINE)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ask"
    ]
    options = {
        ast.literal_eval(call.args[0]): next(k.value for k in call.keywords if k.arg == "options")
        for call in calls
    }
    counts = {
        asked: len(getattr(o, "keys", getattr(o, "elts", ()))) for asked, o in options.items()
    }
    assert {question: len(why) for question, why in _reasons_of_lectures().items()} == counts


LINKS = "[Symbols](../docs/symbols.md) · [Glossary](../docs/glossary.md)"


@pytest.mark.parametrize("path", CORE, ids=name)
def test_a_lecture_leads_to_the_symbols_and_the_glossary(path) -> None:
    first = nbformat.read(path, as_version=4).cells[0].source
    assert first.splitlines()[-1] == LINKS, "the last line of the first cell"


@pytest.mark.every_case
@pytest.mark.parametrize("path", CORE, ids=name)
def test_a_core_lecture_is_short_asks_and_states_its_time(path) -> None:
    size = size_of(path)
    assert size.cells <= 1.1 * CELLS and size.words <= 1.1 * WORDS, size
    assert abs(size.minutes - size.stated) <= 5, size
    assert 3 <= size.guesses <= 5 and size.puzzles <= 2, size


def notebooks(folder):
    return sorted(path for each in assignments(folder) for path in each.glob("*.ipynb"))


@pytest.mark.every_case
@pytest.mark.parametrize("path", [*notebooks(RELEASED), *notebooks(SOURCES)], ids=name)
def test_an_assignment_keeps_to_the_rules(path) -> None:
    assert not (found := problems(path, ASSIGNMENT)), "\n".join(found)


@pytest.mark.parametrize(
    "path", [CORE[0], *(pytest.param(path, marks=pytest.mark.large) for path in CORE[1:])], ids=name
)
def test_a_lecture_executes(path, tmp_path) -> None:
    assert not (found := executed_again(path, tmp_path)), "\n".join(found)


README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_wheel_brings_what_the_lectures_link_to() -> None:
    """The desk of a student who has no checkout gets it from there."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shared = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-data"]
    pages = "".join(path.read_text(encoding="utf-8") for path in LECTURES)
    linked = set(re.findall(r"\((?:\.\./)+((?:docs|benchmarks)/[\w/]+\.\w+)", pages))
    assert linked and linked <= set(shared), sorted(linked - set(shared))


def test_the_readme_lists_every_lecture_and_assignment_in_order() -> None:
    """A topic has one name: the lecture 05_x.ipynb and the assignment 05_x/ are in one row."""
    rows = re.findall(r"^\|.*(?:lectures|assignments)/\d\d_.*\|$", README, re.MULTILINE)
    assert re.findall(r"lectures/(\w+)\.ipynb", "\n".join(rows)) == [p.stem for p in CORE]
    listed = re.findall(r"\(assignments/(\w+)/?\)", "\n".join(rows))
    assert listed == [folder.name for folder in assignments(RELEASED)]
    for row in rows:
        names = set(re.findall(r"\((?:lectures|assignments)/(\d\d_\w+)", row))
        assert len(names) == 1, f"lecture and assignment differ: {names}"
