"""The first pass of ``nbgrader autograde``: put the student's sources into the released notebook.

Any editor may have changed a submitted file: cells copied, deleted, renamed, tagged, or with a
different type. nbgrader trusts the file's structure. If the structure is wrong, nbgrader loses
marks, the submission or the whole batch. So this pass keeps only what the student *wrote*:

- the source of each solution cell, code or text, found by its ``grade_id``, or by its cell id
  if no cell has that ``grade_id`` any more. The first of several copies counts. If no copy is
  left, the released cell stays, and is graded as unanswered;
- the source of each released cell that nbgrader does not track, and that anyone may edit;
- the cells that the student added, without their metadata. Each stays in front of the released
  cell that followed it. A cell in place of a deleted solution cell runs after the released stub.

Everything else (tests, order, tags, metadata, outputs, attachments, kernelspec) is as released.
"""

import copy
import itertools
from pathlib import Path
from typing import Any

import nbformat
from nbconvert.exporters.exporter import ResourcesDict
from nbformat import NotebookNode
from nbgrader.preprocessors import NbGraderPreprocessor

MAX_CELLS = 1000  # that a student may add
MAX_SOURCE = 2**20  # bytes in one cell
MAX_TOTAL = 10 * 2**20  # bytes in all cells
MAX_LINES = 10_000  # in one cell
MAX_NOTES = 20


class Rebuild(NbGraderPreprocessor):
    """nbgrader's pass that calls ``rebuild``: the first of ``Autograde.sanitize_preprocessors``."""

    def preprocess(
        self, nb: NotebookNode, resources: ResourcesDict
    ) -> tuple[NotebookNode, ResourcesDict]:
        """Rebuild one submission, and log what was left out or put back.

        Raises:
            FileNotFoundError: the assignment was not released here. nbgrader then reports that it
                could not process the submission. The submission gets no mark, and nbgrader
                continues with the others.
        """
        coursedir = self.parent.parent.coursedir  # of the exporter's converter
        names = resources["nbgrader"]
        folder = coursedir.format_path(coursedir.release_directory, ".", names["assignment"])
        rebuilt = rebuild(released_notebook(Path(folder), names["notebook"]), nb)
        for note in rebuilt.metadata.get("rebuild", ()):
            self.log.warning("%s of %s: %s", names["notebook"], names["student"], note)
        return rebuilt, resources


def released_notebook(folder: Path, notebook: str) -> NotebookNode:
    """Return an assignment's released notebook; `folder` has the assignment's name.

    Raises:
        FileNotFoundError: the assignment was not released.

    """
    path = folder / f"{notebook}.ipynb"
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no released version at {path}: "
            f"run nbgrader generate_assignment {folder.name}"
        )
    found: NotebookNode = nbformat.read(path, as_version=4)
    return found


def rebuild(released: NotebookNode, submitted: NotebookNode) -> NotebookNode:
    """Return ``released`` with the student's sources from ``submitted``; neither is changed.

    For any ``submitted``, the result is a valid notebook with all cells of ``released`` in their
    order. If something was put back or left out, ``metadata["rebuild"]`` lists it, in sentences
    that repeat nothing from ``submitted``.
    """
    cells: list[NotebookNode] = copy.deepcopy(released.cells)
    theirs = submitted.get("cells")
    theirs = theirs if isinstance(theirs, list) else []
    finder, room = _Finder(cells, theirs), _Room()
    notes: list[str] = []
    found: set[int] = set()
    in_front: list[list[NotebookNode]] = [[] for _ in cells]
    added: list[NotebookNode] = []
    for number, cell in enumerate(theirs, start=1):
        index = finder.find(cell, found)
        if index is not None and index in found:
            whose = _grade_id(cells[index])
            notes.append(f"cell {number} is another copy of {whose}, so it was left out")
            continue
        if index is not None:
            found.add(index)
            in_front[index], added = added, []
            if not _may_edit(cells[index]):
                continue
        kind, source = _content(cell)
        if index is None and not source.strip():
            continue  # editors often leave an empty cell at the end
        if problem := room.refuse(source, None if index is not None else kind):
            notes.append(f"cell {number} {problem}, so it was left out")
        elif index is not None:
            cells[index].source = source
        else:
            added.append(nbformat.from_dict({"cell_type": kind, "metadata": {}, "source": source}))
    for index, cell in enumerate(cells):
        if index not in found and _nbgrader(cell).get("solution"):
            notes.append(f"the cell {_grade_id(cell)} is missing, so the released cell was graded")

    rebuilt = copy.copy(released)
    rebuilt.metadata = copy.deepcopy(released.metadata)
    rebuilt.cells = [
        cell for index, original in enumerate(cells) for cell in (*in_front[index], original)
    ] + added
    if notes:
        more = [f"and {len(notes) - MAX_NOTES} more"] if len(notes) > MAX_NOTES else []
        rebuilt.metadata["rebuild"] = notes[:MAX_NOTES] + more
    _complete(rebuilt)
    return rebuilt


class _Finder:
    """Finds the released cell from which a submitted cell comes."""

    def __init__(self, cells: list[NotebookNode], theirs: list[Any]) -> None:
        self._cells = cells
        self._tracked: dict[str, int] = {}
        self._ids: dict[str, int] = {}
        self._texts: dict[tuple[str, str], list[int]] = {}
        names = {_grade_id(cell) for cell in theirs} - {""}
        ids = {_id(cell) for cell in theirs} - {""}
        for index, cell in enumerate(cells):
            # A cell id counts only if no cell has the grade id, and a text only if none has the id.
            if grade_id := _grade_id(cell):
                self._tracked[grade_id] = index
            if grade_id in names:
                continue
            if _id(cell) in ids:
                self._ids[_id(cell)] = index
            else:
                self._texts.setdefault((cell.cell_type, cell.source), []).append(index)

    def find(self, cell: Any, found: set[int]) -> int | None:
        """Return the index of the released cell, or None if the student added the cell.

        An index in ``found`` is returned only for another copy of a tracked cell.
        """
        index = self._tracked.get(_grade_id(cell))
        if index is not None:
            return index
        kind, source = _content(cell)
        index = self._ids.get(_id(cell))
        if index is not None and index not in found:
            released = self._cells[index]
            # If a text cell has become code, it counts as a new cell, not as an edit of ours.
            if _grade_id(released) or released.cell_type == kind:
                return index
        return next((i for i in self._texts.get((kind, source), ()) if i not in found), None)


class _Room:
    """The numbers of cells and bytes that a submission may still add."""

    def __init__(self) -> None:
        self._cells = MAX_CELLS
        self._bytes = MAX_TOTAL

    def refuse(self, source: str, added: str | None) -> str:
        """Return why a cell is refused; if it is accepted, count it and return "".

        ``added`` is the type of a cell that the student added. It is None for a version of a
        released cell, which keeps the released type.
        """
        size = len(source.encode())
        if added is not None and added not in ("code", "markdown"):
            return "is neither code nor Markdown"
        if size > MAX_SOURCE:
            return f"is longer than {MAX_SOURCE} bytes"
        if source.count("\n") > MAX_LINES:
            return f"has more than {MAX_LINES} lines"
        if size > self._bytes:
            return f"exceeds the limit of {MAX_TOTAL} bytes in all cells together"
        if added is not None and not self._cells:
            return f"exceeds the limit of {MAX_CELLS} added cells"
        self._bytes -= size
        self._cells -= added is not None
        return ""


def _nbgrader(cell: Any) -> dict[str, Any]:
    """Return a cell's nbgrader metadata, or an empty dict if it has none of the right form."""
    metadata = cell.get("metadata") if isinstance(cell, dict) else None
    found = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    return found if isinstance(found, dict) else {}


def _grade_id(cell: Any) -> str:
    """Return the name by which nbgrader tracks a cell, or "" if it does not."""
    grade_id = _nbgrader(cell).get("grade_id")
    return grade_id if isinstance(grade_id, str) else ""


def _id(cell: Any) -> str:
    """Return a cell's id, or "" if it has none, as in notebooks older than format 4.5."""
    name = cell.get("id") if isinstance(cell, dict) else None
    return name if isinstance(name, str) else ""


def _may_edit(released: NotebookNode) -> bool:
    """Tell whether a student may edit a cell: it is a solution, or nbgrader does not track it."""
    return bool(_nbgrader(released).get("solution")) or not _grade_id(released)


def _content(cell: Any) -> tuple[str, str]:
    """Return a submitted cell's type and source, with "" for each that is no text.

    NUL and halves of surrogate pairs become question marks: files and databases refuse them.
    """
    if not isinstance(cell, dict):
        return "", ""
    kind, source = cell.get("cell_type"), cell.get("source")
    source = source if isinstance(source, str) else ""
    source = source.replace("\0", "?").encode(errors="replace").decode()
    return (kind if isinstance(kind, str) else ""), source


def _complete(notebook: NotebookNode) -> None:
    """Give every cell the fields that its type and the notebook's format require."""
    with_ids = (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)
    taken = {cell.id for cell in notebook.cells if "id" in cell}
    free = (name for n in itertools.count(1) if (name := f"added-{n}") not in taken)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        if with_ids and "id" not in cell:
            cell.id = next(free)
