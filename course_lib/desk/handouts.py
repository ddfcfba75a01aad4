"""The files that the desk gets: lectures, assignments, and the files that these link to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from course_lib.desk.notebooks import cleared
from course_lib.desk.places import PACKAGE

WORKED_IN = ("lectures", "assignments")
READ_ONLY = ("course_lib", "docs", "benchmarks")
"""From these folders the desk gets only the files that a notebook links to, for reading."""

_LINK = re.compile(r"""\]\(<?([^)\s>]+)|(?:src|href)=["']([^"']+)""")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|#|/", re.IGNORECASE)


def handouts(course: Path) -> dict[str, bytes | None]:
    """Return the content of the desk's files by path; the paths are the same in the course.

    Notebooks come without outputs: a lecture asks for a prediction before it shows a result. The
    files that they link to keep their place, so that a relative link works on the desk as it does
    in the repository. None means that a notebook cannot be read.
    """
    found: dict[str, bytes | None] = {}
    for folder in WORKED_IN:
        for file in sorted((course / folder).rglob("*")):
            path = file.relative_to(course)
            if file.is_file() and not any(p.startswith((".", "__pycache__")) for p in path.parts):
                found[path.as_posix()] = _content(file)
    linked: dict[str, bytes | None] = {}
    for name, content in found.items():
        if name.endswith(".ipynb") and content:
            for link in links(content):
                target = _normal(PurePosixPath(name).parent / link)
                if target.split("/")[0] in READ_ONLY and (place := _place_of(course, target)):
                    linked[target] = place.read_bytes()
    return found | linked


def _place_of(course: Path, target: str) -> Path | None:
    """Return the file that a link points to; an installed course's modules lie elsewhere."""
    places = (course / target, PACKAGE.parent / target)
    return next((place for place in places if place.is_file()), None)


def is_read_only(path: str) -> bool:
    """Tell whether a file of the desk is for reading only."""
    return not path.startswith(WORKED_IN)


def links(notebook: bytes) -> Iterator[str]:
    """Yield the paths that a notebook's text links to, relative to its folder."""
    for cell in json.loads(notebook)["cells"]:
        if cell["cell_type"] == "markdown":
            for markdown, html in _LINK.findall("".join(cell["source"])):
                target = unquote((markdown or html).partition("#")[0])
                if target and not _ELSEWHERE.match(target):
                    yield target


def _normal(path: PurePosixPath) -> str:
    """Return a path without its ``..``, as a browser does; symbolic links are not followed."""
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def _content(path: Path) -> bytes | None:
    if path.suffix != ".ipynb":
        return path.read_bytes()
    try:
        return cleared(path.read_bytes())
    except Exception:  # nbformat raises errors of any type on a damaged file
        return None
