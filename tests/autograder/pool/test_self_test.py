"""If a machine is broken in a way that nobody foresaw, nothing is booked, and a message says so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nbgrader.apps.api import NbGraderAPI

from autograder.commands.demo import ASSIGNMENT
from autograder.course import Folders, load_config
from autograder.examination.submission import Submission
from autograder.examination.verdict import Verdict
from autograder.passes import autograde, examine, self_test
from autograder.pool import local, one
from autograder.pool.one import Bench
from autograder.pool.outcome import AUTHOR, MACHINE, Outcome
from autograder.sandbox import place as place_module
from autograder.sandbox.mounts import Mount
from autograder.sandbox.place import MachineFailure
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
    root = course_of(tmp_path_factory.mktemp("self-test") / "a class", less=True)
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
        autograde._tests.clear()

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

    def grade(self, *names: str) -> None:
        for name in names:
            path = self._folder / name / ASSIGNMENT / f"{ASSIGNMENT}.ipynb"
            self.bench.grade(path, again=False)


def loses_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break this machine: every case ends like a student's program that fails."""

    def runner(self: Submission, *_: object) -> Callable[..., Any]:
        def run(*_: object) -> Any:
            raise RanksError("Rank 0 raised ImportError: there is no Python here")

        return run

    monkeypatch.setattr(Submission, "runner", runner)


# A worker ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("new_sandbox")
def test_a_machine_that_fails_on_some_submissions_grades_the_others(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, whole = Desk(course), one.examine_notebook

    def fails(nb: Any, exam: Any, verdict: Verdict, *rest: Any) -> None:
        if verdict.student != "right-too":
            raise MachineFailure("A student's process was ended from outside")
        whole(nb, exam, verdict, *rest)

    monkeypatch.setattr(one, "examine_notebook", fails)
    desk.grade("right", "sum", "late", "right-too")
    assert [desk.told[name].fault for name in ("right", "sum", "late")] == [MACHINE] * 3
    assert not any(outcome.everywhere for outcome in desk.told.values())
    assert desk.told["right-too"].score == 12 and not desk.bench.distrust


@pytest.mark.parametrize(("everywhere", "graded"), [(True, 0), (False, 1)])
def test_the_pool_gives_up_only_if_nothing_can_be_graded(
    course: Course, monkeypatch: pytest.MonkeyPatch, everywhere: bool, graded: int
) -> None:
    """Three submissions fail three times each; then there is a fourth."""
    answer = json.dumps({"everywhere": everywhere})
    code = (
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    path = json.loads(line)['path']\n"
        "    bad = '/late/' not in path\n"
        "    more = {'fault': 'the machine failed', 'failed': 'x', **json.loads(sys.argv[2])}\n"
        "    out = open(int(sys.argv[1]), 'w', closefd=False)\n"
        "    said = json.dumps({'path': path, **(more if bad else {})})\n"
        "    out.write(said + '\\n{\"next\": 1}\\n')\n"
        "    out.flush()\n"
    )
    popen = subprocess.Popen

    def worker(_: Any, **options: Any) -> Any:
        return popen([sys.executable, "-c", code, str(options["pass_fds"][0]), answer], **options)

    monkeypatch.setattr(local.subprocess, "Popen", worker)
    folder = course.root / "grading" / "submitted"
    names = ("right", "sum", "right-too", "late")
    paths = [folder / name / ASSIGNMENT / f"{ASSIGNMENT}.ipynb" for name in names]
    outcomes = local.grade_all(course.root, paths, Settings(), jobs=1)
    assert sum(not outcome.failed for outcome in outcomes) == graded


@pytest.mark.usefixtures("new_sandbox")
@pytest.mark.large
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
    assert not course.verdicts()


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
    assert not course.verdicts()


# The pool, and nbgrader -------------------------------------------------------------------------


@pytest.mark.usefixtures("new_sandbox")
@pytest.mark.large
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
    (trusted,) = autograde._tests.values()
    before = trusted.sandbox
    assert before is not None
    before[0].close()
    assert api.autograde(ASSIGNMENT, "sum")["success"]
    assert trusted.sandbox not in (None, before), "a new sandbox is asked as well"
    assert booked(course.root)["right"]["average_gradients"] == TASKS["average_gradients"]


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
    assert not course.verdicts()


# The self-test -----------------------------------------------------------------------------------


@pytest.mark.large
@pytest.mark.parametrize("source", assignments(SOURCES), ids=lambda path: path.name)
def test_every_assignment_has_a_self_test(source: Path) -> None:
    test = self_test.SelfTest(source, ROOT / "assignments" / source.name, Settings())
    test.run()
    assert test.trusted()
    print(f"{source.name}: {test.seconds:.1f} s")
