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

import base64
import contextlib
import copy
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from symtable import SymbolTable, symtable
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
    walk = _Walk(released.cells, _written_in(submitted), pictures or {})
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
    indices = {
        index for index in _origins(released.cells, _written_in(submitted)) if index is not None
    }
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


@dataclass(frozen=True, eq=False)
class _Written:
    """What may count of a cell of the student's; everything empty that has no valid form."""

    number: int
    kind: str
    source: str
    name: str
    """By which nbgrader tracks it."""
    id: str
    is_to_explore: bool
    attached: Mapping[str, Any]


def _written_in(submitted: NotebookNode) -> list[_Written]:
    """Read the cells of a student's notebook, which may be anything at all."""
    cells = submitted.get("cells")
    return [
        _read(number, cell if isinstance(cell, dict) else {})
        for number, cell in enumerate(cells if isinstance(cells, list) else (), 1)
    ]


def _read(number: int, cell: dict[str, Any]) -> _Written:
    kind, source, name = (
        text if isinstance(text := cell.get(key), str) else ""
        for key in ("cell_type", "source", "id")
    )
    # NUL and halves of surrogate pairs become question marks: files and databases refuse them.
    source = source.replace("\0", "?").encode(errors="replace").decode()
    attached = cell.get("attachments")
    pictures = attached if isinstance(attached, dict) else {}
    return _Written(number, kind, source, grade_id(cell), name, EXPLORE in _tags(cell), pictures)


class _Walk:
    """Goes through the student's cells and places those that count, in the student's order."""

    def __init__(
        self,
        released: Sequence[NotebookNode],
        written: Sequence[_Written],
        pictures: Mapping[str, bytes],
    ) -> None:
        self.placed: list[_Placed] = []
        self.notes: list[str] = []
        self._released = released
        self._pictures = pictures
        self._first: dict[int, NotebookNode] = {}  # index of a released cell → where it was placed
        self._cells, self._bytes, self._picture_bytes = MAX_CELLS, MAX_TOTAL, MAX_PICTURES
        origins = list(_origins(released, written))
        last = dict(zip(origins, written, strict=True))
        for cell, index in zip(written, origins, strict=True):
            if index is None:
                self._add(cell, cell.is_to_explore)
            elif is_check(released[index]):
                self._check(cell, index, counts=last[index] is cell)
            elif index in self._first:
                self._another(cell, index)
            else:
                self._place(cell, index)

    def _check(self, cell: _Written, index: int, *, counts: bool) -> None:
        released = self._released[index]
        if counts:
            self.placed.append(_Placed(copy.deepcopy(released), index))
        if not _same(cell.source, released.source):
            self.notes.append(
                f"cell {cell.number} is a changed copy of the check {grade_id(released)}: the "
                "released check counts"
            )

    def _place(self, cell: _Written, index: int) -> None:
        placed = self._first[index] = copy.deepcopy(self._released[index])
        self.placed.append(_Placed(placed, index))
        if not _may_edit(placed):
            self._another(cell, index)
        elif self._accepts(cell):
            placed.source = cell.source
            self._show_pictures(cell, placed)

    def _another(self, cell: _Written, index: int) -> None:
        """Keep a further copy or part of a released cell, or what became of a locked one."""
        released = self._released[index]
        if _same(cell.source, released.source):
            return
        if is_answer(released):
            self._join(cell, index)
        elif self._add(cell, EXPLORE in _tags(released)) and grade_id(released):
            kind = "copy" if _may_edit(released) else "version"
            self.notes.append(
                f"cell {cell.number} is another {kind} of {grade_id(released)}, so it counts as an "
                "added cell"
            )

    def _join(self, cell: _Written, index: int) -> None:
        released, answer = self._released[index], self._first[index]
        is_repeated = not cell.source.strip() or _same(cell.source, answer.source)
        if is_repeated or not self._accepts(cell):
            return
        answered = "" if _same(answer.source, released.source) else answer.source.rstrip()
        answer.source = f"{answered}\n\n{cell.source}" if answered else cell.source
        self._show_pictures(cell, answer)
        self.notes.append(
            f"cell {cell.number} is another part of {grade_id(released)}, so both were joined"
        )

    def _add(self, cell: _Written, is_to_explore: bool) -> bool:
        """Add a cell of the student's own, and tell whether it counts."""
        # Editors often leave an empty cell at the end.
        if not cell.source.strip() or not self._accepts(cell, is_added=True):
            return False
        metadata = {"tags": [EXPLORE]} if is_to_explore else {}
        fields = {"cell_type": cell.kind, "metadata": metadata, "source": cell.source}
        added = nbformat.from_dict(fields)
        self._show_pictures(cell, added)
        self.placed.append(_Placed(added))
        return True

    def _accepts(self, cell: _Written, *, is_added: bool = False) -> bool:
        """Count a cell if there is room for it, else note why it is left out."""
        size = len(cell.source.encode())
        if is_added and cell.kind not in ("code", "markdown"):
            problem = "is neither code nor Markdown"
        elif size > MAX_SOURCE:
            problem = f"is longer than {MAX_SOURCE} bytes"
        elif cell.source.count("\n") > MAX_LINES:
            problem = f"has more than {MAX_LINES} lines"
        elif size > self._bytes:
            problem = f"exceeds the limit of {MAX_TOTAL} bytes in all cells together"
        elif is_added and not self._cells:
            problem = f"exceeds the limit of {MAX_CELLS} added cells"
        else:
            self._bytes -= size
            self._cells -= is_added
            return True
        self.notes.append(f"cell {cell.number} {problem}, so it was left out")
        return False

    def _show_pictures(self, cell: _Written, text: NotebookNode) -> None:
        """Keep the pictures that a text shows: its attachments, and files beside the notebook."""
        if text.cell_type != "markdown":
            return
        pictures = {str(name): _attached(bundle) for name, bundle in cell.attached.items()}

        def attach(match: re.Match[str]) -> str:
            url = unquote(match["url"] or match["angled"] or match["src"])
            if re.match(r"(attachment|https?|data):", url, re.IGNORECASE):
                return match[0]
            name = PurePosixPath(url).as_posix()
            plain = re.sub(r"[^\w.-]", "_", name)
            pictures[plain] = _bundle_of(self._pictures.get(name, b""))
            return f"![{match['alt'] or ''}](attachment:{plain})"

        text.source = _SHOWN.sub(attach, text.source)
        attachments = {}
        for name, bundle in pictures.items():
            size = sum(map(len, bundle.values()))
            if bundle and size <= self._picture_bytes:
                self._picture_bytes -= size
                attachments[name] = bundle
        if attachments:
            text.attachments = nbformat.from_dict({**text.get("attachments", {}), **attachments})
        if len(attachments) < len(pictures):
            self.notes.append(
                f"a picture in cell {cell.number} was left out: it was not handed in, is no PNG or "
                f"JPEG, or has more than {MAX_PICTURE >> 20} MiB"
            )


def _origins(released: Sequence[NotebookNode], written: Sequence[_Written]) -> Iterator[int | None]:
    """Yield the index of the released cell for each of the student's; None for added cells.

    The name by which nbgrader tracks a cell decides. If no cell has this name, the cell's id does.
    If none has the id either, as in old formats, the type and the text do.
    """
    tracked: dict[str, int] = {}
    ids: dict[str, int] = {}
    texts: dict[tuple[str, str], list[int]] = {}
    names, written_ids = ({getattr(cell, key) for cell in written} for key in ("name", "id"))
    for index, old in enumerate(released):
        if name := grade_id(old):
            tracked[name] = index
        if name and name in names:
            continue
        if old.get("id") in written_ids:
            ids[old.id] = index
        else:
            texts.setdefault((old.cell_type, old.source), []).append(index)
    placed: set[int] = set()
    for cell in written:
        origin = tracked.get(cell.name)
        if origin is None:
            origin = ids.get(cell.id)
            if origin is None or origin in placed or not _fits(released[origin], cell):
                alike = texts.get((cell.kind, cell.source), [])
                origin = next((i for i in alike if i not in placed), None)
        if origin is not None:
            placed.add(origin)
        yield origin


def _fits(released: NotebookNode, cell: _Written) -> bool:
    """If a text of ours has become code, it counts as a new cell, not as an edit of ours."""
    return bool(grade_id(released)) or released.cell_type == cell.kind


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
    used, defined, explored = set[str](), set[str](), set[str]()
    for cell in (cell for cell in cells if cell.cell_type == "code"):
        counts = is_run(cell) or is_check(cell)
        (defined if counts else explored).update(names_defined(cell.source))
        used |= _globals_in(_symbols(cell.source)) if counts else set()
    if names := sorted(explored & used - defined):
        listed = ", ".join(name[:40] for name in names[:3])
        return [
            f"a cell to explore is not run, but other cells use what only it defines: {listed}. "
            "Move this into another cell"
        ]
    return []


def names_defined(source: str) -> set[str]:
    """Return the names that a cell defines at its top level; empty if it is no valid Python."""
    symbols = _symbols(source).get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def _globals_in(table: SymbolTable) -> set[str]:
    """Return the global names that code uses, also those in its functions."""
    symbols = table.get_symbols()
    names = {s.get_name() for s in symbols if s.is_global() and s.is_referenced()}
    return names.union(*map(_globals_in, table.get_children()))


def _symbols(source: str) -> SymbolTable:
    plain = re.sub(r"^(\s*)(?=[%!?])", r"\1# ", source, flags=re.MULTILINE)
    try:
        return symtable(plain, "cell", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return symtable("", "no valid Python", "exec")


def role(cell: Any) -> dict[str, Any]:
    """Return a cell's nbgrader metadata, or an empty dict if it has none of the right form."""
    metadata = cell.get("metadata") if isinstance(cell, dict) else None
    marks = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    return marks if isinstance(marks, dict) else {}


def grade_id(cell: Any) -> str:
    """Return the name by which nbgrader tracks a cell, or "" if it does not."""
    name = role(cell).get("grade_id")
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


def _attached(bundle: Any) -> dict[str, str]:
    """Return the type and the base64 of an attached picture; nothing if it is not kept."""
    for text in bundle.values() if isinstance(bundle, dict) else ():
        lines = text if isinstance(text, list) else [text]
        with contextlib.suppress(TypeError, ValueError):
            if picture := _bundle_of(base64.b64decode("".join(lines))):
                return picture
    return {}


def _bundle_of(data: bytes) -> dict[str, str]:
    """Return the type and the base64 of a picture; nothing if it is not kept."""
    kinds = [kind for kind, start in _PICTURES.items() if data.startswith(start)]
    fits = len(data) <= MAX_PICTURE
    return {kind: base64.b64encode(data).decode("ascii") for kind in kinds if fits}


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
