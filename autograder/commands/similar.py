"""``autograder similar``: report solutions that look alike; no code leaves the machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from autograder.collection.collecting import notebooks_of
from autograder.collection.listing import SourceError
from autograder.course import data_folder, load_config
from autograder.files import write_whole
from autograder.passes.rebuild import rebuild
from autograder.passes.vet import MAX_NOTEBOOK, text_of
from autograder.similarity.compare import Comparison, compare, hashes_of, read_solution
from autograder.similarity.report import WARNING, html_report, text_report

DESCRIPTION = f"""\
List the pairs of submissions whose code is most alike, and write a page that shows them side by
side. Names, comments, layout and the order of functions do not count. Released code is subtracted,
and code that many students wrote counts little. All of this happens on this machine.

{WARNING}"""
EXAMPLES = """\
examples:
  autograder similar 02_data_parallel_sgd
  autograder similar 02_data_parallel_sgd --at-least 0.8 --top 10"""


def similar(
    root: Path,
    assignment: str,
    *,
    top: int = 30,
    at_least: float = 0.5,
    progress: Callable[[str], None] = lambda told: None,
) -> tuple[Comparison, dict[str, dict[str, str]], dict[str, str]]:
    """Compare a class's submissions with one another.

    Returns the comparison, the cells that were compared (student → name → source), and the students
    who could not be compared, with the reason.

    Raises:
        SourceError: there is no such assignment, or it has no submission.

    """
    config = load_config(root)
    names = list(notebooks_of(root, config, assignment))
    submitted = data_folder(root, config) / "submitted"
    folders = sorted(submitted.glob(f"*/{assignment}"))
    if not folders:
        raise SourceError(
            f"nobody has submitted {assignment}: run autograder collect {assignment} SOURCE"
        )
    released = _released(root, data_folder(root, config), assignment, names)
    known = hashes_of([_plain(cell) for nb in released.values() for cell in _code(nb)])
    solutions, cells, damaged = [], {}, {}
    for number, folder in enumerate(folders, 1):
        student = folder.parent.name
        progress(f"reading {number} of {len(folders)} …")
        try:
            cells[student] = {
                name: source
                for notebook in names
                for name, source in _answers(released[notebook], folder / f"{notebook}.ipynb")
            }
        except Exception as error:  # reading a file that is no notebook may raise anything
            damaged[student] = f"the notebook cannot be read ({type(error).__name__}: {error})"[
                :200
            ]
            continue
        solutions.append(read_solution(student, cells[student], known))
    return compare(solutions, top=top, at_least=at_least, progress=progress), cells, damaged


def _released(root: Path, data: Path, assignment: str, names: list[str]) -> dict[str, NotebookNode]:
    """Return the notebooks that students got: from nbgrader's release, else from the course."""
    for folder in (data / "release" / assignment, root / "assignments" / assignment):
        if all((folder / f"{name}.ipynb").is_file() for name in names):
            return {n: nbformat.read(folder / f"{n}.ipynb", as_version=4) for n in names}
    raise SourceError(f"{assignment} is not released: run autograder release {assignment}")


def _answers(released: NotebookNode, path: Path) -> list[tuple[str, str]]:
    """Return name and source of a student's answers and of code cells that they added."""
    if path.is_symlink() or path.stat().st_size > MAX_NOTEBOOK:
        raise ValueError(f"the file is a link, or larger than {MAX_NOTEBOOK // 2**20} MiB")
    # Jupyter writes the lines of a source as a list; nbformat joins them.
    submitted: NotebookNode = nbformat.reads(text_of(path.read_bytes()), as_version=4)
    if not isinstance(submitted, dict) or not isinstance(submitted.get("cells"), list):
        raise ValueError("the file is JSON, but not a notebook: it has no list of cells")
    stubs = {_plain(cell).strip() for cell in _code(released)}
    own = [
        cell for cell in _code(rebuild(released, submitted)) if _plain(cell).strip() not in stubs
    ]
    return [
        (str(cell.metadata.get("nbgrader", {}).get("grade_id", f"cell {i}")), _plain(cell))
        for i, cell in enumerate(own, 1)
    ]


def _code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _plain(cell: NotebookNode) -> str:
    return str(cell.source)


def write_reports(
    folder: Path,
    assignment: str,
    comparison: Comparison,
    cells: Mapping[str, Mapping[str, str]],
    damaged: Mapping[str, str],
) -> Path:
    """Write the report as a page and as text; return the page's path."""
    page = folder / f"{assignment}.html"
    write_whole(page, html_report(assignment, comparison, cells, damaged))
    write_whole(page.with_suffix(".txt"), text_report(assignment, comparison, damaged))
    return page


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("assignment", help="the assignment's name, such as 02_data_parallel_sgd")
    parser.add_argument("--top", type=int, default=30, help="largest number of pairs (default: 30)")
    parser.add_argument(
        "--at-least",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="list only pairs with at least this similarity, from 0 to 1 (default: 0.5)",
    )


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Compare for the command line; return the exit status."""
    if not 0 <= arguments.at_least <= 1 or arguments.top < 1:
        print(
            "autograder similar: --at-least must be from 0 to 1, --top at least 1", file=sys.stderr
        )
        return 2
    show = sys.stderr.isatty()
    try:
        comparison, cells, damaged = similar(
            root,
            arguments.assignment,
            top=arguments.top,
            at_least=arguments.at_least,
            progress=lambda told: print(f"\r{told:40}", end="", file=sys.stderr) if show else None,
        )
    except SourceError as error:
        print(f"autograder similar: {error}", file=sys.stderr)
        return 2
    if show:
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    page = write_reports(
        data_folder(root) / "similar", arguments.assignment, comparison, cells, damaged
    )
    print(text_report(arguments.assignment, comparison, damaged))
    print(f"all pairs side by side: {page}")
    return 0
