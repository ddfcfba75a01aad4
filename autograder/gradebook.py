"""Whether nbgrader's gradebook can be used, said in a sentence before a command relies on it.

nbgrader opens it through SQLAlchemy, which tells of a damaged or locked file in a hundred lines.
This asks SQLite itself, and knows the standard library only.
"""

from __future__ import annotations

import os
import sqlite3
import urllib.parse
from contextlib import closing
from pathlib import Path

_SQLITE = "sqlite:///"
_PATIENCE = 5.0
"""Seconds to wait for another program that writes: as long as nbgrader's own commands wait."""


class GradebookUnusable(RuntimeError):
    """The gradebook is damaged, locked, or may not be written; the message says what to do."""


def make_sure_of(url: str, *, writes: bool) -> None:
    """Look whether a gradebook can be read, and written if the command `writes`.

    One that does not exist yet is fine, and so is one that is no file of SQLite's.

    Raises:
        GradebookUnusable: it cannot.

    """
    path = Path(url.removeprefix(_SQLITE))
    if not url.startswith(_SQLITE) or not path.exists():
        return
    if not os.access(path, os.R_OK):
        raise GradebookUnusable(f"you may not read the gradebook {path}: look who owns it")
    if writes and not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        raise GradebookUnusable(
            f"you may not write the gradebook {path} and beside it: look who owns it, and whether "
            "the disk is mounted to be read only"
        )
    mode = "rw" if writes else "ro"
    address = f"file:{urllib.parse.quote(os.fsencode(path))}?mode={mode}"
    try:
        with closing(sqlite3.connect(address, _PATIENCE, uri=True)) as database:
            found = database.execute("PRAGMA quick_check(1)").fetchone()
            if found != ("ok",):
                raise sqlite3.DatabaseError(found[0] if found else "it has no content")
            if writes:
                database.execute("BEGIN IMMEDIATE")
                database.rollback()
    except sqlite3.DatabaseError as error:
        raise GradebookUnusable(told(error, path)) from None


def told(error: Exception, path: str | Path) -> str:
    """Return in a sentence what is wrong with the gradebook at `path`, and what to do."""
    why = str(error).splitlines()[0]
    if "locked" in why:
        return (
            f"the gradebook {path} is locked: another program is writing it. Wait for its end, or "
            "close it; then give the same command again"
        )
    if "disk is full" in why:
        return f"the gradebook {path} cannot grow, because the disk is full: make room there"
    if "unable to open" in why or "readonly" in why or "disk I/O" in why:
        return f"the gradebook {path} cannot be opened ({why}): look at its folder and the disk"
    return (
        f"the gradebook {path} is damaged ({why}). Put a copy from before in its place; without "
        "one move the file away and give the command again: verdicts are files of their own, and "
        "are booked anew, only points that a person gave are lost"
    )
