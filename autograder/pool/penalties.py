"""Renew the late penalties of the whole class from the current deadlines, policy and points.

nbgrader assigns a penalty when it autogrades a submission, and never again. So a deadline or policy
that is set later would affect only students who are graded after it. Points that a person gives
later would count in full. This module runs nbgrader's own pass for every student. It takes
milliseconds each.
"""

from __future__ import annotations

from datetime import UTC, timedelta
from pathlib import Path

from nbformat.v4 import new_notebook
from nbgrader.api import Gradebook
from nbgrader.preprocessors import AssignLatePenalties
from traitlets.config import Config

from autograder.collection.extensions import read_extensions
from autograder.collection.times import clock_change, course_zone


def renew_penalties(config: Config, data: Path, assignment: str) -> int:
    """Assign the late penalty of each booked submission again; return how many changed.

    Args:
        config: the course's configuration.
        data: the class's folder, with the extensions of single students.
        assignment: its name.

    Raises:
        SourceError: the file of extensions cannot be read.

    """
    zone = course_zone(data)
    own_due = read_extensions(data, assignment, zone)
    url = str(config.CourseDirectory.db_url)
    if url.startswith("sqlite:") and not Path(url.removeprefix("sqlite:///")).is_file():
        return 0
    with Gradebook(url, str(config.CourseDirectory.course_id)) as gradebook:
        for submission in gradebook.assignment_submissions(assignment):
            due, when = (
                each.replace(tzinfo=UTC) if each else None
                for each in (submission.assignment.duedate, submission.timestamp)
            )
            until = own_due.get(submission.student.id, due)
            extension = until - due if until and due else timedelta()
            if until and when:  # nbgrader counts hours; a day of 25 hours is one day
                extension += clock_change(until, when, zone)
            submission.extension = extension or None
        gradebook.db.commit()
        before = _penalties(gradebook, assignment)
    for (student, notebook), (late, penalty) in before.items():
        if late or penalty:
            names = {"assignment": assignment, "student": student, "notebook": notebook}
            names["db_url"] = url
            AssignLatePenalties(config=config).preprocess(new_notebook(), {"nbgrader": names})
    with Gradebook(url, str(config.CourseDirectory.course_id)) as gradebook:
        return sum(before[key] != now for key, now in _penalties(gradebook, assignment).items())


def _penalties(gradebook: Gradebook, assignment: str) -> dict[tuple[str, str], tuple[float, float]]:
    """Return (student, notebook) → seconds late, points taken off."""
    return {
        (submission.student.id, notebook.name): (
            submission.total_seconds_late,
            float(notebook.late_submission_penalty or 0),
        )
        for submission in gradebook.assignment_submissions(assignment)
        for notebook in submission.notebooks
    }
