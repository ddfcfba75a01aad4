"""Which cells of a student's notebook count: one rule, for ``course check`` and for the grader.

What the student ran is what is graded. So the notebook that is run has the student's cells, in the
student's order, with three exceptions:

- A released cell that nobody may edit (a text, the set-up, a check) is as released. What the
  student made of a text or of the set-up follows it as a cell of the student's own. A check runs
  where its last copy stands, or at the end if it was deleted.
- Every other released cell that was deleted comes back at its place. A stub, left or put back,
  overrides nothing: it becomes empty if a cell above defines the same names.
- Parts and copies of a written answer are joined.

A copy of a code cell is one more cell of the student's. Metadata, outputs and tags are as released,
because any editor, or a student, may have changed them. Cells with the tag ``explore`` are not run.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import copy
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import nbformat
from nbformat import NotebookNode

from course_lib.learner.notebooks import EXPLORE

MAX_CELLS = 1000  # that a student may add
MAX_SOURCE = 2**20  # bytes in one cell
MAX_TOTAL = 10 * 2**20  # bytes in all cells
MAX_LINES = 10_000  # in one cell
MAX_PICTURE = 5 * 2**20  # bytes in one picture
MAX_PICTURES = 20 * 2**20  # bytes in all pictures
MAX_NOTES = 20
_PICTURES = {"image/png": b"\x89PNG\r\n\x1a\n", "image/jpeg": b"\xff\xd8\xff"}
"""The kinds of pictures that are kept → the bytes with which they begin."""
_SUFFIXES = (".png", ".jpg", ".jpeg")
_SHOWN = re.compile(
    r"!\[(?P<alt>[^\]]*)\]\(\s*(?:<(?P<angled>[^>]+)>|(?P<url>[^)\s]+))[^)]*\)"
    r"|<img\b[^>]*?\bsrc\s*=\s*[\"'](?P<src>[^\"']+)[\"'][^>]*>",
    re.IGNORECASE,
)
"""A picture in Markdown, or in HTML."""
_ELSEWHERE = (
    "\n\n*The student left this cell as it was. The cell above or below it may hold the answer.*"
)


def rebuild(
    released: NotebookNode, submitted: NotebookNode, pictures: Mapping[str, bytes] | None = None
) -> NotebookNode:
    """Return the notebook that counts; neither argument is changed.

    For any ``submitted``, the result is a valid notebook with each cell of ``released`` once. If
    something was put back, joined or left out, ``metadata["rebuild"]`` lists it, in sentences that
    repeat nothing from ``submitted``.

    Args:
        released: the assignment as it was handed out.
        submitted: the student's copy; anything at all.
        pictures: PNG and JPEG files beside it, by their relative paths. Texts show them.

    """
    submitted_cells = submitted.get("cells")
    walk = _Walk(
        released.cells, submitted_cells if isinstance(submitted_cells, list) else [], pictures or {}
    )
    placed, notes = walk.placed, walk.notes
    notes += _put_back(placed, released.cells)
    _empty_stubs(placed, released.cells)
    _leave_for_a_person(placed, released.cells)
    notes += _notes_on_exploring([place.cell for place in placed])
    rebuilt = copy.copy(released)
    rebuilt.metadata = copy.deepcopy(released.metadata)
    rebuilt.cells = [place.cell for place in placed]
    if notes:
        ending = [f"and {len(notes) - MAX_NOTES} more"] if len(notes) > MAX_NOTES else []
        rebuilt.metadata["rebuild"] = notes[:MAX_NOTES] + ending
    _complete(rebuilt)
    return rebuilt


def is_check(cell: NotebookNode) -> bool:
    """Tell whether a released cell is a check: it has points, and students do not write in it."""
    return bool(role(cell).get("grade")) and not role(cell).get("solution")


def is_answer(cell: NotebookNode) -> bool:
    """Tell whether a released cell is for a written answer, which a person grades."""
    return bool(role(cell).get("grade")) and bool(role(cell).get("solution"))


def is_run(cell: NotebookNode) -> bool:
    """Tell whether a cell of a rebuilt notebook is run: it is code, no check, not to explore."""
    tags = cell.metadata.get("tags", ())
    return cell.cell_type == "code" and not is_check(cell) and EXPLORE not in tags


def graded_cells(notebook: NotebookNode) -> set[str]:
    """Return the names of the cells of any notebook that are answers or give points."""
    cells = [cell for cell in notebook.cells if isinstance(cell, dict)]
    marks = [(role(cell), grade_id(cell)) for cell in cells]
    return {name for mark, name in marks if name and (mark.get("grade") or mark.get("solution"))}


def tasks_in(released: NotebookNode, submitted: NotebookNode) -> set[str]:
    """Return the names of the released answers and checks that are in a student's notebook."""
    indices = {index for index in _origins(released.cells, submitted.cells) if index is not None}
    return {grade_id(released.cells[index]) for index in indices} & graded_cells(released)


def is_untouched(released: NotebookNode, submitted: NotebookNode) -> bool:
    """Tell whether nothing that counts was written in a student's notebook."""
    written, untouched = (
        [cell.source.strip() for cell in rebuild(released, notebook).cells if _is_students(cell)]
        for notebook in (submitted, released)
    )
    return written == untouched


def _is_students(cell: NotebookNode) -> bool:
    return is_run(cell) or is_answer(cell) or not (grade_id(cell) or _tags(cell))


def pictures_in(folder: Path) -> dict[str, bytes]:
    """Return the pictures in a submission's folder, by relative path; links are not followed."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in _SUFFIXES
        and not path.is_symlink()
        and path.is_file()
        and path.stat().st_size <= MAX_PICTURE
    }


@dataclass
class _Placed:
    """A cell of the rebuilt notebook, and the index of its released cell if it has one."""

    cell: NotebookNode
    index: int | None = None


class _Walk:
    """Goes through the student's cells and places those that count, in the student's order."""

    def __init__(
        self,
        released: Sequence[NotebookNode],
        submitted: Sequence[Any],
        pictures: Mapping[str, bytes],
    ) -> None:
        self.placed: list[_Placed] = []
        self.notes: list[str] = []
        self._released = released
        self._pictures = pictures
        self._first: dict[int, NotebookNode] = {}  # index of a released cell → where it was placed
        self._room = _Room()
        origins = list(_origins(released, submitted))
        last = {index: number for number, index in enumerate(origins)}
        for number, (cell, index) in enumerate(zip(submitted, origins, strict=True)):
            if index is None:
                self._add(number + 1, cell, explore=EXPLORE in _tags(cell))
            elif is_check(released[index]):
                self._check(number + 1, cell, index, counts=last[index] == number)
            elif index in self._first:
                self._another(number + 1, cell, index)
            else:
                self._place(number + 1, cell, index)

    def _check(self, number: int, cell: Any, index: int, *, counts: bool) -> None:
        released = self._released[index]
        if counts:
            self.placed.append(_Placed(copy.deepcopy(released), index))
        if not _same(_content(cell)[1], released.source):
            self.notes.append(
                f"cell {number} is a changed copy of the check {grade_id(released)}: the released "
                "check counts"
            )

    def _place(self, number: int, cell: Any, index: int) -> None:
        released, source = self._released[index], _content(cell)[1]
        placed = self._first[index] = copy.deepcopy(released)
        self.placed.append(_Placed(placed, index))
        if not _may_edit(released):
            self._another(number, cell, index)
        elif self._accepts(number, source, None):
            placed.source = source
            self._show_pictures(number, cell, placed)

    def _another(self, number: int, cell: Any, index: int) -> None:
        """Keep a further copy or part of a released cell, or what became of a locked one."""
        released, source = self._released[index], _content(cell)[1]
        if _same(source, released.source):
            return
        if is_answer(released):
            self._join(number, cell, index)
        elif self._add(number, cell, explore=EXPLORE in _tags(released)) and grade_id(released):
            kind = "copy" if _may_edit(released) else "version"
            self.notes.append(
                f"cell {number} is another {kind} of {grade_id(released)}, so it counts as an "
                "added cell"
            )

    def _join(self, number: int, cell: Any, index: int) -> None:
        released, source = self._released[index], _content(cell)[1]
        answer = self._first[index]
        is_repeated = not source.strip() or _same(source, answer.source)
        if is_repeated or not self._accepts(number, source, None):
            return
        answered = "" if _same(answer.source, released.source) else answer.source.rstrip()
        answer.source = f"{answered}\n\n{source}" if answered else source
        self._show_pictures(number, cell, answer)
        self.notes.append(
            f"cell {number} is another part of {grade_id(released)}, so both were joined"
        )

    def _add(self, number: int, cell: Any, *, explore: bool) -> bool:
        """Add a cell of the student's own, and tell whether it counts."""
        kind, source = _content(cell)
        # Editors often leave an empty cell at the end.
        if not source.strip() or not self._accepts(number, source, kind):
            return False
        metadata = {"tags": [EXPLORE]} if explore else {}
        added = nbformat.from_dict({"cell_type": kind, "metadata": metadata, "source": source})
        self._show_pictures(number, cell, added)
        self.placed.append(_Placed(added))
        return True

    def _accepts(self, number: int, source: str, added: str | None) -> bool:
        if problem := self._room.refuse(source, added):
            self.notes.append(f"cell {number} {problem}, so it was left out")
        return not problem

    def _show_pictures(self, number: int, submitted: Any, text: NotebookNode) -> None:
        """Keep the pictures that a text shows: its attachments, and files beside the notebook."""
        if text.cell_type != "markdown":
            return
        attached = submitted.get("attachments") if isinstance(submitted, dict) else None
        pictures = {
            str(name): _picture(bundle)
            for name, bundle in (attached if isinstance(attached, dict) else {}).items()
        }

        def attach(match: re.Match[str]) -> str:
            url = unquote(match["url"] or match["angled"] or match["src"])
            if re.match(r"(attachment|https?|data):", url, re.IGNORECASE):
                return match[0]
            name = PurePosixPath(url).as_posix()
            plain = re.sub(r"[^\w.-]", "_", name)
            pictures[plain] = _kind_and_text(self._pictures.get(name, b""))
            return f"![{match['alt'] or ''}](attachment:{plain})"

        text.source = _SHOWN.sub(attach, text.source)
        attachments = {
            name: {kind: data}
            for name, (kind, data) in pictures.items()
            if kind and self._room.has_for_picture(len(data))
        }
        if attachments:
            text.attachments = nbformat.from_dict({**text.get("attachments", {}), **attachments})
        if len(attachments) < len(pictures):
            self.notes.append(
                f"a picture in cell {number} was left out: it was not handed in, is no PNG or "
                f"JPEG, or has more than {MAX_PICTURE >> 20} MiB"
            )


def _origins(released: Sequence[NotebookNode], submitted: Sequence[Any]) -> Iterator[int | None]:
    """Yield the index of the released cell for each of the student's; None for added cells.

    The name by which nbgrader tracks a cell decides. If no cell has this name, the cell's id does.
    If none has the id either, as in old formats, the type and the text do.
    """
    tracked: dict[str, int] = {}
    ids: dict[str, int] = {}
    texts: dict[tuple[str, str], list[int]] = {}
    names = {grade_id(cell) for cell in submitted} - {""}
    their_ids = {_id(cell) for cell in submitted} - {""}
    for index, cell in enumerate(released):
        if name := grade_id(cell):
            tracked[name] = index
        if name in names:
            continue
        if _id(cell) in their_ids:
            ids[_id(cell)] = index
        else:
            texts.setdefault((cell.cell_type, cell.source), []).append(index)
    placed: set[int] = set()
    for cell in submitted:
        origin = tracked.get(grade_id(cell))
        if origin is None:
            origin = ids.get(_id(cell))
            if origin is None or origin in placed or not _fits(released[origin], cell):
                alike = texts.get(_content(cell), [])
                origin = next((i for i in alike if i not in placed), None)
        if origin is not None:
            placed.add(origin)
        yield origin


def _fits(released: NotebookNode, cell: Any) -> bool:
    """If a text of ours has become code, it counts as a new cell, not as an edit of ours."""
    return bool(grade_id(released)) or released.cell_type == _content(cell)[0]


class _Room:
    """The numbers of cells and bytes that a submission may still add."""

    def __init__(self) -> None:
        self._cells = MAX_CELLS
        self._bytes = MAX_TOTAL
        self._pictures = MAX_PICTURES

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

    def has_for_picture(self, size: int) -> bool:
        """Tell whether a picture is accepted; if it is, count it."""
        fits = size <= self._pictures
        self._pictures -= size * fits
        return fits


def _put_back(placed: list[_Placed], released: Sequence[NotebookNode]) -> list[str]:
    """Insert the released cells that the student deleted; checks run at the end. Return notes."""
    notes = []
    indices = {place.index for place in placed}
    at_end = []
    for index, cell in enumerate(released):
        if index in indices:
            continue
        back = _Placed(copy.deepcopy(cell), index)
        if is_check(cell):
            at_end.append(back)
            continue
        positions = {place.index: position for position, place in enumerate(placed)}
        before = next((i for i in range(index - 1, -1, -1) if i in positions), None)
        placed.insert(0 if before is None else positions[before] + 1, back)
        if role(cell).get("solution"):
            notes.append(f"the cell {grade_id(cell)} is missing, so the released cell is back")
    placed += at_end
    return notes


def _empty_stubs(placed: Sequence[_Placed], released: Sequence[NotebookNode]) -> None:
    """Empty each stub that is as released and whose names a cell above defines already."""
    defined: set[str] = set()
    for place in placed:
        if not is_run(place.cell):
            continue
        names = names_defined(place.cell.source)
        is_stub = place.index is not None and role(place.cell).get("solution")
        if is_stub and _same(place.cell.source, released[place.index or 0].source):
            if names and names <= defined:
                place.cell.source = ""
            continue
        defined |= names


def _leave_for_a_person(placed: Sequence[_Placed], released: Sequence[NotebookNode]) -> None:
    """Mark each untouched answer beside which the student wrote, so that somebody reads it.

    nbgrader gives 0 points to an answer that is as it was released.
    """
    for position, place in enumerate(placed):
        if place.index is None or not is_answer(released[place.index]):
            continue
        beside = [*placed[max(0, position - 1) : position], *placed[position + 1 : position + 2]]
        wrote = any(
            neighbour.index is None and EXPLORE not in _tags(neighbour.cell) for neighbour in beside
        )
        if wrote and _same(place.cell.source, released[place.index].source):
            place.cell.source += _ELSEWHERE


def _notes_on_exploring(cells: Sequence[NotebookNode]) -> list[str]:
    """Return a note if a cell that is run uses a name that only a cell to explore defines."""
    used, bound, explored = set[str](), set[str](), set[str]()
    for cell in cells:
        if cell.cell_type != "code":
            continue
        if not is_run(cell) and not is_check(cell):
            explored |= names_defined(cell.source)
            continue
        for node in ast.walk(_tree(cell.source)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                used.add(node.id)
            elif isinstance(node, ast.Name):
                bound.add(node.id)
            elif isinstance(node, ast.arg):
                bound.add(node.arg)
        bound |= names_defined(cell.source)
    if names := sorted(explored & used - bound):
        listed = ", ".join(name[:40] for name in names[:3])
        return [
            f"a cell to explore is not run, but other cells use what only it defines: {listed}. "
            "Move this into another cell"
        ]
    return []


def names_defined(source: str) -> set[str]:
    """Return the names that a cell defines at its top level; empty if it is no valid Python."""
    names = set()
    for node in _tree(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and _stored(n)}
    return names


def _stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _tree(source: str) -> ast.Module:
    plain = re.sub(r"^(\s*)(?=[%!?])", r"\1# ", source, flags=re.MULTILINE)
    try:
        return ast.parse(plain)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def role(cell: Any) -> dict[str, Any]:
    """Return a cell's nbgrader metadata, or an empty dict if it has none of the right form."""
    metadata = cell.get("metadata") if isinstance(cell, dict) else None
    marks = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    return marks if isinstance(marks, dict) else {}


def grade_id(cell: Any) -> str:
    """Return the name by which nbgrader tracks a cell, or "" if it does not."""
    name = role(cell).get("grade_id")
    return name if isinstance(name, str) else ""


def _id(cell: Any) -> str:
    """Return a cell's id, or "" if it has none, as in notebooks older than format 4.5."""
    name = cell.get("id") if isinstance(cell, dict) else None
    return name if isinstance(name, str) else ""


def _tags(cell: Any) -> list[Any]:
    metadata = cell.get("metadata") if isinstance(cell, dict) else None
    tags = metadata.get("tags") if isinstance(metadata, dict) else None
    return tags if isinstance(tags, list) else []


def _may_edit(released: NotebookNode) -> bool:
    """Tell whether a student may edit a cell: it is a solution, or nbgrader does not track it."""
    return bool(role(released).get("solution")) or not grade_id(released)


def _same(source: str, other: str) -> bool:
    return source.strip() == other.strip()


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


def _picture(bundle: Any) -> tuple[str, str]:
    """Return the type and the base64 of an attached picture; both empty if it is not kept."""
    for kind in _PICTURES:
        text = bundle.get(kind) if isinstance(bundle, dict) else None
        if isinstance(text, list):  # as in the file: lines
            text = "".join(map(str, text))
        if isinstance(text, str):
            with contextlib.suppress(ValueError):
                picture = _kind_and_text(base64.b64decode("".join(text.split()), validate=True))
                return picture if picture[0] == kind else ("", "")
    return "", ""


def _kind_and_text(data: bytes) -> tuple[str, str]:
    """Return the type and the base64 of a picture; both empty if it is not kept."""
    for kind, start in _PICTURES.items():
        if data.startswith(start) and len(data) <= MAX_PICTURE:
            return kind, base64.b64encode(data).decode("ascii")
    return "", ""


def _complete(notebook: NotebookNode) -> None:
    """Give every cell the fields that its type and the notebook's format require."""
    with_ids = (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)
    ids = {cell.id for cell in notebook.cells if "id" in cell}
    free = (name for n in itertools.count(1) if (name := f"added-{n}") not in ids)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        if with_ids and "id" not in cell:
            cell.id = next(free)
