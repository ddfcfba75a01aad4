"""Choose which files of a submission to collect, and give a reason for each refused file.

Collected are the notebook and few other files. They are stored in the grader's folders, and
formgrader serves these from the instructor's own address. So every page, picture format or program
that could run there is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import nbformat
from nbformat import NotebookNode

from autograder.collection import repair
from autograder.collection.listing import Entry, SourceError, inner_zip, without_top
from course_lib.learner.what_counts import graded_cells, is_untouched, rebuild, tasks_in

KINDS = {".ipynb", ".py", ".txt", ".md", ".csv", ".json", ".png", ".jpg", ".jpeg", ".pdf"}
"""The kinds of files that are accepted."""
_ARCHIVES = {".zip", ".gz", ".tar", ".tgz", ".bz2", ".xz", ".7z", ".rar", ".zst"}
_AGAIN = re.compile(
    r"^(?:copy of |kopie von )|(?:[-_ ]*(?:\(\d+\)|\d+|copy|kopie|final|new)(?: ?\d+)?)+$",
    re.IGNORECASE,
)
"""The additions of browsers, systems and people to a file's name that exists already."""
_COPY = re.compile(r"cop(?:y|ie)|kopie", re.IGNORECASE)
_MOST_UNPACKED = 2 * repair.MAX_FILES
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
    files: Mapping[str, Entry], released: Mapping[str, NotebookNode], *, own_stamp: bool
) -> Vetted:
    """Read the files of a submission that may be collected.

    Args:
        files: the files, by path.
        released: name of each notebook, without ``.ipynb`` → the notebook as it was handed out.
        own_stamp: whether the source, not the student, wrote a ``timestamp.txt`` among the files.

    """
    vetted = Vetted()
    entries = _unpacked(list(files.values()), vetted)
    candidates = [candidate for entry in entries if (candidate := _read_notebook(entry))]
    names = _notebook_names(candidates, released, vetted)
    foreign_paths = {
        candidate.entry.path
        for candidate in candidates
        if candidate.entry.name.lower().endswith(".ipynb")
        and all(_is_another(candidate.notebook, notebook) for notebook in released.values())
    }
    room = repair.MAX_ALL
    for entry in sorted(entries, key=lambda e: (e.path not in names, e.path)):
        target = names.get(entry.path, entry.path)
        if entry.path not in names and target in names.values():
            continue  # another notebook counts under this name, and a note says so
        if entry.path == "timestamp.txt" and own_stamp:
            continue
        reason, data = _refusal(entry, target, vetted), b""
        if not reason and entry.path in foreign_paths:
            reason = "is the notebook of another assignment: most of its tasks are different"
        if not reason:
            limit = repair.MAX_NOTEBOOK if entry.path in names else min(repair.MAX_FILE, room)
            reason, data = _read(entry, limit)
        if reason:
            vetted.refused.append((entry.path, reason))
            continue
        vetted.files[target] = data
        room -= len(data) if entry.path not in names else 0
    for candidate in candidates:
        if (name := names.get(candidate.entry.path)) in vetted.files:
            vetted.notes += _notes_on(candidate, released[str(name).removesuffix(".ipynb")], vetted)
    if len(vetted.refused) > _MOST_REFUSED:
        surplus = len(vetted.refused) - _MOST_REFUSED
        vetted.refused[_MOST_REFUSED:] = [("", f"and {surplus} more files were refused")]
    return vetted


@dataclass(frozen=True)
class _Candidate:
    """A file that may be the notebook.

    Attributes:
        entry: the file.
        problem: why only a part of it can be read, or an empty string.
        notebook: what can be read of it.
        stem: its name without a suffix.

    """

    entry: Entry
    problem: str
    notebook: NotebookNode
    stem: str

    def is_named(self, name: str) -> bool:
        """Tell whether it has the notebook's name, perhaps with an addition."""
        return name in (self.stem, _AGAIN.sub("", _AGAIN.sub("", self.stem)))


def _read_notebook(entry: Entry) -> _Candidate | None:
    """Return a file as a candidate; None if it is no notebook."""
    stem = re.sub(r"\.ipynb(\.txt|\.json)?$|\.json$", "", entry.name, flags=re.IGNORECASE)
    if entry.refusal or stem == entry.name:
        return None
    (problem, data), content = _read(entry, repair.MAX_NOTEBOOK), None
    if not problem:
        problem, content = repair.read_content(data)
    if repair.cells_of(content) is None:
        problem = problem or "has no list of cells"
        if not entry.name.lower().endswith(".ipynb"):
            return None
    return _Candidate(entry, problem, nbformat.from_dict(repair.repaired(content)), stem)


def _notes_on(candidate: _Candidate, released: NotebookNode, vetted: Vetted) -> list[str]:
    """Return what the grader will say of a notebook, and which files it will not see."""
    used = "the part that can be read" if candidate.notebook.cells else "an empty notebook instead"
    if candidate.problem:
        notes = [f"{candidate.entry.name} {candidate.problem}: grading uses {used}"]
    elif not tasks_in(released, candidate.notebook):
        notes = ["has none of this assignment's tasks: is it another notebook?"]
    else:
        rebuilt = rebuild(released, candidate.notebook, vetted.files)
        notes = list(rebuilt.metadata.get("rebuild", ()))
    return notes + repair.notes_on_files(vetted.files)


def _read(entry: Entry, limit: int) -> tuple[str, bytes]:
    """Return why a file cannot be taken, or an empty string, and its content."""
    try:
        data = entry.read(limit)
    except OSError as error:
        return str(error), b""
    if len(data) <= limit:
        return "", data
    if limit in (repair.MAX_NOTEBOOK, repair.MAX_FILE):
        return f"is larger than {limit >> 20} MiB when unpacked", b""
    return f"exceeds the limit of {repair.MAX_ALL >> 20} MiB for all files together", b""


def _refusal(entry: Entry, target: str, vetted: Vetted) -> str:
    suffix = PurePosixPath(target).suffix.lower()
    if entry.refusal:
        return entry.refusal
    if entry.path == "timestamp.txt":
        return "was written by the student, so the time in it does not count"
    if suffix in _ARCHIVES:
        return "is an archive inside an archive" if "/" in entry.path else "is an archive"
    if suffix not in KINDS:
        return f"is a kind of file that is not needed ({suffix or 'no suffix'})"
    if target in vetted.files:
        return "has the same name as another file"
    above = {str(path) for path in PurePosixPath(target).parents}
    if above & set(vetted.files) or any(name.startswith(f"{target}/") for name in vetted.files):
        return "has the same name as a folder"
    if len(vetted.files) >= repair.MAX_FILES:
        return f"is one file too many: at most {repair.MAX_FILES} files are accepted"
    return ""


def _unpacked(entries: list[Entry], vetted: Vetted) -> list[Entry]:
    """Return the files, with a student's zip unpacked. A zip inside that zip is not unpacked."""
    unpacked = []
    for entry in entries:
        is_zip = entry.path.lower().endswith(".zip")
        if not is_zip or entry.refusal or "/" in entry.path:
            unpacked.append(entry)
            continue
        try:
            inside = without_top(inner_zip(entry, repair.MAX_ALL))
        except (SourceError, OSError) as error:
            vetted.refused.append((entry.path, str(error)))
            continue
        vetted.notes.append(f"unpacked {entry.name}")
        if (count := len(inside)) > _MOST_UNPACKED:
            inside.sort(key=lambda member: not member.name.lower().endswith(".ipynb"))
            del inside[_MOST_UNPACKED:]
            vetted.notes.append(f"{entry.name} has {count} files; {_MOST_UNPACKED} were looked at")
        unpacked += inside
    return unpacked


def _notebook_names(
    candidates: Sequence[_Candidate], released: Mapping[str, NotebookNode], vetted: Vetted
) -> dict[str, str]:
    """Return path → name of the notebooks that count; note which others are ignored.

    A notebook in which something was written counts before one in which nothing was; then the
    latest; then the one with the exact name.
    """
    counts: dict[str, str] = {}
    for name, notebook in released.items():
        possible = [
            candidate
            for candidate in candidates
            if candidate.entry.path not in counts and not _is_another(candidate.notebook, notebook)
        ]
        ranked = [(_rank(candidate, name, notebook), candidate) for candidate in possible]
        alone = len(released) == 1 and len(ranked) == 1
        ranked = [pair for pair in ranked if pair[0][0] or alone]
        if not ranked:
            vetted.notes.append(f"there is no {name}.ipynb")
            continue
        _, best = max(ranked, key=lambda pair: pair[0])
        counts[best.entry.path] = f"{name}.ipynb"
        if ignored := [repr(other.entry.path) for _, other in ranked if other is not best]:
            vetted.notes.append(f"{best.entry.path!r} was used; ignored: {', '.join(ignored)}")
        elif best.entry.name != f"{name}.ipynb":
            vetted.notes.append(f"{best.entry.name!r} was used as {name}.ipynb")
    return counts


def _rank(candidate: _Candidate, name: str, released: NotebookNode) -> tuple[Any, ...]:
    entry = candidate.entry
    number = 0 if _COPY.search(entry.name) else _number(entry.name)
    return (
        bool(tasks_in(released, candidate.notebook)) or candidate.is_named(name),
        bool(candidate.problem) or not is_untouched(released, candidate.notebook),
        *(entry.modified, number, entry.name == f"{name}.ipynb", entry.path.count("/") == 0),
    )


def _is_another(content: NotebookNode, released: NotebookNode) -> bool:
    """Tell whether most of a notebook's tasks are not this assignment's."""
    tasks, ours = graded_cells(content), graded_cells(released)
    return len(tasks - ours) > len(tasks & ours)


def _number(name: str) -> int:
    """Return the number that a system added to a name because the name existed already, else 0."""
    match = re.search(r"[-( _](\d+)\)?\.\w+$", name)
    return int(match[1]) if match else 0
