"""Late penalties by one rule, for ``nbgrader autograde`` and for ``autograder grade``.

nbgrader counts hours after one deadline for all. In a course, single students have their own
deadlines (``grading/extensions.csv``), and days are the calendar's in the course's time zone. So
this pass writes the difference into nbgrader's field for extensions, and then runs nbgrader's pass.

nbgrader assigns a penalty when it autogrades a submission, and never again. So a deadline or policy
that is set later would affect only students who are graded after it, and points that a person gives
later would count in full. `renew_penalties` runs the pass for every student who is late.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from nbconvert.exporters.exporter import ResourcesDict
from nbformat import NotebookNode
from nbformat.v4 import new_notebook
from nbgrader.preprocessors import AssignLatePenalties
from traitlets.config import Config

from autograder.collection.extensions import read_extensions
from autograder.collection.times import clock_change, course_zone, in_utc
from autograder.course import Folders
from autograder.gradebook import exists, opened


class LatePenalties(AssignLatePenalties):
    """The pass that takes the place of nbgrader's `AssignLatePenalties`; it has its options."""

    def preprocess(
        self, nb: NotebookNode, resources: ResourcesDict
    ) -> tuple[NotebookNode, ResourcesDict]:
        """Assign the late penalty of one notebook.

        Raises:
            SourceError: the file of extensions cannot be read.

        """
        names = resources["nbgrader"]
        with opened(self.config) as gradebook:
            submission = gradebook.find_submission(names["assignment"], names["student"])
            _extend(self.config, names["assignment"], [submission])
            gradebook.db.commit()
        nb, resources = super().preprocess(nb, resources)
        return nb, resources


def _extend(config: Config, assignment: str, submissions: Iterable[Any]) -> None:
    """Write the extension of each submission, to which a change of the clocks is added."""
    data = Folders.of(config.CourseDirectory).data
    zone = course_zone(data)
    deadlines = read_extensions(data, assignment, zone)
    for submission in submissions:
        due, submitted = in_utc(submission.assignment.duedate), in_utc(submission.timestamp)
        until = deadlines.get(submission.student.id, due)
        extension = until - due if until and due else timedelta()
        if until and submitted:  # nbgrader counts hours; a day of 25 hours is one day
            extension += clock_change(until, submitted, zone)
        submission.extension = extension or None


def renew_penalties(config: Config, assignment: str) -> None:
    """Assign the late penalty of each booked submission again.

    Args:
        config: the course's configuration.
        assignment: its name.

    Raises:
        SourceError: the file of extensions cannot be read.

    """
    if not exists(config):
        return
    with opened(config) as gradebook:
        submissions = gradebook.assignment_submissions(assignment)
        _extend(config, assignment, submissions)
        gradebook.db.commit()
        late = [
            {"assignment": assignment, "student": submission.student.id, "notebook": notebook.name}
            for submission in submissions
            for notebook in submission.notebooks
            if submission.total_seconds_late or notebook.late_submission_penalty
        ]
    for names in late:
        names["db_url"] = str(config.CourseDirectory.db_url)
        LatePenalties(config=config).preprocess(new_notebook(), ResourcesDict(nbgrader=names))
