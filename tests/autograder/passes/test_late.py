"""Penalties count the calendar's days in the course's zone, also where the clocks change."""

from __future__ import annotations

import shutil
from datetime import datetime
from pathlib import Path

import pytest
from nbformat.v4 import new_notebook
from nbgrader.api import Gradebook
from traitlets.config import Config

from autograder.collection.times import keep_zone
from autograder.course import load_config
from autograder.passes.late import LatePenalties, renew_penalties
from tests.helpers.course_folders import ROOT

NAME = "02_data_parallel_sgd"


def lost(config: Config) -> dict[str, float]:
    with Gradebook(config.CourseDirectory.db_url, "sgd-to-ddp") as book:
        submissions = book.assignment_submissions(NAME)
        return {s.student.id: float(s.late_submission_penalty) for s in submissions}


@pytest.mark.filterwarnings("ignore")
def test_a_day_of_25_hours_is_one_day(tmp_path: Path) -> None:
    shutil.copy(ROOT / "nbgrader_config.py", tmp_path)
    config = load_config(tmp_path)
    config.AssignLatePenalties.plugin_class = "autograder.late_policy.PerDay"
    data = tmp_path / "grading"
    keep_zone(data, "America/New_York")
    extensions = f"assignment,student_id,until\n{NAME},extended,2026-10-31 21:00\n"
    (data / "extensions.csv").write_text(extensions)
    with Gradebook(config.CourseDirectory.db_url, "sgd-to-ddp") as book:
        book.add_assignment(NAME, duedate="2026-11-01 00:00:00")  # Saturday, 20:00 in New York
        book.add_notebook(NAME, NAME)
        book.add_grade_cell("task", NAME, NAME, cell_type="code", max_score=10.0)
        for student, time in {
            "in time": datetime(2026, 10, 31, 23, 59),
            "one day": datetime(2026, 11, 2, 0, 30),  # Sunday, 19:30, after 24.5 hours
            "two days": datetime(2026, 11, 2, 1, 30),
            "extended": datetime(2026, 11, 2, 1, 30),
        }.items():
            book.add_student(student)
            book.add_submission(NAME, student, timestamp=time)
            book.find_grade("task", NAME, NAME, student).auto_score = 10.0
        book.db.commit()
    for by in ("nbgrader autograde", "autograder grade", "the same again"):
        if by == "nbgrader autograde":
            for student in ("in time", "one day", "two days", "extended"):
                names = {"assignment": NAME, "student": student, "notebook": NAME}
                names["db_url"] = config.CourseDirectory.db_url
                LatePenalties(config=config).preprocess(new_notebook(), {"nbgrader": names})
        else:
            renew_penalties(config, NAME)
        assert lost(config) == {"in time": 0, "one day": 1, "two days": 2, "extended": 1}
    late = f"{NAME},extended,2026-10-31 19:00\n{NAME},two days,2026-11-02 09:00\n"
    (data / "extensions.csv").write_text(f"assignment,student_id,until\n{late}")
    renew_penalties(config, NAME)
    assert lost(config) == {"in time": 0, "one day": 1, "two days": 0, "extended": 2}
