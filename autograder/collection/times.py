"""Times as the systems write them, as nbgrader reads them, and the days between."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from dateutil import parser, tz
from nbgrader.utils import parse_utc

from autograder.collection.listing import SourceError

DAY = 24 * 3600


def read_time(text: str) -> datetime:
    """Return a time; one without a zone is this machine's local time.

    Raises:
        SourceError: it is none.

    """
    try:
        found: datetime = parser.parse(text)
    except (ValueError, OverflowError, TypeError) as error:
        raise SourceError(f"{text!r} is no time: write it as 2026-11-20 23:59 +0800") from error
    if found.tzinfo is None:
        found = found.replace(tzinfo=tz.tzlocal())
    return found.astimezone(UTC)


def stamp(when: datetime) -> str:
    """Return the contents of ``timestamp.txt``, as ``nbgrader submit`` writes it."""
    return when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f UTC")


def read_stamp(text: str) -> datetime | None:
    """Return what a ``timestamp.txt`` says, or the name of a folder in the exchange; else None."""
    try:
        found = parse_utc(text.strip())
    except Exception:  # dateutil raises whatever it stumbles over
        return None
    return found.replace(tzinfo=UTC) if isinstance(found, datetime) else None


def local(when: datetime | None) -> str:
    """Return a time for people."""
    return when.astimezone().strftime("%Y-%m-%d %H:%M") if when else ""


def days_late(when: datetime | None, due: datetime | None) -> int:
    """Return how many days, begun ones included, lie between the deadline and the hand-in."""
    if when is None or due is None:
        return 0
    return max(0, math.ceil((when - due).total_seconds() / DAY))
