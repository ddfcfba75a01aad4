"""Read times from the systems, write them for nbgrader, and count the days after the deadline.

Moodle's worksheet and many people write times without a zone. The time zone of the grading machine
may be a different one. So the course has its own time zone, kept in ``grading/timezone``.
"""

from __future__ import annotations

import math
import warnings
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

from dateutil import parser, tz
from nbgrader.utils import parse_utc
from traitlets.config import Config

from autograder import gradebook
from autograder.collection.listing import SourceError
from autograder.files import write_whole

DAY = 24 * 3600


class NoTimeZone(SourceError):
    """A time names no zone, and the course's time zone is not set."""


_LIKE = "write it like 2026-11-20 23:59 +0800"


def find_zone(name: str) -> tzinfo:
    """Return the time zone of a name such as ``Asia/Hong_Kong`` or ``UTC+8``.

    Raises:
        SourceError: there is no such zone.

    """
    zone: tzinfo | None = tz.gettz(name.strip()) if name.strip() else None
    if zone is None:
        raise SourceError(f"there is no time zone {name!r}: give one like Asia/Hong_Kong")
    return zone


def course_zone(data: Path) -> tzinfo | None:
    """Return the course's time zone, or None if it is not set yet.

    Raises:
        SourceError: the file contains something else.

    """
    path = data / "timezone"
    return find_zone(path.read_text(encoding="utf-8")) if path.is_file() else None


def keep_zone(data: Path, name: str) -> tzinfo:
    """Remember the course's time zone for all later commands."""
    zone = find_zone(name)
    write_whole(data / "timezone", f"{name.strip()}\n")
    return zone


def read_time(text: str, zone: tzinfo | None = None) -> datetime:
    """Return a time in UTC; `zone` is used if the text names no zone.

    Raises:
        SourceError: the text is no time, lacks its date, or names an unknown zone.
        NoTimeZone: it names no zone, and `zone` is None.

    """
    first, second = datetime(2000, 1, 1), datetime(2001, 2, 3, 4, 5)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", parser.UnknownTimezoneWarning)
            # The parser takes missing parts from a default. Two defaults show whether it did.
            time: datetime = parser.parse(text, default=first)
            complete = time == parser.parse(text, default=second)
    except parser.UnknownTimezoneWarning as error:
        raise SourceError(f"{text!r} names a time zone that is not known: {_LIKE}") from error
    except (ValueError, OverflowError, TypeError) as error:
        raise SourceError(f"{text!r} is not a time: {_LIKE}") from error
    if not complete:
        raise SourceError(f"{text!r} is not a complete date with a time of day: {_LIKE}")
    if time.tzinfo is None:
        if zone is None:
            raise NoTimeZone(
                f"{text!r} has no time zone. Give the course's time zone once, for example "
                "autograder collect … --timezone Asia/Hong_Kong. The file grading/timezone keeps it"
            )
        time = time.replace(tzinfo=zone)
    return time.astimezone(UTC)


def in_utc(time: datetime | None) -> datetime | None:
    """Return a time of the gradebook, which names no zone, with its zone."""
    return time.replace(tzinfo=UTC) if time else None


def stamp(time: datetime) -> str:
    """Return the contents of ``timestamp.txt``, as ``nbgrader submit`` writes it."""
    return time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f UTC")


def read_stamp(text: str) -> datetime | None:
    """Return the time in a ``timestamp.txt`` or a folder's name in the exchange, or None."""
    try:
        time = parse_utc(text.strip())
    except Exception:  # dateutil raises many kinds
        return None
    return time.replace(tzinfo=UTC) if isinstance(time, datetime) else None


def shown(time: datetime | None, zone: tzinfo | None) -> str:
    """Return a time for people, in the course's zone (or UTC) and with the zone's name."""
    return time.astimezone(zone or UTC).strftime("%Y-%m-%d %H:%M %Z") if time else ""


def days_late(time: datetime | None, due: datetime | None, zone: tzinfo | None = None) -> int:
    """Return how many days a submission is late; a day that has begun counts as one.

    Days are the calendar's in `zone`, or in UTC: a day with a change of the clocks is one day.
    """
    if time is None or due is None:
        return 0
    late = time - due - clock_change(due, time, zone)
    return max(0, math.ceil(late.total_seconds() / DAY))


def clock_change(due: datetime, time: datetime, zone: tzinfo | None) -> timedelta:
    """Return by how much the clocks of `zone` went back between two times; less than 0: forward."""
    offsets = [moment.astimezone(zone or UTC).utcoffset() or timedelta() for moment in (due, time)]
    return offsets[0] - offsets[1]


def gradebook_due(config: Config, assignment: str) -> datetime | None:
    """Return the deadline in the gradebook, if there is one."""
    if not gradebook.exists(config):
        return None
    with gradebook.opened(config) as book:
        return in_utc({entry.name: entry.duedate for entry in book.assignments}.get(assignment))


def book_due(config: Config, assignment: str, due: datetime) -> None:
    """Write the deadline into the gradebook, where nbgrader's late policy reads it."""
    with gradebook.opened(config) as book:
        duedate = due.astimezone(UTC).replace(tzinfo=None)
        book.update_or_create_assignment(assignment, duedate=duedate)
