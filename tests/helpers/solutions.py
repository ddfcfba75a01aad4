"""An assignment's checks, solutions and wrong solutions, read once."""

from functools import cache
from pathlib import Path

import matplotlib
import nbformat
import pytest

from autograder.course import handed_out
from autograder.passes.examine import masked_from
from course_lib.checking.loading import load_checks, load_module
from course_lib.checking.mutants import mutants_of
from tests.helpers.course_folders import SOURCES, assignments


@cache
def checks_of(folder: Path):
    """Return the assignment's checks."""
    return load_checks(handed_out(folder) / "checks.py")


@cache
def hidden_of(folder: Path):
    """Return the module of the assignment's hidden cases."""
    return load_module(folder / "hidden.py", handed_out(folder))


def hidden_cases(folder: Path, task: str):
    """Return the cases of a task that students do not get: listed ones, and those of a secret."""
    listed = getattr(hidden_of(folder), "HIDDEN", {}).get(task, ())
    return (*listed, *checks_of(folder)[task].hidden("tests"))


def module_of_reference(folder: Path, task: str) -> str:
    """Return the module with the right answers of a task; empty if the task has no reference."""
    judge = getattr(checks_of(folder)[task].judge, "__self__", None)
    reference: str = getattr(judge, "reference", "")
    return reference.partition(":")[0]


def is_masked(folder: Path, module: str) -> bool:
    """Return whether a sandbox hides the module from the students of this assignment."""
    masked = masked_from(hidden_of(folder).MASKED)
    return any(f"{module}.".startswith(f"{name}.") for name in masked)


@cache
def mutants_in(folder: Path):
    """Return the assignment's wrong solutions, and the right ones that differ from ours."""
    return mutants_of(load_module(folder / "mutants.py"))


@cache
def tasks():
    """Return a test's parameters: the folder and the name of every task."""
    return [
        pytest.param(folder, task, id=f"{folder.name}-{task}")
        for folder in assignments(SOURCES)
        for task in checks_of(folder)
    ]


def code_cells(folder: Path):
    """Yield the code cells of the assignment's notebook."""
    notebook = nbformat.read(folder / f"{folder.name}.ipynb", as_version=4)
    return (cell for cell in notebook.cells if cell.cell_type == "code")


@cache
def solution_of(folder: Path, task: str):
    """Return the notebook's own solution of a task."""
    namespace = {"__name__": "__main__"}
    with matplotlib.rc_context():  # the first cell sets the course's style, for its notebook
        for cell in code_cells(folder):
            role = cell.metadata.get("nbgrader", {})
            if role.get("solution") or "import" in cell.source.partition("\n")[0]:
                exec(compile(cell.source, f"<{folder.name}>", "exec"), namespace)
    return namespace[checks_of(folder)[task].function]
