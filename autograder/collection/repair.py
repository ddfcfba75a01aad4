"""Check the files and the notebook in a submission's folder before anything copies or reads them.

nbgrader copies everything that it finds, follows links, opens pipes, and stops at a timestamp or a
notebook that it cannot read. So files that no student needs to submit are moved to ``set_aside/``,
next to ``submitted/``. A damaged notebook is replaced by its readable part. Nothing is lost,
nothing stops the grading, and `notes` says what was done.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import nbformat

from autograder.collection.listing import files_below
from autograder.collection.times import read_stamp
from autograder.files import write_whole

MAX_FILES = 200
MAX_FILE = 10 * 2**20
MAX_ALL = 50 * 2**20
MAX_NOTEBOOK = 50 * 2**20
MAX_READ = 5_000  # cells of a notebook
_MAX_DIGITS = 300
_MAX_NOTES = 20
_NOTEBOOK = "the notebook"
_MENDED = "mended"
"""The key in a repaired notebook's metadata under which it says what was done."""

notes: dict[tuple[str, str], list[str]] = {}
"""(Student, assignment) → sentences that say what was set aside or repaired."""


def vet(assignment: str, student: str, notebooks: Sequence[str]) -> None:
    """Vet the folder of `notebooks`: nbgrader calls this hook before it converts a submission.

    The folder's path says whose submission it is: `assignment` and `student` may be patterns. There
    are no notebooks if all are refused.
    """
    if not notebooks:
        return
    paths = [Path(notebook) for notebook in notebooks]
    folder = paths[0].parent
    remarks = notes[folder.parent.name, folder.name] = []
    for path in paths:  # first, because notes on files may exceed the limit of notes
        _vet_notebook(path, remarks)
    _vet_files(folder, paths, remarks)
    del remarks[_MAX_NOTES:]


def damage(remarks: Sequence[str]) -> list[str]:
    """Return the notes of a submission that are about the notebook itself."""
    return [note for note in remarks if note.startswith(_NOTEBOOK)]


def place_aside(path: Path, folder: Path) -> Path:
    """Return where a file of the submission's `folder` is kept if it is set aside."""
    student, assignment = folder.parent.name, folder.name
    return folder.parents[2] / "set_aside" / student / assignment / path.relative_to(folder)


def _new_place_aside(path: Path, folder: Path) -> Path:
    target = place_aside(path, folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_symlink() or target.exists():
        target = target.with_name(f"{target.name}.{os.urandom(3).hex()}")
    return target


def _replace(path: Path, text: str) -> None:
    """Set aside what is at `path`, and write `text` there.

    A kill in between, or a power loss, leaves the submitted notebook or the new one.
    """
    aside = _new_place_aside(path, path.parent)
    new = aside.with_name(f"{aside.name}.new")
    write_whole(new, text)  # not in the submission, where a kill would leave a draft
    if path.is_file() or path.is_symlink():
        shutil.copy2(path, aside, follow_symlinks=False)
    else:  # a folder, or a pipe that nobody should open
        shutil.move(path, aside)
    os.replace(new, path)


# Files ----------------------------------------------------------------------------------------


def _vet_files(folder: Path, notebooks: Sequence[Path], remarks: list[str]) -> None:
    size = surplus = 0
    beside: list[str] = []
    for path, info in sorted(files_below(folder)):
        if path in notebooks:
            continue
        name = str(path.relative_to(folder))[:80]
        if not stat.S_ISREG(info.st_mode):
            remarks.append(f"{name!r} is not an ordinary file, so it was set aside")
        elif path == folder / "timestamp.txt" and not _is_timestamp(path, info.st_size):
            remarks.append(
                "timestamp.txt contains no time and was set aside, so the submission has no time"
            )
        elif info.st_size > MAX_FILE or size + info.st_size > MAX_ALL:
            remarks.append(f"{name!r} is too large, so it was set aside")
        elif len(beside) >= MAX_FILES:
            surplus += 1
        else:
            size += info.st_size
            beside.append(str(path.relative_to(folder)))
            continue
        shutil.move(path, _new_place_aside(path, folder))  # a link is moved as a link
    released = folder.parents[2] / "release" / folder.name
    remarks += notes_on_files(name for name in beside if not (released / name).exists())
    if surplus:
        remarks.append(
            f"only {MAX_FILES} files may be submitted, so others were set aside: {surplus}"
        )


def _is_timestamp(path: Path, size: int) -> bool:
    text = "" if size > 1000 else path.read_text(encoding="utf-8", errors="replace").strip()
    return size == 0 or read_stamp(text) is not None


def notes_on_files(names: Iterable[str]) -> list[str]:
    """Return a note on each kept file that a notebook might need; only its pictures are shown."""
    return [
        f"{name[:80]!r} is not there when the notebook is graded: only what is in its cells counts"
        for name in names
        if name.endswith((".py", ".csv", ".json"))
    ]


# The notebook ---------------------------------------------------------------------------------


def _vet_notebook(path: Path, remarks: list[str]) -> None:
    info = os.lstat(path)
    content: Any = None
    if not stat.S_ISREG(info.st_mode):
        problem = "is a link"
    elif info.st_size > MAX_NOTEBOOK:
        problem = f"is larger than {MAX_NOTEBOOK // 2**20} MiB"
    else:
        data = path.read_bytes()
        problem, content = read_content(data)
        problem = problem or _why_nbgrader_stops(content) or _odd_encoding(data)
    if not problem:
        remarks += _earlier_note(path, content)
        return
    replacement = "an empty notebook" if content is None else "its readable part"
    note = f"{_NOTEBOOK} {problem}. It was set aside, and {replacement} was graded in its place"
    remarks.append(note)
    mended = repaired(content)
    mended["metadata"][_MENDED] = note
    _replace(path, json.dumps(mended))


def _earlier_note(path: Path, content: Any) -> list[str]:
    """Return the note on a notebook that this pass repaired before, if grading was interrupted."""
    note = content["metadata"].get(_MENDED)
    ours = isinstance(note, str) and re.fullmatch(rf"{_NOTEBOOK}[\w ,:.-]{{,200}}", note)
    return [str(note)] if ours and place_aside(path, path.parent).exists() else []


def text_of(data: bytes) -> str:
    """Return a notebook's text. Windows' editors may save UTF-16, or UTF-8 with a mark in front."""
    return data.decode(json.detect_encoding(data), "replace")


def _odd_encoding(data: bytes) -> str:
    encoding = json.detect_encoding(data)
    if encoding != "utf-8":
        return f"is in {encoding} and not in plain UTF-8"
    try:
        data.decode()
    except UnicodeDecodeError:
        return "is in an encoding other than UTF-8, and some letters are lost"
    return ""


def read_content(data: bytes) -> tuple[str, Any]:
    """Return why a file's bytes are no whole JSON, or an empty string; and what can be read.

    The second result is None if nothing can be read. `repaired` makes a notebook of it.
    """
    text = text_of(data)
    try:
        return "", json.loads(text)
    except (ValueError, RecursionError):
        return _around_damage(text)


def _why_nbgrader_stops(content: Any) -> str:
    """Return why nbgrader cannot read a notebook, or an empty string."""
    cells = cells_of(content)
    if cells is None or not isinstance(content.get("metadata"), dict):
        return "is damaged"
    if content.get("nbformat") != 4:  # nbformat takes minutes to convert a large one
        return f"has the old format {str(content.get('nbformat'))[:3]}"
    if len(cells) > MAX_READ:
        return f"has more than {MAX_READ} cells"
    if not all(map(_is_cell, cells)):
        return "is damaged"
    try:
        # nbgrader reads it again, so whatever nbformat refuses is damage. Outputs do not count.
        bare = [{**cell, "outputs": []} if "outputs" in cell else cell for cell in cells]
        nbformat.reads(json.dumps({**content, "cells": bare}), as_version=4)
    except Exception:  # nbformat may raise anything, and nbgrader would stop at the error
        return "is damaged"
    return ""


def cells_of(content: Any) -> list[Any] | None:
    """Return the cells of a notebook in format 4, or in an older one that has worksheets."""
    if not isinstance(content, dict):
        return None
    if isinstance(cells := content.get("cells"), list):
        return cells
    sheets = content.get("worksheets")
    if not isinstance(sheets, list):
        return None
    cell_lists = [sheet.get("cells") for sheet in sheets if isinstance(sheet, dict)]
    return [cell for cells in cell_lists if isinstance(cells, list) for cell in cells]


_CELL = re.compile(r'\{\s*"(?:attachments|cell_type|execution_count|id|metadata|outputs|source)"')
"""The beginning of a cell, as editors write it."""
_MOST_DAMAGE = 200
"""Largest number of positions from which reading is tried in vain."""
# Python itself refuses to read a number with thousands of digits.
_DECODER = json.JSONDecoder(parse_int=lambda digits: int(digits[:_MAX_DIGITS]))


def _around_damage(text: str) -> tuple[str, Any]:
    """Return the cells of a notebook that is not JSON, except those that are damaged."""
    cells: list[Any] = []
    at = damaged = 0
    for begin in _CELL.finditer(text):
        if begin.start() < at:
            continue  # a part of the cell before
        try:
            cell, at = _DECODER.raw_decode(text, begin.start())
        except (ValueError, RecursionError):
            if (damaged := damaged + 1) == _MOST_DAMAGE:
                break
            continue
        if "cell_type" in cell:
            cells.append(cell)
    if not cells:
        return "is not JSON", None
    return f"is damaged, and {len(cells)} of its cells can be read", {"cells": cells}


def _is_cell(cell: Any) -> bool:
    return (
        isinstance(cell, dict)
        and isinstance(cell.get("metadata"), dict)
        and isinstance(cell.get("cell_type"), str)
        and isinstance(_source(cell), str)
    )


def _source(cell: dict[str, Any]) -> str | None:
    source = cell.get("source", cell.get("input"))
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        return "".join(source)
    return source if isinstance(source, str) else None


def repaired(content: Any) -> dict[str, Any]:
    """Return a notebook with the readable cells; the next pass restores the others."""
    cells: list[dict[str, Any]] = []
    names: set[str] = set()
    for cell in (cells_of(content) or [])[:MAX_READ]:
        if not isinstance(cell, dict) or (source := _source(cell)) is None:
            continue
        kind = cell.get("cell_type")
        kind = "markdown" if kind in ("heading", "html") else kind  # of older formats
        kind = kind if kind in ("code", "markdown", "raw") else "raw"
        name, metadata = str(cell.get("id")), cell.get("metadata")
        if name in names or not re.fullmatch(r"[\w-]{1,64}", name, re.ASCII):
            name = f"repaired-{len(cells)}"
        names.add(name)
        mark = metadata.get("nbgrader") if isinstance(metadata, dict) else None
        clean: dict[str, Any] = {
            "cell_type": kind,
            "id": name,
            "metadata": {"nbgrader": mark} if isinstance(mark, dict) else {},
            "source": source,
        }
        if kind == "markdown" and isinstance(cell.get("attachments"), dict):
            clean["attachments"] = cell["attachments"]
        if kind == "code":
            clean |= {"outputs": [], "execution_count": None}
        cells.append(clean)
    return {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
