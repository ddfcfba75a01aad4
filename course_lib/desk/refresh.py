"""Bring the desk up to date with the course, and leave the student's work alone.

For each file that the course hands out:

======================================  =============================================
on the desk it is …                     then …
======================================  =============================================
missing                                 it is handed out: delete a file to start over
as it was handed out                    it becomes the new version
the same, but it was run                the new version comes, the old is name.old.ipynb
changed                                 it stays, the new version is name.new.ipynb
damaged, not a notebook any more        it stays, a good copy is name.new.ipynb
======================================  =============================================

"Changed" means that the words differ from those of every version handed out; see `notebooks`.
If a new version has the same words, it keeps the outputs. A version is put beside the student's
file only once: if the student deletes it, it does not come back.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from course_lib.desk.handouts import handouts, is_read_only
from course_lib.desk.notebooks import digest, has_outputs, with_outputs_of, words
from course_lib.desk.records import Record, Records, put


def refresh(course: Path, desk: Path) -> list[str]:
    """Bring `desk` up to date with `course`; return a line for each thing a student should know.

    It may be interrupted at any point and called again. A file that the course no longer hands out
    is removed if the student has not changed it, and stays otherwise.

    Raises:
        OSError: the desk cannot be written to.

    """
    records, notes = Records(desk), []
    if records.damaged:
        notes.append("the desk's records are damaged: each file that differs counts as yours")
    new = handouts(course)
    for path, content in new.items():
        if content is None:
            notes.append(f"{path} is damaged in the course itself, so it was not handed out")
            continue
        record = records.of(path)
        if (written := words(path, content)) and written not in record.words:
            record.words.append(written)
        if record.given != digest(content):
            record.given = ""  # from now on either of two versions may be there
    # Save before any file: after an interruption, refresh must know what it has put there.
    records.save()
    for path, content in new.items():
        if content is not None:
            notes += _hand_out(desk, path, content, records.of(path))
    for path in sorted(records.by_path.keys() - new.keys()):
        notes += _take_back(desk, path, records.by_path.pop(path))
    records.save()
    return notes


def put_aside(desk: Path, path: str) -> str:
    """Rename a file to a free name.old, so that it is handed out again; return that name."""
    old = next(p for p in _beside(desk / path, "old") if not os.path.lexists(p))
    (desk / path).rename(old)
    return old.name


def _hand_out(desk: Path, path: str, content: bytes, record: Record) -> list[str]:
    """Put one file on the desk, or beside what is there; return messages about it."""
    target, notes = desk / path, []
    theirs = _read(target)
    written = words(path, theirs) if theirs is not None else None
    if theirs is None and not os.path.lexists(target):
        put(desk, target, content, is_read_only(path))
    elif theirs is None or written is None:
        name = _lay_beside(desk, path, content, record)
        notes = [f"{path} cannot be read. It stays; a good copy is beside it: {name}"]
    elif record.given == digest(content) or theirs == content:
        pass
    elif written == words(path, content):
        put(desk, target, with_outputs_of(content, theirs), is_read_only(path))
    elif written not in record.words:
        name = _lay_beside(desk, path, content, record)
        notes = [f"{path} has your changes, so it stays. The new version is beside it: {name}"]
    else:
        if has_outputs(path, theirs):
            name = put_aside(desk, path)
            notes = [f"{path} has a new version. Yours, with its outputs, is now {name}"]
        put(desk, target, content, is_read_only(path))
    record.given = digest(content)
    return notes


def _lay_beside(desk: Path, path: str, content: bytes, record: Record) -> str:
    """Write a file beside one that stays, without overwriting anything; return its name."""
    for place in _beside(desk / path, "new"):
        theirs = _read(place)
        if theirs is None:
            if os.path.lexists(place):  # a folder, or a file without permission to read
                continue
        elif not _is_as_handed_out(path, theirs, record):
            continue
        put(desk, place, content, is_read_only(path))
        break
    return place.name


def _take_back(desk: Path, path: str, record: Record) -> list[str]:
    """Remove a file that the course no longer hands out, unless the student has changed it."""
    target = desk / path
    theirs = _read(target)
    if theirs is None:
        return []
    if not _is_as_handed_out(path, theirs, record):
        return [f"{path} is no longer part of the course; your copy stays"]
    target.unlink()
    for folder in target.relative_to(desk).parents[:-1]:
        if any((desk / folder).iterdir()):
            break
        (desk / folder).rmdir()
    return []


def _is_as_handed_out(path: str, theirs: bytes, record: Record) -> bool:
    return words(path, theirs) in record.words and not has_outputs(path, theirs)


def _beside(path: Path, mark: str) -> Iterator[Path]:
    """Yield places beside a file: name.mark.ipynb, name.mark-2.ipynb, and so on without end."""
    for number in itertools.count(1):
        each = mark if number == 1 else f"{mark}-{number}"
        yield path.with_name(f"{path.stem}.{each}{path.suffix}")


def _read(path: Path) -> bytes | None:
    """Return a file's content; None if there is no readable file."""
    try:
        return path.read_bytes()
    except OSError:
        return None
