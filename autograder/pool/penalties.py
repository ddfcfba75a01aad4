"""Late penalties for the whole class, by the deadline, policy and points of now.

nbgrader assigns a penalty when it autogrades a submission, and never again. So a deadline or policy
that is set later would reach only those who are graded after it, and points that a person gives
later would count in full. This runs nbgrader's own pass for everybody; it takes milliseconds each.
"""

from __future__ import annotations

from pathlib import Path

from nbformat.v4 import new_notebook
from nbgrader.api import Gradebook
from nbgrader.preprocessors import AssignLatePenalties
from traitlets.config import Config


def renew_penalties(config: Config, assignment: str) -> int:
    """Assign the late penalty of each booked submission anew; return how many changed."""
    before = _penalties(config, assignment)
    for (student, notebook), (late, penalty) in before.items():
        if late or penalty:
            names = {"assignment": assignment, "student": student, "notebook": notebook}
            names["db_url"] = str(config.CourseDirectory.db_url)
            AssignLatePenalties(config=config).preprocess(new_notebook(), {"nbgrader": names})
    return sum(before[key] != now for key, now in _penalties(config, assignment).items())


def _penalties(config: Config, assignment: str) -> dict[tuple[str, str], tuple[float, float]]:
    """Return (student, notebook) → seconds late, points taken off."""
    url = str(config.CourseDirectory.db_url)
    if url.startswith("sqlite:") and not Path(url.removeprefix("sqlite:///")).is_file():
        return {}
    with Gradebook(url, str(config.CourseDirectory.course_id)) as gradebook:
        return {
            (submission.student.id, notebook.name): (
                submission.total_seconds_late,
                float(notebook.late_submission_penalty or 0),
            )
            for submission in gradebook.assignment_submissions(assignment)
            for notebook in submission.notebooks
        }
