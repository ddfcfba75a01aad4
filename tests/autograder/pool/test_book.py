"""Only graded code is booked: the outputs of the same code, cell by cell."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from autograder.pool.book import Book, NotAsGraded

SOURCES = ("x = 1", "check('02/a', f)")


def notebook(*sources: str, score: str = "") -> nbformat.NotebookNode:
    nb = new_notebook(cells=[new_code_cell(source) for source in sources])
    if score:
        result = new_output("execute_result", {"text/plain": score}, execution_count=2)
        nb.cells[-1].outputs, nb.cells[-1].execution_count = [result], 2
    return nb


def booked(nb: nbformat.NotebookNode, graded: Path, name: str = "02") -> nbformat.NotebookNode:
    nbformat.write(notebook(*SOURCES, score="2.5"), graded)
    step = Book(graded={"02": str(graded)})
    result, _ = step.preprocess(nb, {"nbgrader": {"notebook": name}})
    return result


def test_the_outputs_are_those_of_the_graded_notebook(tmp_path: Path) -> None:
    nb = notebook(*SOURCES, score="999.0")  # what the student's own file claims
    nb.cells.insert(1, new_markdown_cell("text that nobody runs"))
    result = booked(nb, tmp_path / "graded.ipynb")
    assert result.cells[0].outputs == []
    assert result.cells[2].outputs[0].data["text/plain"] == "2.5"
    assert result.cells[2].execution_count == 2


@pytest.mark.parametrize(
    "sources", [SOURCES[:1], SOURCES[::-1], (*SOURCES, ""), ("x = 2", SOURCES[1])]
)
def test_only_the_code_that_was_graded_is_booked(tmp_path: Path, sources: tuple[str, ...]) -> None:
    nb = notebook(*sources)
    with pytest.raises(NotAsGraded, match="the code differs from the code that was graded"):
        booked(nb, tmp_path / "graded.ipynb")
    assert all(cell.outputs == [] for cell in nb.cells)
    with pytest.raises(NotAsGraded, match="03 was not graded"):
        booked(nb, tmp_path / "graded.ipynb", "03")
