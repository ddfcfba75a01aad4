"""Each student's own code as files for programs that find copies; what all were given apart."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.autograder.collection.test_collect import solved
from tests.helpers.course_folders import RELEASED, ROOT

NAME = "02_data_parallel_sgd"
pytestmark = pytest.mark.filterwarnings("ignore")


def test_own_cells_are_written_and_released_ones_are_not(tmp_path: Path, autograder: Any) -> None:
    shutil.copy(ROOT / "nbgrader_config.py", tmp_path)
    shutil.copytree(RELEASED / NAME, tmp_path / "assignments" / NAME)
    released = nbformat.read(RELEASED / NAME / f"{NAME}.ipynb", as_version=4)
    notebook = solved()
    notebook.cells.append(nbformat.v4.new_code_cell("%time helper = 1\n!ls"))
    for student, text in {
        "ada": nbformat.writes(notebook),
        "bob": "no notebook",
        "idle": nbformat.writes(released),
    }.items():
        folder = tmp_path / "grading/submitted" / student / NAME
        folder.mkdir(parents=True)
        (folder / f"{NAME}.ipynb").write_text(text, encoding="utf-8")
    status, output = autograder(tmp_path, "sources", NAME)
    assert status == 0 and "bob has no file" in output
    folder = tmp_path / "grading/sources"
    ada = (folder / NAME / "ada.py").read_text(encoding="utf-8")
    assert "return 42, 43" in ada and "# %time helper" in ada and "def average" not in ada
    assert (folder / NAME / "idle.py").read_text(encoding="utf-8").strip() == ""
    base = (folder / f"{NAME}.py").read_text(encoding="utf-8")
    assert "def average_gradients" in base
    assert ast.parse(ada) and ast.parse(base), "the programs parse Python"
