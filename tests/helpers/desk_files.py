"""A small course and its desk: files that the tests of the desk write and look at."""

import copy

import nbformat
from nbformat import v4

LECTURE = "lectures/01_topic.ipynb"
CHECKS = "assignments/02_topic/checks.py"
MODULE = "course_lib/sgd.py"


def notebook(*texts: str, link: str = "../course_lib/sgd.py"):
    cells = [v4.new_markdown_cell(f"# Topic\n[module]({link})", id="title")]
    cells += [v4.new_code_cell(text, id=f"code-{i}") for i, text in enumerate(texts)]
    return v4.new_notebook(cells=cells)


def ran(nb):
    """Return the notebook as JupyterLab leaves it after Run All: outputs, metadata, a new cell."""
    nb = copy.deepcopy(nb)
    for count, cell in enumerate((cell for cell in nb.cells if cell.cell_type == "code"), 1):
        cell.outputs = [v4.new_output("stream", text=f"result of {cell.source}\n")]
        cell.execution_count, cell.metadata = count, {"collapsed": True}
    nb.metadata = {"language_info": {"name": "python", "version": "3.11.7"}}
    nb.cells.append(v4.new_code_cell("", id="added"))
    return nb


def write(path, content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else nbformat.writes(content))


def sources(path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells[1:]]


def there(desk) -> list[str]:
    """Return the files of the desk, without its records."""
    paths = (path.relative_to(desk) for path in desk.rglob("*") if path.is_file())
    return sorted(str(path) for path in paths if path.parts[0] != ".desk")


HANDED_OUT = ["assignments/02_topic/02_topic.ipynb", CHECKS, MODULE, LECTURE]
