"""Read times from the systems, write them for nbgrader, and count the days to the deadline."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path

from dateutil import parser, tz
from nbgrader.utils import parse_utc
from traitlets.config import Config

from autograder.collection.listing import SourceError

DAY = 24 * 3600


def read_time(text: str) -> datetime:
    """Return a time; one without a time zone is this machine's local time.

    Raises:
        SourceError: the text is no time.

    """
    try:
        found: datetime = parser.parse(text)
    except (ValueError, OverflowError, TypeError) as error:
        raise SourceError(f"{text!r} is no time: write it like 2026-11-20 23:59 +0800") from error
    if found.tzinfo is None:
        found = found.replace(tzinfo=tz.tzlocal())
    return found.astimezone(UTC)


def stamp(when: datetime) -> str:
    """Return the contents of ``timestamp.txt``, as ``nbgrader submit`` writes it."""
    return when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f UTC")


def read_stamp(text: str) -> datetime | None:
    """Return the time in a ``timestamp.txt`` or a folder's name in the exchange, or None."""
    try:
        found = parse_utc(text.strip())
    except Exception:  # dateutil raises many kinds
        return None
    return found.replace(tzinfo=UTC) if isinstance(found, datetime) else None


def local(when: datetime | None) -> str:
    """Return a time for people."""
    return when.astimezone().strftime("%Y-%m-%d %H:%M") if when else ""


def days_late(when: datetime | None, due: datetime | None) -> int:
    """Return how many days a submission is late; a day that has begun counts as one."""
    if when is None or due is None:
        return 0
    return max(0, math.ceil((when - due).total_seconds() / DAY))


def gradebook_due(config: Config, assignment: str) -> datetime | None:
    """Return the deadline in the gradebook, if there is one."""
    url = str(config.CourseDirectory.db_url)
    if not Path(url.removeprefix("sqlite:///")).is_file():
        return None
    from nbgrader.api import Gradebook, MissingEntry

    with Gradebook(url, str(config.CourseDirectory.course_id)) as gradebook:
        try:
            found = gradebook.find_assignment(assignment).duedate
        except MissingEntry:
            return None
    return found.replace(tzinfo=UTC) if found else None


def book_due(config: Config, assignment: str, due: datetime) -> None:
    """Write the deadline into the gradebook, where nbgrader's late policy reads it."""
    from nbgrader.api import Gradebook

    with Gradebook(
        str(config.CourseDirectory.db_url), str(config.CourseDirectory.course_id)
    ) as gradebook:
        gradebook.update_or_create_assignment(
            assignment, duedate=due.astimezone(UTC).replace(tzinfo=None)
        )
