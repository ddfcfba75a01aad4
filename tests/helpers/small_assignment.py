"""An assignment of six cells: text, set-up, a solution, its check, a written answer, the end."""

from typing import Any

from nbformat import NotebookNode, v4

POINTS = 3.0
STUB = "def double(x):\n    raise NotImplementedError"
RIGHT = "def double(x):\n    return 2 * x"
TEST = "assert double(two) == 4"


def tracked(grade_id: str, **kind: Any) -> dict[str, Any]:
    flags = {"grade": False, "solution": False, "locked": False, "task": False, "schema_version": 3}
    return {"nbgrader": {**flags, "grade_id": grade_id, **kind}}


def notebook(solution: str = STUB, test: str = TEST) -> NotebookNode:
    """Return an assignment, or with ``STUB`` its released version."""
    nb: NotebookNode = v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "P", "language": "python"}},
        cells=[
            v4.new_markdown_cell("Welcome", id="intro", metadata=tracked("intro", locked=True)),
            v4.new_code_cell("two = 2", id="setup"),
            v4.new_code_cell(solution, id="write", metadata=tracked("write", solution=True)),
            v4.new_code_cell(
                test, id="test", metadata=tracked("test", grade=True, locked=True, points=POINTS)
            ),
            v4.new_markdown_cell(
                "Your answer",
                id="why",
                metadata=tracked("why", grade=True, solution=True, points=1),
            ),
            v4.new_markdown_cell("The end", id="end"),
        ],
    )
    return nb


def answered(code: str = RIGHT) -> NotebookNode:
    nb = notebook(code)
    nb.cells[4].source = "Because"
    return nb


def sources(nb: NotebookNode) -> list[str]:
    return [cell.source for cell in nb.cells]


def insert(nb: NotebookNode, index: int, *cells: NotebookNode) -> NotebookNode:
    nb.cells[index:index] = cells
    return nb
