"""Open nbgrader's gradebook, and check that it can be used before a command relies on it.

nbgrader opens it through SQLAlchemy, which reports a damaged or locked file in a hundred lines.
So SQLite itself is asked, and one sentence says what is wrong.
"""

from __future__ import annotations

import os
import sqlite3
import urllib.parse
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from traitlets.config import Config

from autograder.errors import CommandFailed

if TYPE_CHECKING:  # it takes a second to import
    from nbgrader.api import Gradebook

_SQLITE = "sqlite:///"
_PATIENCE = 5.0
"""Seconds to wait while another program writes; nbgrader's own commands wait as long."""


_OF_THE_DISK = (
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN),
    *(sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR),
)


def opened(config: Config) -> Gradebook:
    """Return the course's gradebook, open: a context manager. It makes a missing one."""
    from nbgrader.api import Gradebook

    return Gradebook(str(config.CourseDirectory.db_url), str(config.CourseDirectory.course_id))


def exists(config: Config) -> bool:
    """Return whether the course has a gradebook."""
    url = str(config.CourseDirectory.db_url)
    return not url.startswith(_SQLITE) or Path(url.removeprefix(_SQLITE)).is_file()


def make_sure_of(url: str, *, writes: bool) -> None:
    """Check that a gradebook can be read, and also written if the command `writes`.

    A gradebook that does not exist yet passes the check, and so does one that is no SQLite file.

    Raises:
        CommandFailed: the gradebook cannot be used.

    """
    path = Path(url.removeprefix(_SQLITE))
    if not url.startswith(_SQLITE) or not path.exists():
        return
    places = (path, path.parent) if writes else (path,)
    if not all(os.access(place, os.W_OK if writes else os.R_OK) for place in places):
        raise CommandFailed(
            f"no permission to {'write' if writes else 'read'} the gradebook {path} or its folder: "
            "check who owns them, and whether the disk is mounted read-only"
        )
    mode = "rw" if writes else "ro"
    address = f"file:{urllib.parse.quote(os.fsencode(path))}?mode={mode}"
    try:
        with closing(sqlite3.connect(address, timeout=_PATIENCE, uri=True)) as database:
            finding = database.execute("PRAGMA quick_check(1)").fetchone()
            if finding != ("ok",):
                raise sqlite3.DatabaseError(finding[0] if finding else "it has no content")
            if writes:
                database.execute("BEGIN IMMEDIATE")
                database.rollback()
    except sqlite3.DatabaseError as error:
        raise CommandFailed(sentence_on(error, path)) from None


def sentence_on(error: BaseException, path: str | Path) -> str:
    """Return what is wrong with the gradebook at `path`, and what to do, by SQLite's own code."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF  # its first byte
    cause = str(error).splitlines()[0]
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return (
            f"the gradebook {path} is locked: another program is writing it. Wait until it ends, "
            "or close it; then give the same command again"
        )
    if code in _OF_THE_DISK:
        return f"the gradebook {path} cannot be used ({cause}): check its folder and the disk"
    return (
        f"the gradebook {path} is damaged ({cause}). Replace it by a backup. Without a backup, "
        "move the file away and give the command again: verdicts are separate files and are booked "
        "again, so only points that a person gave are lost"
    )
