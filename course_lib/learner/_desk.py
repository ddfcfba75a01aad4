"""Bring the desk up to date with the course, and leave the student's work alone.

For each file that the course hands out:

======================================  =============================================
on the desk it is …                     then …
======================================  =============================================
missing                                 it is handed out: delete a file to start over
as it was handed out                    it becomes the new version
changed, or run                         it stays, the new version is name.new.ipynb
======================================  =============================================

"Changed" means that the words differ from those of every version handed out; see `notebooks`. A
damaged notebook is a changed one.
A version is put next to the student's file only if its words are other ones, and only once: if the
student deletes it, it does not come back.

The desk, ``work/``, holds copies of lectures and assignments, apart from the course's own files;
git ignores it. Lectures come without outputs, so that none gives away a prediction.
"""

from __future__ import annotations

import itertools
import json
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from course_lib.diary import FOLDER
from course_lib.installed import PACKAGE
from course_lib.learner import CannotGoOn
from course_lib.learner.notebooks import cleared, has_outputs, words

WORKED_IN = ("lectures", "assignments")
READ_ONLY = ("course_lib", "docs", "benchmarks")
"""From these folders the desk gets only the files that a notebook links to, for reading."""

_LINK = re.compile(r"""\]\(<?([^)\s>]+)|(?:src|href)=["']([^"']+)""")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|#|/", re.IGNORECASE)
_RECORDS = Path(FOLDER, "handed_out.json")
Versions = list[str | None]
"""Digests of the words of all versions of a file so far, the present one last: a file with such
words is not edited."""


def refresh(course: Path, desk: Path) -> list[str]:
    """Bring `desk` up to date with `course`; return a line for each thing a student should know.

    It may be interrupted at any point and called again. A file that the course no longer hands out
    stays.

    Raises:
        CannotGoOn: the desk cannot be written to.

    """
    notes = []
    records = _recorded(desk)
    for path, content in handouts(course).items():
        if content is None:
            notes.append(f"{path} is damaged in the course itself, so you got no copy of it")
        else:
            notes += _hand_out(desk, path, content, records.setdefault(path, []))
    stored = {"files": {path: {"words": records[path]} for path in sorted(records)}}
    put(desk, desk / _RECORDS, f"{json.dumps(stored, indent=1)}\n".encode())
    return notes


def _hand_out(desk: Path, path: str, content: bytes, versions: Versions) -> list[str]:
    """Put one file on the desk, or next to an existing file; return messages about it."""
    target, new = desk / path, words(path, content)
    is_new = versions[-1:] != [new]
    versions[:] = [*(version for version in versions if version != new), new]
    on_desk = _read(target)
    written = words(path, on_desk) if on_desk is not None else None
    if on_desk is None and not os.path.lexists(target):
        put(desk, target, content)
    elif on_desk is not None and written in versions and not has_outputs(path, on_desk):
        if on_desk != content:
            put(desk, target, content)
    elif is_new and written != new:
        name = _lay_beside(desk, path, content)
        traces = "outputs" if written in versions else "changes"
        return [f"{path} has your {traces}, so it stays. The new version is beside it: {name}"]
    return []


def _lay_beside(desk: Path, path: str, content: bytes) -> str:
    """Write a file next to one that stays, under the first free name; return this name."""
    stays = desk / path
    endings = itertools.chain(["new"], (f"new-{number}" for number in itertools.count(2)))
    places = (stays.with_name(f"{stays.stem}.{ending}{stays.suffix}") for ending in endings)
    target = next(place for place in places if not os.path.lexists(place))
    put(desk, target, content)
    return target.name


def _read(path: Path) -> bytes | None:
    """Return a file's content; None if there is no readable file."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def handouts(course: Path) -> dict[str, bytes | None]:
    """Return the content of the desk's files by path; the paths are the same in the course.

    Notebooks come without outputs: a lecture asks for a prediction before it shows a result. The
    files that they link to keep their place, so that a relative link works on the desk as it does
    in the repository. None means that a notebook cannot be read.
    """
    contents: dict[str, bytes | None] = {}
    for folder in WORKED_IN:
        for file in sorted((course / folder).rglob("*")):
            path = file.relative_to(course)
            if file.is_file() and not any(p.startswith((".", "__pycache__")) for p in path.parts):
                contents[path.as_posix()] = _content(file)
    linked: dict[str, bytes | None] = {}
    for name, content in contents.items():
        if name.endswith(".ipynb") and content:
            for link in links(content):
                target = posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
                for place in (course / target, PACKAGE.parent / target):
                    if target.split("/")[0] in READ_ONLY and place.is_file():
                        linked.setdefault(target, place.read_bytes())
    return contents | linked


def links(notebook: bytes) -> Iterator[str]:
    """Yield the paths that a notebook's text links to, relative to its folder."""
    for cell in json.loads(notebook)["cells"]:
        if cell["cell_type"] == "markdown":
            for markdown, html in _LINK.findall("".join(cell["source"])):
                target = unquote((markdown or html).partition("#")[0])
                if target and not _ELSEWHERE.match(target):
                    yield target


def _content(path: Path) -> bytes | None:
    if path.suffix != ".ipynb":
        return path.read_bytes()
    try:
        return cleared(path.read_bytes())
    except Exception:  # nbformat raises errors of any type on a damaged file
        return None


def _recorded(desk: Path) -> dict[str, Versions]:
    """Return the versions of each path; none before the first refresh, or if they are damaged.

    Files that differ from the course's then count as changed by the student.
    """
    try:
        files = json.loads((desk / _RECORDS).read_bytes())["files"]
        return {path: [*map(str, entry["words"])] for path, entry in files.items()}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return {}


def put(desk: Path, path: Path, content: bytes) -> None:
    """Write a file of the desk, so that it holds either the old or the complete new content.

    Raises:
        CannotGoOn: the file cannot be written.

    """
    part = desk / FOLDER / "part"  # one name: the next call reuses what an interruption left
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        part.write_bytes(content)
        if path.relative_to(desk).parts[0] in READ_ONLY:
            part.chmod(0o444)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, path)
    except OSError as error:
        raise CannotGoOn(
            f"{path} cannot be written: {error.strerror}. Make room, or choose another folder for "
            "your copies with --desk"
        ) from error
