"""A whole class: killed on the way, resumed, booked, regraded, explained; nothing is lost."""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import nbformat
import pytest
from nbgrader.api import Gradebook
from nbgrader.apps.api import NbGraderAPI

from autograder.commands import grade
from autograder.commands.demo import ASSIGNMENT
from autograder.course import Folders, Settings, load_config
from autograder.examination.verdict import Verdict, verdict_path
from autograder.passes.self_test import SelfTest
from autograder.pool import worker
from course_lib.learner.what_counts import grade_id
from tests.helpers.course_folders import needs_sources
from tests.helpers.whole_class import TASKS, Course, booked, unexpected

pytestmark = [
    needs_sources,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore"),  # nbgrader's, and what it stands on
]


# The class of ten -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def course(graded_course: Path, copy_of: Callable[[Path], Path]) -> Course:
    return Course.observed(copy_of(graded_course))


def in_this_process(root, assignment, paths, settings, *, jobs, launch, tell):
    """Stand for the pool, which starts processes: they take seconds."""
    folders = Folders.at(root)
    test = SelfTest(folders.source / assignment, folders.release / assignment, settings)
    outcomes = [worker.grade(folders, path, settings, test) for path in paths]
    for outcome in outcomes:
        tell(outcome)
    return outcomes


Commands = Callable[..., tuple[int, str]]


@pytest.fixture
def command(course: Course, monkeypatch: pytest.MonkeyPatch, autograder: Commands) -> Commands:
    """Return `autograder` on this course, which grades in this process."""
    monkeypatch.setattr(grade, "grade_all", in_this_process)
    return partial(autograder, course.root)


@pytest.fixture
def as_it_was(course: Course, tmp_path: Path) -> Iterator[None]:
    """Restore submissions, verdicts, gradebook and checks, for tests in any order."""
    data = course.root / "grading"
    copy = shutil.copytree(data, tmp_path / "kept", symlinks=True)
    checks = checks_of(course).read_text()
    yield
    shutil.rmtree(data)
    shutil.move(copy, data)
    checks_of(course).write_text(checks)


def checks_of(course: Course) -> Path:
    return course.root / "assignments" / ASSIGNMENT / "checks.py"


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def test_all_are_graded_and_booked_as_they_should_be(course: Course) -> None:
    points = booked(course.root)
    assert unexpected(course.members, points) == [], course.output
    assert {name for name, grades in points.items() if grades["penalty"]} == {"late"}
    assert "nothing: there is no notebook" in course.output
    assert "  damaged: the notebook is damaged, and " in course.output
    assert "  empty-file: the notebook is not JSON. It was set aside, and an empty" in course.output


@pytest.mark.usefixtures("as_it_was")
def test_what_the_machine_fails_is_listed_and_no_zero(course: Course, command: Commands) -> None:
    """A verdict that cannot be written, as on a full disk."""
    before, folder = booked(course.root), course.graded / "sum"
    shutil.rmtree(folder)
    folder.touch()
    status, output = command("grade", ASSIGNMENT, "--student", "sum")
    assert status == 1 and "sum: the machine failed: " in output, output
    assert "could not be graded: 1" in output and "No student got a zero" in output
    assert booked(course.root) == before


def test_what_was_graded_before_the_kill_was_not_run_again(course: Course) -> None:
    assert course.status == 0 and "graded: 9 (4 of them unchanged" in course.output, course.output
    now = course.times()
    assert len(course.before) >= 4
    assert {name: now[name] for name in course.before} == course.before
    assert all(len(paths) == 1 for paths in course.verdicts().values())
    assert not list(course.graded.glob("*/*.part"))


def test_a_verdict_says_what_it_is_about(course: Course) -> None:
    verdicts = course.verdicts()
    verdict = Verdict.read(verdicts["deadlock"][0])
    assert verdicts["deadlock"][0].stem == verdict.key
    assert verdict.settings["case_seconds"] == 10
    assert set(verdict.timings) == {"cells", *TASKS}
    assert verdict.checks_sha256 == Verdict.read(verdicts["right"][0]).checks_sha256
    seeds = {Verdict.read(paths[0]).seed for paths in verdicts.values()}
    assert len(seeds) == len(verdicts)  # everybody has inputs of their own
    secret = course.root / "grading" / "seeds" / ASSIGNMENT
    assert secret.stat().st_mode & 0o777 == 0o600
    (check,) = (c for c in Verdict.read(verdicts["sum"][0]).checks if c.score < c.max_score)
    assert check.trace["world_size"] >= 2 and check.trace["events"]


def test_plain_nbgrader_autograde_gives_the_same_grades(course: Course) -> None:
    before = booked(course.root)
    config = load_config(course.root)
    pooled = Verdict.read(course.verdicts()["deadlock"][0])
    outcome = NbGraderAPI(config=config).autograde(ASSIGNMENT, "deadlock")
    assert outcome["success"], outcome
    plain = Verdict.read(verdict_path(course.root / "grading", ASSIGNMENT, "deadlock", ASSIGNMENT))
    assert (plain.key, plain.seed) == (pooled.key, pooled.seed)
    assert plain.seconds != pooled.seconds  # it was run
    assert [c.score for c in plain.checks] == [c.score for c in pooled.checks]
    assert booked(course.root) == before
    again = Verdict.read(course.verdicts()["deadlock"][0])
    assert again.seconds == plain.seconds, "`autograder status` and `grade` know it, too"


def test_status_counts_them(course: Course, command: Commands) -> None:
    status, output = command("status", ASSIGNMENT)
    assert status == 0
    assert output.splitlines()[1].split()[:6] == [ASSIGNMENT, "10", "9", "0", "0", "9"], output
    assert "nothing: submitted no notebook" in output
    released = course.root / "grading/release"
    released.rename(course.root / "not yet")
    _, output = command("status", ASSIGNMENT)
    (course.root / "not yet").rename(released)
    assert output.splitlines()[1].split()[:2] == [ASSIGNMENT, "10"]
    assert "not released: run" in output


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.large
def test_a_mended_check_changes_nothing_before_it_is_booked(course, command):
    text, before = checks_of(course).read_text(), booked(course.root)
    students = ("--student", "sum", "--student", "right")
    no_judge = "replace(CHECKS[TASKS[1]], judge=lambda case, inputs, outputs: None)"
    append(checks_of(course), f"CHECKS[TASKS[1]] = {no_judge}\n")
    _, output = command("status", ASSIGNMENT)
    # All are outdated, and the old points are still booked.
    assert output.splitlines()[1].split()[2:6] == ["0", "9", "0", "9"], output
    status, output = command("regrade", ASSIGNMENT, "--changed", *students)
    assert status == 0, output
    assert "1 gain, 0 lose, 1 keep their points" in output
    assert re.search(r"\+3 +average_gradients", output) and "Nothing was booked" in output
    assert booked(course.root) == before
    settings = Settings.of(load_config(course.root))
    unbooked = grade.book_class(course.root, ASSIGNMENT, ["crash"], settings)
    assert unbooked == ["crash"]  # what changes between grading and booking is no grade
    status, output = command("grade", ASSIGNMENT, *students)
    assert status == 0 and "(2 of them unchanged" in output, output
    assert booked(course.root)["sum"]["average_gradients"] == TASKS["average_gradients"]
    checks_of(course).write_text(text)
    status, output = command("grade", ASSIGNMENT, *students)  # the first verdicts are still there
    assert "graded: 2 (2 of them unchanged" in output, output
    assert booked(course.root) == before


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.large
def test_points_by_hand_need_not_be_given_again(course: Course, command: Commands) -> None:
    """After a mended check nobody reads 300 answers again; a changed answer is read again."""
    url = load_config(course.root).CourseDirectory.db_url
    student, by_hand = ("--student", "sum"), {"explain_weights": 2.0, "shard_bounds": 1.5}

    def waiting(**points: float) -> set[str]:
        with Gradebook(url, "sgd-to-ddp") as book:
            (notebook,) = book.find_submission(ASSIGNMENT, "sum").notebooks
            grades = {grade.cell.name: grade for grade in notebook.grades}
            for name, score in points.items():
                grades[name].manual_score, grades[name].needs_manual_grade = score, False
            book.db.commit()
            assert {name: grades[name].score for name in by_hand} == by_hand
            return {name for name, grade in grades.items() if grade.needs_manual_grade}

    assert waiting(**by_hand) == set()
    append(checks_of(course), "# mended\n")
    status, output = command("grade", ASSIGNMENT, *student)
    assert status == 0 and "graded: 1 (0 of them unchanged" in output, output
    assert waiting() == set()
    path = course.root / "grading/submitted/sum" / ASSIGNMENT / f"{ASSIGNMENT}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    (answer,) = (cell for cell in notebook.cells if grade_id(cell) == "explain_weights")
    answer.source = "Another answer."
    nbformat.write(notebook, path)
    status, output = command("grade", ASSIGNMENT, *student)
    assert status == 0 and "explain_weights" in waiting(), output


@pytest.mark.usefixtures("as_it_was")
def test_a_deadline_that_is_set_after_grading_reaches_everybody(course, command):
    """One student is graded, the whole class gets penalties; test_late has other policies."""
    url = load_config(course.root).CourseDirectory.db_url
    late = {"right": 1, "sum": 25, "crash": -1}
    with Gradebook(url, "sgd-to-ddp") as book:
        book.update_or_create_assignment(ASSIGNMENT, duedate=datetime(2026, 11, 20, 12))
        for student, hours in late.items():
            submission = book.find_submission(ASSIGNMENT, student)
            assert not submission.late_submission_penalty
            submission.timestamp = datetime(2026, 11, 20, 12) + timedelta(hours=hours)
        book.db.commit()
    status, output = command("grade", ASSIGNMENT, "--student", "right")
    assert status == 0, output
    with Gradebook(url, "sgd-to-ddp") as book:
        for student, hours in late.items():
            submission = book.find_submission(ASSIGNMENT, student)
            all_points = submission.score if hours > 0 else 0  # the class's policy takes them off
            assert submission.late_submission_penalty == all_points and submission.score > 0


def test_the_report_on_the_class(course: Course, command: Commands) -> None:
    status, output = command("report", ASSIGNMENT)
    assert status == 0, output
    assert "9 graded" in output and "not graded yet: nothing" in output
    assert re.search(r"^average_gradients +3 +4 ", output, re.MULTILINE), output
    page = course.root / "grading/report" / f"{ASSIGNMENT}.html"
    assert "average_gradients" in page.read_text(encoding="utf-8")


def test_what_a_student_wrote_controls_no_terminal(course: Course, command: Commands) -> None:
    note = course.graded / "nothing" / "failed.txt"
    note.parent.mkdir(exist_ok=True)
    note.write_text("the check is broken: got '\x1b]0;a title\x07\u202e\x9b2J\x1b[31mred'\n")
    _, output = command("status", ASSIGNMENT)
    shutil.rmtree(note.parent)
    assert "got '�]0;a title���2Jred'" in output


def test_one_grade_is_explained_and_drawn(course: Course, command: Commands) -> None:
    path = verdict_path(course.root / "grading", ASSIGNMENT, "sum", ASSIGNMENT)
    status, output = command("regrade", ASSIGNMENT, "--one", "sum")
    assert status == 0, output
    assert "the sum over the ranks, not the mean" in output
    assert "The points are the same as in the verdict." in output
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_two_at_once_are_refused(course: Course, command: Commands) -> None:
    with (course.graded / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, output = command("grade", ASSIGNMENT)
    assert (status, "another command is grading" in output) == (2, True), output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("grade", "99_nothing"), "has no submission of 99_nothing"),
        (("grade", ASSIGNMENT, "--student", "nobody"), "nobody submitted nothing"),
        (("regrade", ASSIGNMENT), "one of the arguments --all --changed --one is required"),
        (("regrade", ASSIGNMENT, "--one", "nobody"), "nobody has no verdict"),
        (("status", "99_nothing"), "has no submission of 99_nothing"),
    ],
)
def test_bad_input_is_answered(course, command, arguments, message):
    status, output = command(*arguments)
    assert status == 2 and message in output and "Traceback" not in output, output


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.large
def test_any_change_is_seen(course: Course, command: Commands) -> None:
    data, right = course.root / "grading", course.verdicts()["right"][0]
    handed_in = data / "submitted/right" / ASSIGNMENT
    for change, unchanged, booking in (
        (lambda: (handed_in / "timestamp.txt").write_text("2030-01-16 12:00:00 UTC"), 9, True),
        (lambda: (handed_in / "timestamp.txt").unlink(), 9, True),
        (lambda: (data / "autograded/sum" / ASSIGNMENT / f"{ASSIGNMENT}.ipynb").unlink(), 9, True),
        (lambda: right.write_text("{}"), 8, False),  # graded again, with the points that are booked
    ):
        change()
        status, output = command("grade", ASSIGNMENT)
        assert status == 0 and ("booked 1 of 1" in output) is booking, output
        assert f"graded: 9 ({unchanged} of them unchanged" in output, output
    _, output = command("grade", ASSIGNMENT)
    assert "nothing to book: 9 submissions booked already" in output, output
    assert unexpected(course.members, booked(course.root)) == []
