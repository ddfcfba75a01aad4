"""The deadline of an assignment, in nbgrader's gradebook, where its late policy reads it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from traitlets.config import Config


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
