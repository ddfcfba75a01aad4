"""The dates between which questions about an assignment's grades are taken."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from autograder.collection.times import local
from autograder.files import write_whole

Dates = tuple[datetime | None, datetime | None]


def read_dates(data: Path, assignment: str) -> Dates:
    """Return the first and the last date; None is no limit."""
    path = data / "inquiries" / "dates.json"
    if not path.is_file():
        return None, None
    found = json.loads(path.read_text(encoding="utf-8")).get(assignment, {})
    times = [found.get(key) for key in ("from", "until")]
    first, last = (datetime.fromisoformat(time) if time else None for time in times)
    return first, last


def write_dates(data: Path, assignment: str, dates: Dates) -> None:
    """Set the first and the last date."""
    path = data / "inquiries" / "dates.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    first, last = dates
    known[assignment] = {
        key: time.isoformat() for key, time in (("from", first), ("until", last)) if time
    }
    write_whole(path, json.dumps(known, indent=1, sort_keys=True) + "\n")


def why_not(dates: Dates, now: datetime | None = None) -> str:
    """Return why no question is taken now, or an empty string."""
    now = now or datetime.now(UTC)
    first, last = dates
    if first and now < first:
        return f"questions are taken from {local(first)} on"
    if last and now > last:
        return f"questions were taken until {local(last)}"
    return ""


def in_words(dates: Dates) -> str:
    """Return the dates as words."""
    first, last = dates
    told = [f"from {local(first)}"] * bool(first) + [f"until {local(last)}"] * bool(last)
    return " ".join(told) or "at any time"
