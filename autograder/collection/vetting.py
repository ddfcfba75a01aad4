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

from autograder.collection.formats import HandIn
from autograder.collection.listing import Entry, SourceError, inner_zip
from autograder.passes.vet import MAX_ALL, MAX_FILE, MAX_FILES, MAX_NOTEBOOK

KINDS = {".ipynb", ".py", ".txt", ".md", ".csv", ".json", ".png", ".jpg", ".jpeg", ".pdf"}
"""The kinds of files that are accepted."""
_ARCHIVES = {".zip", ".gz", ".tar", ".tgz", ".bz2", ".xz", ".7z", ".rar", ".zst"}
_AGAIN = re.compile(r"(?: ?\(\d+\)|-\d+|_\d+| - Copy| copy)+$")
"""Suffixes that browsers and systems add to a file's name if that name exists already."""


@dataclass
class Vetted:
    """The files of a submission that are collected, and the refused ones as (path, why)."""

    files: dict[str, bytes] = field(default_factory=dict)
    refused: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def vet_hand_in(
    hand_in: HandIn, notebooks: Mapping[str, frozenset[str]], *, own_stamp: bool
) -> Vetted:
    """Read the files of a submission that may be collected.

    Args:
        hand_in: the files.
        notebooks: name of each notebook, without ``.ipynb`` → its `graded_cells`.
        own_stamp: whether the source, not the student, wrote a ``timestamp.txt`` among the files.

    """
    vetted = Vetted(notes=list(hand_in.notes))
    entries = _unpacked(list(hand_in.files.values()), vetted)
    names = _notebook_names(entries, tuple(notebooks), vetted)
    room = MAX_ALL
    for entry in sorted(entries, key=lambda e: (e.path not in names, e.path)):
        target = names.get(entry.path, entry.path)
        if entry.path == "timestamp.txt":
            if not own_stamp:
                vetted.refused.append(
                    (entry.path, "was written by the student, so the time in it does not count")
                )
            continue
        limit = MAX_NOTEBOOK if entry.path in names else MAX_FILE
        if why := _refusal(entry, target, vetted):
            vetted.refused.append((entry.path, why))
            continue
        try:
            data = entry.read(limit)
        except OSError as error:
            vetted.refused.append((entry.path, str(error)))
            continue
        if len(data) > min(limit, room if entry.path not in names else limit):
            vetted.refused.append((entry.path, f"is larger than {limit >> 20} MiB when unpacked"))
            continue
        if entry.path in names and _is_another(data, notebooks[PurePosixPath(target).stem]):
            why = "is the notebook of another assignment: most of its tasks are different"
            vetted.refused.append((entry.path, why))
            continue
        room -= len(data) if entry.path not in names else 0
        vetted.files[target] = _as_utf8(target, data, vetted) if entry.path in names else data
    return vetted


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
        found += inside[: 10 * MAX_FILES]
        vetted.notes.append(f"unpacked {entry.name}")
    return found


def _notebook_names(
    entries: Sequence[Entry], notebooks: Sequence[str], vetted: Vetted
) -> dict[str, str]:
    """Return path → name of the notebooks that count. The latest of several copies counts."""
    found: dict[str, list[Entry]] = {}
    others = []
    for entry in entries:
        path = PurePosixPath(entry.path)
        if path.suffix.lower() != ".ipynb" or entry.refusal:
            continue
        stem = path.name[: -len(".ipynb")]
        name = stem if stem in notebooks else _AGAIN.sub("", stem)
        if name in notebooks:
            found.setdefault(name, []).append(entry)
        else:
            others.append(entry)
    said = ""
    missing = [name for name in notebooks if name not in found]
    if len(missing) == 1 and len(others) == 1:
        found[missing[0]] = others
        missing, said = [], others[0].path
        vetted.notes.append(f"{others[0].name!r} was used as the notebook")
    for name in missing:
        vetted.notes.append(f"there is no {name}.ipynb")
    counts = {}
    for name, copies in found.items():
        latest = max(copies, key=lambda e: (e.modified, _number(e.name), e.path.count("/") == 0))
        counts[latest.path] = f"{name}.ipynb"
        if len(copies) > 1:
            vetted.notes.append(f"{latest.path!r} was used, as the latest of {len(copies)} copies")
        elif latest.name != f"{name}.ipynb" and latest.path != said:
            vetted.notes.append(f"{latest.name!r} was used as {name}.ipynb")
    return counts


def graded_cells(notebook: Any) -> frozenset[str]:
    """Return the names of the cells of a notebook, as JSON, that are answers or give points."""
    marks = (cell["metadata"].get("nbgrader", {}) for cell in notebook["cells"])
    return frozenset(m["grade_id"] for m in marks if m.get("grade") or m.get("solution"))


def _is_another(data: bytes, cells: frozenset[str]) -> bool:
    """Tell whether most of a notebook's graded cells are not this assignment's."""
    try:
        found = graded_cells(json.loads(data.decode(json.detect_encoding(data))))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return False  # damaged: grading uses the readable part
    return len(found - cells) > len(found & cells)


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
