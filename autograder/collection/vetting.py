"""Choose which files of a submission to collect, and give a reason for each refused file.

Collected are the notebook and few other files. They are stored in the grader's folders, and
formgrader serves these from the instructor's own address. So every page, picture format or program
that could run there is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

import nbformat
from nbformat import NotebookNode

from autograder.collection.formats import HandIn
from autograder.collection.listing import Entry, SourceError, inner_zip
from autograder.passes.vet import (
    MAX_ALL,
    MAX_FILE,
    MAX_FILES,
    MAX_NOTEBOOK,
    MAX_READ,
    notes_on_files,
)
from course_lib.learner.what_counts import graded_cells, is_untouched, rebuild, tasks_in

KINDS = {".ipynb", ".py", ".txt", ".md", ".csv", ".json", ".png", ".jpg", ".jpeg", ".pdf"}
"""The kinds of files that are accepted."""
_ARCHIVES = {".zip", ".gz", ".tar", ".tgz", ".bz2", ".xz", ".7z", ".rar", ".zst"}
_AGAIN = re.compile(
    r"^(?:copy of |kopie von )|(?:[-_ ]*(?:\(\d+\)|\d+|copy|kopie|final|new)(?: ?\d+)?)+$",
    re.IGNORECASE,
)
"""What browsers, systems and people add to a file's name if that name exists already."""
_COPY = re.compile(r"cop(?:y|ie)|kopie", re.IGNORECASE)
_MOST_UNPACKED = 2 * MAX_FILES
"""Largest number of files of a student's zip that are looked at; notebooks come first."""
_MOST_REFUSED = 20
"""Largest number of refused files of one submission that are listed one by one."""


@dataclass
class Vetted:
    """The files of a submission that are collected, and the refused ones as (path, why)."""

    files: dict[str, bytes] = field(default_factory=dict)
    refused: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def vet_hand_in(
    hand_in: HandIn, released: Mapping[str, NotebookNode], *, own_stamp: bool
) -> Vetted:
    """Read the files of a submission that may be collected.

    Args:
        hand_in: the files.
        released: name of each notebook, without ``.ipynb`` → the notebook as it was handed out.
        own_stamp: whether the source, not the student, wrote a ``timestamp.txt`` among the files.

    """
    vetted = Vetted(notes=list(hand_in.notes))
    entries = _unpacked(list(hand_in.files.values()), vetted)
    names = _notebook_names(entries, released, vetted)
    room = MAX_ALL
    for entry in sorted(entries, key=lambda e: (e.path not in names, e.path)):
        is_notebook = entry.path in names
        target = names.get(entry.path, entry.path)
        if entry.path == "timestamp.txt":
            if not own_stamp:
                vetted.refused.append(
                    (entry.path, "was written by the student, so the time in it does not count")
                )
            continue
        limit = MAX_NOTEBOOK if is_notebook else MAX_FILE
        if why := _refusal(entry, target, vetted):
            vetted.refused.append((entry.path, why))
            continue
        try:
            data = entry.read(limit if is_notebook else min(limit, room))
        except OSError as error:
            vetted.refused.append((entry.path, str(error)))
            continue
        if len(data) > limit:
            why = f"is larger than {limit >> 20} MiB when unpacked"
        elif _is_of_another_assignment(entry, data, released):
            why = "is the notebook of another assignment: most of its tasks are different"
        elif not is_notebook and len(data) > room:
            why = f"exceeds the limit of {MAX_ALL >> 20} MiB for all files together"
        if why:
            vetted.refused.append((entry.path, why))
            continue
        if is_notebook:
            vetted.files[target] = _as_utf8(target, data, vetted)
        else:
            room -= len(data)
            vetted.files[target] = data
    for name, notebook in released.items():
        if data := vetted.files.get(f"{name}.ipynb", b""):
            vetted.notes += _notes_on(data, notebook, vetted.files)
    if len(vetted.refused) > _MOST_REFUSED:
        more = len(vetted.refused) - _MOST_REFUSED
        vetted.refused[_MOST_REFUSED:] = [("", f"and {more} more files were refused")]
    return vetted


def _notes_on(data: bytes, released: NotebookNode, files: Mapping[str, bytes]) -> list[str]:
    """Return what the grader will say of a notebook, and which files it will not see."""
    submitted = _parsed(data)
    if submitted is None:
        return []
    found = rebuild(released, submitted, files)
    notes = list(found.metadata.get("rebuild", ()))
    if not tasks_in(released, submitted):
        notes = ["has none of this assignment's tasks: is it another notebook?"]
    return notes + notes_on_files(name for name in files if name != "timestamp.txt")


def _refusal(entry: Entry, target: str, vetted: Vetted) -> str:
    suffix = PurePosixPath(target).suffix.lower()
    if entry.refusal:
        return entry.refusal
    if suffix in _ARCHIVES:
        return "is an archive inside an archive" if "/" in entry.path else "is an archive"
    if suffix not in KINDS:
        return f"is a kind of file that is not needed ({suffix or 'no suffix'})"
    if target in vetted.files:
        return "has the same name as another file"
    above = {str(path) for path in PurePosixPath(target).parents}
    if above & set(vetted.files) or any(name.startswith(f"{target}/") for name in vetted.files):
        return "has the same name as a folder"
    if len(vetted.files) >= MAX_FILES:
        return f"is one file too many: at most {MAX_FILES} files are accepted"
    return ""


def _unpacked(entries: list[Entry], vetted: Vetted) -> list[Entry]:
    """Return the files, with a student's zip unpacked. A zip inside that zip is not unpacked."""
    found = []
    for entry in entries:
        if not entry.is_zip or entry.refusal or "/" in entry.path:
            found.append(entry)
            continue
        try:
            inside = inner_zip(entry, MAX_ALL)
        except (SourceError, OSError) as error:
            vetted.refused.append((entry.path, str(error)))
            continue
        tops = {each.path.partition("/")[0] for each in inside}
        if len(tops) == 1 and all(
            "/" in each.path for each in inside
        ):  # the folder that was zipped
            inside = [replace(e, path=e.path.partition("/")[2]) for e in inside]
        vetted.notes.append(f"unpacked {entry.name}")
        if (count := len(inside)) > _MOST_UNPACKED:
            inside.sort(key=lambda each: not each.name.lower().endswith(".ipynb"))
            del inside[_MOST_UNPACKED:]
            vetted.notes.append(f"{entry.name} has {count} files; {_MOST_UNPACKED} were looked at")
        found += inside
    return found


@dataclass(frozen=True)
class _Candidate:
    """A file that may be the notebook.

    Attributes:
        entry: the file.
        tasks: the number of the assignment's tasks in it.
        untouched: whether nothing was written in it.
        named: whether it has the notebook's name, perhaps with an addition.

    """

    entry: Entry
    tasks: int
    untouched: bool
    named: bool


def _notebook_names(
    entries: Sequence[Entry], released: Mapping[str, NotebookNode], vetted: Vetted
) -> dict[str, str]:
    """Return path → name of the notebooks that count; note which others are ignored.

    A notebook in which something was written counts before one in which nothing was; then the
    latest; then the one with the exact name.
    """
    counts: dict[str, str] = {}
    read: dict[str, Any] = {}
    for name, notebook in released.items():
        found = [
            candidate
            for entry in entries
            if (candidate := _candidate(entry, name, notebook, read)) and entry.path not in counts
        ]
        alone = len(released) == 1 and len(found) == 1
        found = [each for each in found if each.named or each.tasks or alone]
        if not found:
            vetted.notes.append(f"there is no {name}.ipynb")
            continue
        best = max(found, key=lambda each: _rank(each, name))
        counts[best.entry.path] = f"{name}.ipynb"
        if ignored := [repr(each.entry.path) for each in found if each is not best]:
            vetted.notes.append(f"{best.entry.path!r} was used; ignored: {', '.join(ignored)}")
        elif best.entry.name != f"{name}.ipynb":
            vetted.notes.append(f"{best.entry.name!r} was used as {name}.ipynb")
    return counts


def _candidate(
    entry: Entry, name: str, released: NotebookNode, read: dict[str, Any]
) -> _Candidate | None:
    """Return a file as a candidate; None if it is no notebook, or another assignment's."""
    lower = entry.name.lower()
    is_notebook = lower.endswith(".ipynb")
    if entry.refusal or not (is_notebook or lower.endswith((".json", ".ipynb.txt"))):
        return None
    if entry.path not in read:
        try:
            read[entry.path] = _parsed(entry.read(MAX_NOTEBOOK))
        except OSError:
            read[entry.path] = None
    content = read[entry.path]
    stem = re.sub(r"\.ipynb(\.txt|\.json)?$|\.json$", "", entry.name, flags=re.IGNORECASE)
    named = name in (stem, _AGAIN.sub("", _AGAIN.sub("", stem)))
    if content is None:  # damaged: grading uses the readable part
        return _Candidate(entry, 0, False, named) if is_notebook else None
    if _is_another(content, released):
        return None
    tasks = len(tasks_in(released, content))
    return _Candidate(entry, tasks, is_untouched(released, content), named)


def _rank(candidate: _Candidate, name: str) -> tuple[object, ...]:
    entry = candidate.entry
    number = 0 if _COPY.search(entry.name) else _number(entry.name)
    return (
        *(bool(candidate.tasks) or candidate.named, not candidate.untouched),
        *(entry.modified, number, entry.name == f"{name}.ipynb", entry.path.count("/") == 0),
    )


def _parsed(data: bytes) -> NotebookNode | None:
    """Return a notebook's content, or None if it has no list of cells."""
    try:
        content = json.loads(data.decode(json.detect_encoding(data)))
    except (ValueError, RecursionError):
        return None
    cells = content.get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list):
        return None
    kept = [cell for cell in cells[:MAX_READ] if isinstance(cell, dict)]
    for cell in kept:
        if isinstance(source := cell.get("source"), list):  # Jupyter writes lines
            cell["source"] = "".join(line for line in source if isinstance(line, str))
        cell.pop("outputs", None)
    notebook: NotebookNode = nbformat.from_dict({"cells": kept, "metadata": {}})
    return notebook


def _is_another(content: NotebookNode, released: NotebookNode) -> bool:
    """Tell whether most of a notebook's tasks are not this assignment's."""
    found, ours = graded_cells(content), graded_cells(released)
    return len(found - ours) > len(found & ours)


def _is_of_another_assignment(
    entry: Entry, data: bytes, released: Mapping[str, NotebookNode]
) -> bool:
    if not entry.name.lower().endswith(".ipynb"):
        return False
    content = _parsed(data)
    return content is not None and all(_is_another(content, each) for each in released.values())


def _number(name: str) -> int:
    """Return the number that a system added to a name because the name existed already, else 0."""
    found = re.search(r"[-( _](\d+)\)?\.\w+$", name)
    return int(found[1]) if found else 0


def _as_utf8(name: str, data: bytes, vetted: Vetted) -> bytes:
    """Return a notebook in UTF-8 without a byte order mark, as nbgrader needs it."""
    try:
        text = data.decode(json.detect_encoding(data))  # strict: a damaged file is not changed
        content = json.loads(text)
    except (ValueError, RecursionError):
        vetted.notes.append(f"{name} is damaged: grading uses the part that can be read")
        return data
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        vetted.notes.append(f"{name} has no list of cells: grading uses the part that can be read")
    plain = text.removeprefix("\ufeff").encode("utf-8", "surrogatepass")
    if plain != data:
        vetted.notes.append(f"{name} was converted to plain UTF-8")
    return plain
