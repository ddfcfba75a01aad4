"""If a machine is broken in a way that nobody foresaw, nothing is booked, and a message says so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nbgrader.apps.api import NbGraderAPI

from autograder.commands.demo import ASSIGNMENT
from autograder.course import Folders, load_config
from autograder.examination.budget import PATIENCE
from autograder.examination.submission import Submission
from autograder.examination.verdict import CheckVerdict, Verdict
from autograder.passes import autograde, canary, examine
from autograder.pool import local, phases
from autograder.pool.one import Bench
from autograder.pool.outcome import AUTHOR, MACHINE, Outcome
from autograder.sandbox import place as place_module
from autograder.sandbox.mounts import Mount
from autograder.settings import Settings
from course_lib.ranks.explain.errors import RanksError
from tests.helpers.course_folders import ROOT, SOURCES, assignments, needs_sources
from tests.helpers.whole_class import TASKS, Course, booked, course_of, hand_in
from tests.helpers.whole_class import small_class as members_of

pytestmark = [
    needs_sources,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # nbgrader's, and what it stands on
]
CLASS = ("right", "sum", "right-too", "late")


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Course:
    root = course_of(tmp_path_factory.mktemp("canaries") / "a class", less=True)
    members = members_of(root)
    return Course(root, {name: members[name] for name in CLASS})


@pytest.fixture
def course(released: Course) -> Iterator[Course]:
    """Four submissions, nothing graded, and unchanged checks."""
    checks = released.root / "assignments" / ASSIGNMENT / "checks.py"
    text = checks.read_text()
    hand_in(released.root, released.members)
    yield released
    checks.write_text(text)
    data = released.root / "grading"
    for folder in ("submitted", "graded", "autograded", "verdicts"):
        subprocess.run(["rm", "-rf", data / folder], check=True)


@pytest.fixture
def new_sandbox() -> Iterator[None]:
    """Use no sandbox that another test has warmed, and leave none for the next."""

    def close() -> None:
        for place in examine._warm.values():
            place.close()
        examine._warm.clear()
        autograde._canaries.clear()

    close()
    yield
    close()


class Desk:
    """A bench, and its messages so far."""

    def __init__(self, course: Course) -> None:
        self.told: dict[str, Outcome] = {}
        self._folder = course.root / "grading" / "submitted"
        folders = Folders.of(course.root, load_config(course.root))
        self.bench = Bench(folders, Settings(), self._tell)

    def _tell(self, outcome: Outcome | None) -> None:
        if outcome is not None:
            self.told[Path(outcome.path).parents[1].name] = outcome

    def grade(self, *names: str, alone: bool = False) -> None:
        for name in names:
            path = self._folder / name / ASSIGNMENT / f"{ASSIGNMENT}.ipynb"
            self.bench.grade(path, again=False, alone=alone)


def loses_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break this machine: every case ends like a student's program that fails."""

    def runner(self: Submission, on: Any = None) -> Callable[..., Any]:
        def run(*_: object) -> Any:
            raise RanksError("Rank 0 raised ImportError: there is no Python here")

        return run

    monkeypatch.setattr(Submission, "runner", runner)


# A worker ---------------------------------------------------------------------------------------


def test_what_was_graded_counts_after_the_next_canaries(course: Course) -> None:
    desk = Desk(course)
    desk.grade("right", "sum")
    assert not desk.told and not course.verdicts() and len(course.drafts()) == 2
    desk.bench.confirm()
    assert {name: o.score for name, o in desk.told.items()} == {"right": 12, "sum": 8}
    assert set(course.verdicts()) == {"right", "sum"} and not course.drafts()
    assert not desk.bench.distrust


def test_a_machine_that_breaks_half_way(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(course)
    desk.grade("right", "sum")
    desk.bench.confirm()
    desk.grade("right-too")
    loses_everything(monkeypatch)
    desk.grade("late")
    drafts = [Verdict.read(path).score for path in course.drafts()]
    assert sorted(drafts) == [0, 12], "it did give a right solution no points"
    desk.bench.confirm()
    assert set(course.verdicts()) == {"right", "sum"} and not course.drafts()
    for name in ("right-too", "late"):
        assert desk.told[name].fault == MACHINE and not desk.told[name].verdict
        assert "a right solution got " in desk.told[name].failed
        assert "course doctor --grading" in desk.told[name].failed
    assert desk.bench.distrust
    monkeypatch.undo()
    desk.grade("late")  # this process is not asked again; if it is, it refuses
    assert desk.told["late"].fault == MACHINE and set(course.verdicts()) == {"right", "sum"}


@pytest.mark.usefixtures("new_sandbox")
def test_a_sandbox_in_which_pytorch_divides_wrongly(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Students' ranks start, send and end as they should, but compute something else."""
    names = ("div", "div_", "__truediv__", "__itruediv__")
    lines = [f"torch.Tensor.{name} = lambda self, *_, **__: self" for name in names]
    broken = Mount("/exam/sitecustomize.py", text="\n".join(["import torch", *lines]))
    checking = place_module._checking
    monkeypatch.setattr(place_module, "_checking", lambda: [*checking(), broken])
    desk = Desk(course)
    desk.grade("right")
    assert desk.told["right"].fault == MACHINE, desk.told
    assert "a right solution got " in desk.told["right"].failed
    assert not course.verdicts() and not course.drafts()


@pytest.mark.parametrize(
    ("code", "fault", "words"),
    [
        pytest.param(
            "judge=lambda case, inputs, outputs: None, expects=()",
            *(MACHINE, "a function that returns nothing got "),
            id="passes everything",
        ),
        pytest.param(
            *("inputs=lambda case, generator: 1 / 0", AUTHOR, "the inputs of"),
            id="cannot draw its inputs",
            marks=pytest.mark.large,
        ),
    ],
)
def test_a_check_that_is_broken(course: Course, code: str, fault: str, words: str) -> None:
    checks = course.root / "assignments" / ASSIGNMENT / "checks.py"
    broken = f"CHECKS = {{name: replace(check, {code}) for name, check in CHECKS.items()}}\n"
    checks.write_text(checks.read_text() + broken)
    desk = Desk(course)
    desk.grade("sum")
    assert desk.told["sum"].fault == fault and words in desk.told["sum"].failed, desk.told
    assert not course.verdicts() and not course.drafts()


@pytest.mark.large
def test_a_sandbox_vouches_only_for_itself(course: Course) -> None:
    """Its grades do not count if it ended before the canaries."""
    desk = Desk(course)
    desk.grade("right")
    (place,) = examine._warm.values()
    place.close()
    desk.grade("sum")
    assert desk.told["right"].fault == MACHINE and "sandbox ended" in desk.told["right"].failed
    desk.grade("right", alone=True)
    assert {name: outcome.score for name, outcome in desk.told.items()} == {"right": 12, "sum": 8}


# The pool, and nbgrader -------------------------------------------------------------------------

COUNTS = """
from pathlib import Path
from course_lib.checking import Wrong
_folder = Path({folder!r})
with (_folder / "loads").open("a") as _file:
    _file.write(".")
def _lost(case, inputs, outputs):
    raise Wrong("this machine has lost it")
if len((_folder / "loads").read_text()) > int((_folder / "good").read_text()):
    CHECKS = {{name: replace(check, judge=_lost) for name, check in CHECKS.items()}}
"""
"""From the given load of a check on, all results are wrong: for canaries or for a student."""


@pytest.mark.large
def test_a_pool_books_what_was_graded_before_and_says_what_to_do(
    course: Course,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "ATTEMPTS", 1)  # each takes the start of a worker
    monkeypatch.setattr(local, "IN_A_ROW", 1)
    checks = course.root / "assignments" / ASSIGNMENT / "checks.py"
    checks.write_text(checks.read_text() + COUNTS.format(folder=str(tmp_path)))

    def grade(good: int) -> tuple[int, str]:
        (tmp_path / "loads").write_text("")
        (tmp_path / "good").write_text(str(good))
        outcomes = phases.grade_class(course.root, ASSIGNMENT, [], Settings(), jobs=1)
        assert {o.fault for o in outcomes if o.failed} <= {MACHINE}
        return phases.report(outcomes), capsys.readouterr().out

    (tmp_path / "good").write_text("1000")
    desk = Desk(course)
    desk.grade("late")
    desk.bench.confirm()
    status, said = grade(2)  # canaries and one student; then it breaks
    assert status == 1 and "graded: 1 (1 of them unchanged" in said, said
    assert "could not be graded: 3" in said
    assert said.count("this machine has lost it") >= 3 and "course doctor --grading" in said
    assert "No student got a zero for this, and nothing is booked for these submissions." in said
    phases.book_class(course.root, ASSIGNMENT, [], Settings())
    assert set(booked(course.root)) == {"late"}
    status, said = grade(0)  # from the start
    assert status == 1 and "sum: the machine failed: a right solution got " in said, said


@pytest.mark.usefixtures("new_sandbox")
def test_plain_nbgrader_books_nothing_either(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = NbGraderAPI(config=load_config(course.root))
    with monkeypatch.context() as patch:
        loses_everything(patch)
        patch.setattr(autograde, "ATTEMPTS", 1)
        outcome = api.autograde(ASSIGNMENT, "right")
    assert not outcome["success"] and "a right solution got " in outcome["log"], outcome
    points = [value for task, value in booked(course.root)["right"].items() if task in TASKS]
    assert points == [None] * len(TASKS), "nbgrader has noted who handed in, and no points"
    assert api.autograde(ASSIGNMENT, "right")["success"]
    (trusted,) = autograde._canaries.values()
    before = trusted.sandbox
    assert before is not None
    before[0].close()
    assert api.autograde(ASSIGNMENT, "sum")["success"]
    assert trusted.sandbox not in (None, before), "a new sandbox is asked as well"
    assert booked(course.root)["right"]["average_gradients"] == TASKS["average_gradients"]


def test_a_worker_is_given_as_long_as_a_submission_may_last(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local.subprocess, "Popen", lambda *_, **__: FakeProcess())
    settings, now = Settings(submission_seconds=60.0), [1000.0]
    worker = local.Worker(course.root, settings)
    monkeypatch.setattr(local.time, "monotonic", lambda: now[0])
    worker.give("a path", again=False, alone=False)
    now[0] += PATIENCE * settings.submission_seconds
    assert not worker.late
    now[0] += local.START_SECONDS + 1
    assert worker.late


class FakeProcess:
    stdin = stdout = None

    def __init__(self) -> None:
        self.stdin = type("", (), {"write": lambda *_: None})()


def test_a_worker_that_says_nothing_costs_no_points(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen = subprocess.Popen

    def silent(_: Any, **options: Any) -> Any:
        return popen([sys.executable, "-c", "import time; time.sleep(600)"], **options)

    monkeypatch.setattr(local.subprocess, "Popen", silent)
    monkeypatch.setattr(local, "START_SECONDS", 0.2)
    folder = course.root / "grading" / "submitted"
    paths = [folder / name / ASSIGNMENT / f"{ASSIGNMENT}.ipynb" for name in ("right", "sum")]
    outcomes = local.grade_all(course.root, paths, Settings(submission_seconds=0.0), jobs=2)
    assert [o.fault for o in outcomes] == [MACHINE] * 2
    assert all("gave no answer within its time limit" in o.failed for o in outcomes)
    assert not course.verdicts() and not course.drafts()


# The canaries -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "wrong", "crashing", "words"),
    [
        (4, 0, 0, ""),
        (4, 1, 0, ""),
        (3, 0, 0, "a right solution got 3 of 4 points in t (why)"),
        (4, 4, 0, "a function that returns nothing got 4 of 4 points in t"),
        (4, 0, 1, "a function that ends its process got 1 of 4 points in t"),
    ],
)
def test_what_must_be(right: float, wrong: float, crashing: float, words: str) -> None:
    made = canary.Canary(*(None,) * 2, "t", "n")  # type: ignore[arg-type]
    ended = f"Rank 0's process ended: {canary.exit_reason(3)}."
    reasons = ("why" if right < 4 else "", "" if wrong == 4 else "wrong", ended)
    checks = [
        CheckVerdict("02/t", score, 4, reason, [])
        for score, reason in zip((right, wrong, crashing), reasons, strict=True)
    ]
    assert made.wrong(checks).startswith(words) and bool(made.wrong(checks)) == bool(words)
    checks[2] = CheckVerdict("02/t", 0, 4, "The case took longer than its limit.", [])
    assert made.wrong(checks), "a crash that is not found is no crash"


@pytest.mark.large
@pytest.mark.parametrize("source", assignments(SOURCES), ids=lambda path: path.name)
def test_every_assignment_has_canaries(source: Path) -> None:
    canaries = canary.Canaries(source, ROOT / "assignments" / source.name, Settings())
    canaries.check()
    assert canaries.trusted()
    print(f"{source.name}: {canaries.seconds:.1f} s")
