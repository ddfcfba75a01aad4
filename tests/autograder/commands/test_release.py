"""The students' version is the instructors' version without the parts that it must not show."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest

from autograder.commands.release import files, generate, release
from autograder.errors import CommandFailed
from course_lib.checking.loading import load_module
from course_lib.checking.mutants import mutants_of
from course_lib.learner.notebooks import MARK_SCHEME
from course_lib.learner.what_counts import is_answer
from tests.helpers.course_folders import (
    RELEASED,
    ROOT,
    SOURCES,
    assignments,
    copy_assignment,
    needs_sources,
)

NAME = "02_data_parallel_sgd"

pytestmark = [
    needs_sources,
    # nbgrader and what it stands on, not we
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
]


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """Return a course with one assignment that was never released."""
    copy_assignment(NAME, tmp_path)
    (tmp_path / "assignments" / NAME / f"{NAME}.ipynb").unlink()
    shutil.copy(ROOT / "nbgrader_config.py", tmp_path)
    return tmp_path


def edit(path: Path, cell_id: str, **changes: Any) -> None:
    notebook = nbformat.read(path, as_version=4)
    (cell,) = (cell for cell in notebook.cells if cell.id == cell_id)
    cell.update(changes)
    nbformat.write(notebook, path)


@pytest.mark.every_case
@pytest.mark.parametrize("folder", assignments(SOURCES), ids=lambda folder: folder.name)
def test_what_is_committed_is_what_a_fresh_release_makes(folder: Path, tmp_path: Path) -> None:
    committed = files(RELEASED / folder.name).items()
    made = generate(ROOT, folder.name, tmp_path)
    others = {path: data for path, data in committed if not path.endswith(".py")}
    assert made == others, "autograder release makes them anew"


@pytest.mark.parametrize("folder", assignments(SOURCES), ids=lambda folder: folder.name)
def test_no_hidden_case_or_mutant_is_given_away(folder: Path) -> None:
    """`generate` itself refuses a line of a solution, and of a mark scheme."""
    released = files(RELEASED / folder.name)
    needed = {f"{folder.name}.ipynb", "checks.py"}
    assert needed <= set(released)
    beside = set(released) - needed
    assert all(path.endswith(".py") for path in beside) and not beside & {"hidden.py", "mutants.py"}
    everything = "\n".join(content.decode() for content in released.values())
    hidden = load_module(folder / "hidden.py", RELEASED / folder.name)
    hidden = getattr(hidden, "HIDDEN", {})
    secrets = {case.name for cases in hidden.values() for case in cases}
    secrets |= {f"{m.task}__{m.mistake}" for m in mutants_of(load_module(folder / "mutants.py"))}
    secrets |= {"HIDDEN = {", "MASKED", "mutants", "BEGIN SOLUTION", "MARK SCHEME", "HIDDEN TESTS"}
    assert not {secret for secret in secrets if secret in everything}


@pytest.mark.parametrize("folder", assignments(SOURCES), ids=lambda folder: folder.name)
def test_a_written_question_has_points_a_sample_and_comments(folder: Path) -> None:
    cells = nbformat.read(folder / f"{folder.name}.ipynb", as_version=4).cells
    questions = [pair for pair in itertools.pairwise(cells) if is_answer(pair[1])]
    assert len(questions) == (folder / "comments.md").is_file()
    for above, answer in questions:
        (scheme,) = MARK_SCHEME.findall(above.source)
        points = re.findall(r"\*\*(\d+) point", scheme)
        assert sum(map(int, points)) == answer.metadata.nbgrader.points
        assert re.search(r"^Worth (half|.+ of \d): .+\n\n> ", scheme, re.MULTILINE)


def test_a_release_is_made_and_made_again_byte_by_byte(course: Path, capsys: Any) -> None:
    target = course / "assignments" / NAME
    release(course)
    first = files(target)
    (target / "figure.svg").touch()  # the source has none
    release(course, [NAME])
    release(course)
    assert files(target) == first == files(RELEASED / NAME)
    *_, second, third = capsys.readouterr().out.splitlines()
    assert second == f"{NAME}: changed: figure.svg" and third == f"{NAME}: unchanged"
    assert not list(course.rglob("gradebook.db")), "a release is not yet a class"


def test_a_solution_that_would_be_seen_is_refused_and_nothing_is_written(course: Path) -> None:
    source = course / "instructor" / NAME / f"{NAME}.ipynb"
    edit(source, "try-2", source="Hint: `size, rest = divmod(length, world_size)`")
    with pytest.raises(CommandFailed, match=r"would show[^~]*size, rest = divmod"):
        release(course)
    assert not list((course / "assignments").rglob("*.ipynb"))


def test_the_command_releases_and_names_what_there_is(course: Path, autograder: Any) -> None:
    assert autograder(course, "release", NAME)[0] == 0
    status, output = autograder(course, "release", "03_collectives")
    assert status == 2 and f"assignments there are: {NAME}" in output
