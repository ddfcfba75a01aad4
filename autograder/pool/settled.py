"""Recognise quickly that nothing is left to do for a class.

It takes seconds to find out whether a class is graded and booked, because nbformat and nbgrader are
imported, every notebook is rebuilt, and the gradebook is read. So a command that has found this out
saves a digest of everything on which the answer depends. While the digest is the same, so is the
answer. Nothing else relies on the file. If the file is missing or in doubt, the class is examined
again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from traitlets.config import Config

from autograder.course import Folders
from autograder.examination.verdict import checks_digest
from autograder.files import write_whole
from autograder.settings import Settings

_SQLITE = "sqlite:///"


def inputs(root: Path, folders: Folders, assignment: str, settings: Settings) -> str:
    """Return the digest of all inputs of an assignment's grades; empty if it cannot be computed."""
    found = hashlib.sha256(json.dumps(asdict(settings)).encode())
    names = folders.notebooks(assignment)
    source = folders.source / assignment
    released = (folders.release / assignment / f"{name}.ipynb" for name in names)
    try:
        found.update(json.dumps([checks_digest(source, path) for path in released]).encode())
    except OSError:  # for example, hidden cases are missing; grading will report this
        return ""
    whole = {"timestamp.txt", *(f"{name}.ipynb" for name in names)}
    for path in [root / "nbgrader_config.py", *_below(folders.submitted, assignment)]:
        found.update(_told(path, path.name in whole or path.parent == root).encode())
    return found.hexdigest()


def outputs(folders: Folders, config: Config, assignment: str) -> str:
    """Return the digest of gradebook, verdicts and notebooks; empty if they are elsewhere."""
    url = config.CourseDirectory.db_url
    if not url.startswith(_SQLITE):
        return ""
    found = hashlib.sha256(_told(Path(url.removeprefix(_SQLITE)), content=True).encode())
    graded = folders.graded(assignment)
    for path in (
        folders.data / "seeds" / assignment,  # made when the assignment is first graded
        *(path for path in sorted(graded.glob("*/*")) if path.parent.name != "slurm"),
        *_below(folders.autograded, assignment),
        *sorted((folders.data / "verdicts" / assignment).glob("*/*.json")),
    ):
        found.update(_told(path).encode())
    return found.hexdigest()


def _below(folder: Path, assignment: str) -> Iterator[Path]:
    for each in sorted(folder.glob(f"*/{assignment}")):
        yield each
        yield from sorted(each.rglob("*"))


def _told(path: Path, content: bool = False) -> str:
    """Return the data that identify a file: its bytes, or else its size and time of last change."""
    try:
        info = path.stat()
        if content and path.is_file():
            return f"{path}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n"
    except OSError as error:
        return f"{path}\0{error.errno}\n"
    return f"{path}\0{info.st_mode} {info.st_size} {info.st_mtime_ns}\n"


def settle(
    root: Path,
    folders: Folders,
    config: Config,
    assignment: str,
    settings: Settings,
    *,
    before: str,
    lines: list[str],
) -> None:
    """Save that all is graded and booked, unless a submission or a check changed meanwhile.

    Args:
        root: the course folder.
        folders: the course's folders.
        config: the course's configuration.
        assignment: its name.
        settings: how it is examined.
        before: the result of `inputs` before grading.
        lines: the lines to print next time.

    """
    after = outputs(folders, config, assignment)
    if not (before and after) or inputs(root, folders, assignment, settings) != before:
        return
    path = _file(folders, assignment)
    with contextlib.suppress(OSError):  # if the disk is full, only the next run takes longer
        write_whole(path, json.dumps({"state": [before, after], "lines": lines}))


def settled(folders: Folders, config: Config, assignment: str, now: str) -> list[str]:
    """Return the lines to print if nothing is left to do, and no lines otherwise.

    Args:
        folders: the course's folders.
        config: the course's configuration.
        assignment: its name.
        now: the result of `inputs`.

    """
    try:
        noted = json.loads(_file(folders, assignment).read_text(encoding="utf-8"))
        if now and noted["state"] == [now, outputs(folders, config, assignment)]:
            return [str(line) for line in noted["lines"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return []


def _file(folders: Folders, assignment: str) -> Path:
    return folders.graded(assignment) / "settled.json"
