"""If a machine is broken in a way that nobody foresaw, nothing is booked, and a message says so."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from nbgrader.apps.api import NbGraderAPI

from autograder.commands import grade
from autograder.commands.demo import ASSIGNMENT
from autograder.course import Folders, Settings, load_config
from autograder.errors import CommandFailed
from autograder.examination.submission import Submission
from autograder.passes import autograde, examine, self_test
from autograder.pool import grade_all as pool
from autograder.pool import worker
from autograder.pool.worker import AUTHOR, MACHINE, Outcome
from autograder.sandbox.sandbox import Sandbox
from course_lib.ranks.explain.errors import RanksError
from tests.helpers.course_folders import ROOT, SOURCES, assignments, needs_sources
from tests.helpers.whole_class import TASKS, Course, booked, hand_in
from tests.helpers.whole_class import small_class as members_of

pytestmark = [
    needs_sources,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # nbgrader's, and what it stands on
]
CLASS = ("right", "sum", "crash", "late")


@pytest.fixture(scope="module")
def released(released_course: Path, copy_of: Callable[[Path], Path]) -> Course:
    root = copy_of(released_course)
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
        autograde.self_test_of.cache_clear()

    close()
    yield
    close()


# A worker ---------------------------------------------------------------------------------------


FAKE_WORKER = """
import json, os, sys, time
def say(text, end="\\n"):
    print(text, end=end, flush=True)
failed = dict(path="", failed="x", fault="the machine failed")
how, settings = sys.argv[1], json.loads(sys.stdin.readline())["settings"]
if how == "waits":
    time.sleep(600)
print("Welcome to n1!", "3", '{"to": "you"}', sep="\\n", end="")  # as a shell's start may
say('\\n{"host": "n1"}')
if how == "says nothing":
    time.sleep(600)
say(json.dumps(failed if how == "does not start" else {"path": ""}))
for line in sys.stdin:
    path = json.loads(line)
    if how == "dies in a line":
        say('{"path": "', end="")
        sys.exit(3)
    if how == "is killed" and not os.path.exists(path + ".seen"):
        open(path + ".seen", "w").close()
        os.kill(os.getpid(), 9)
    if how == "takes long" and "/late/" not in path:
        time.sleep(600)
    right = "/late/" in path or how == "is killed"
    say(json.dumps({**({} if right else failed), "path": path}))
"""


@pytest.fixture
def fake_workers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[subprocess.Popen[bytes]]]:
    """Return a function that makes workers fakes, later ones like the last; and their processes.

    Those that are to behave as "no memory" cannot be started.
    """
    popen = subprocess.Popen
    monkeypatch.setattr(pool, "PAUSE_SECONDS", 0.05)

    def be(*behaviours: str) -> list[subprocess.Popen[bytes]]:
        started, following = [], itertools.chain(behaviours, itertools.repeat(behaviours[-1]))

        def fake(command: list[str], **options: Any) -> Any:
            variables, _, option, *_ = command[command.index("env") + 1 :]
            assert option == "-P", "it imports nothing from its working folder"
            assert variables.split(os.pathsep)[0] == f"PYTHONPATH={ROOT}", "our clone"
            assert not options.get("pass_fds")
            if (behaviour := next(following)) == "no memory":
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            fakes = [*command[: command.index("env")], sys.executable, "-c", FAKE_WORKER, behaviour]
            started.append(popen(fakes, **options))
            return started[-1]

        monkeypatch.setattr(subprocess, "Popen", fake)
        return started

    return be


def paths_of(course: Course) -> list[Path]:
    folder = course.root / "grading" / "submitted"
    return [folder / name / ASSIGNMENT / f"{ASSIGNMENT}.ipynb" for name in CLASS]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("behaviour", "jobs", "graded", "message"),
    [
        ("fails", 1, 1, "n1: x (tried 3 times)"),
        ("fails", 3, 1, "n1: x (tried 3 times)"),
        ("dies in a line", 2, 0, "the worker process ended: it called exit with status 3. (tried"),
    ],
)
def test_a_submission_on_which_workers_fail_stops_no_other(
    course, fake_workers, behaviour, jobs, graded, message
):
    """Workers fail on three submissions, three times on each; the fourth is graded."""
    fake_workers(behaviour)
    outcomes = pool.grade_all(course.root, ASSIGNMENT, paths_of(course), Settings(), jobs=jobs)
    assert sum(not outcome.failed for outcome in outcomes) == graded
    assert [outcome.path for outcome in outcomes] == [str(path) for path in paths_of(course)]
    assert all(message in outcome.failed for outcome in outcomes if outcome.failed), outcomes


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("does not start", "n1: x"),
        ("says nothing", "n1: the worker process gave no answer within its time limit"),
        ("no memory", "[Errno 12] Cannot allocate memory"),
    ],
)
def test_the_pool_gives_up_only_if_no_worker_starts(
    course, fake_workers, monkeypatch, behaviour, message
):
    started = fake_workers(behaviour)
    settings = Settings()
    if behaviour == "says nothing":
        monkeypatch.setattr(pool, "START_SECONDS", 0.2)
        settings = Settings(submission_seconds=0.0)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(CommandFailed, match=re.escape(f"nobody was graded: {MACHINE}: {message}")):
        pool.grade_all(course.root, ASSIGNMENT, paths_of(course), settings, jobs=2)
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    assert all(worker.poll() is not None for worker in started)


def test_what_was_graded_counts_if_later_no_worker_starts(course, fake_workers):
    fake_workers("fails", "no memory")
    paths = [*reversed(paths_of(course))]  # "late" first
    outcomes = pool.grade_all(course.root, ASSIGNMENT, paths, Settings())
    failed = "[Errno 12] Cannot allocate memory (not tried again)"
    assert [outcome.failed for outcome in outcomes] == ["", *[failed] * (len(CLASS) - 1)]


def test_a_worker_that_cannot_start_or_is_killed_is_replaced(course, fake_workers, capsys):
    started = fake_workers("no memory", "no memory", "is killed")
    outcomes = pool.grade_all(course.root, ASSIGNMENT, paths_of(course), Settings(), jobs=2)
    assert [(outcome.failed, outcome.attempts) for outcome in outcomes] == [("", 2)] * len(CLASS)
    assert [worker.poll() for worker in started].count(-9) == len(CLASS)
    assert grade.report(outcomes) == 0
    line = f"tried again, because the machine had failed: {len(CLASS)} ({', '.join(CLASS)})"
    assert line in capsys.readouterr().out


def test_a_busy_cluster_is_told_and_at_last_not_waited_for(
    course, fake_workers, monkeypatch, capsys
):
    started = fake_workers("waits", "is killed")
    monkeypatch.setattr(pool, "TELL_SECONDS", 0.05)
    launch = ("bash", "-c", '"$@"; exit', "bash")  # bash stays, as srun does
    options = {"jobs": 2, "launch": launch}
    outcomes = pool.grade_all(course.root, ASSIGNMENT, paths_of(course), Settings(), **options)
    assert [outcome.attempts for outcome in outcomes] == [2] * len(CLASS)
    assert "of 2 workers wait for the cluster\n" in capsys.readouterr().out
    assert all(worker.poll() is not None for worker in started)


def test_an_interrupted_pool_leaves_no_worker(course: Course, fake_workers: Any) -> None:
    started = fake_workers("takes long")

    def interrupt(_: Outcome) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        paths = reversed(paths_of(course))  # "late" first
        pool.grade_all(course.root, ASSIGNMENT, [*paths], Settings(), jobs=2, tell=interrupt)
    assert started and all(worker.poll() is not None for worker in started)


@pytest.mark.parametrize(
    ("code", "fault", "message"),
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
def test_a_check_that_is_broken(course, monkeypatch, code, fault, message):
    monkeypatch.setattr(Sandbox, "close", lambda _: None)  # it serves the other tests
    checks = course.root / "assignments" / ASSIGNMENT / "checks.py"
    broken = f"CHECKS = {{name: replace(check, {code}) for name, check in CHECKS.items()}}\n"
    checks.write_text(checks.read_text() + broken)
    folders = Folders.at(course.root)
    test = self_test.SelfTest(folders.source / ASSIGNMENT, folders.release / ASSIGNMENT, Settings())
    outcome = worker.grade(folders, paths_of(course)[1], Settings(), test)
    assert outcome.fault == fault and message in outcome.failed, outcome
    assert not course.verdicts()


@pytest.mark.large
def test_an_idle_worker_ends_with_its_input_and_says_only_answers(course: Course) -> None:
    checks = course.root / "assignments" / ASSIGNMENT / "checks.py"
    checks.write_text(f"{checks.read_text()}\nprint('a check prints')\n")
    job = {"course": str(course.root), "assignment": ASSIGNMENT, "settings": asdict(Settings())}
    command = [sys.executable, "-P", "-m", "autograder.pool.worker"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = psutil.Popen(command, env=environment, **streams)
    process.stdin.write(f"{json.dumps(job)}\n")
    process.stdin.flush()
    lines = [process.stdout.readline() for _ in range(3)]
    assert lines[0] == "\n" and json.loads(lines[1]) == {"host": socket.gethostname()}
    assert Outcome(**json.loads(lines[2])).failed == ""
    below = process.children(recursive=True)
    assert "bwrap" in {child.name() for child in below}
    process.stdin.close()
    assert not psutil.wait_procs([process, *below], timeout=60)[1]
    assert process.stdout.read() == ""
    process.stdout.close()


# The pool, and nbgrader -------------------------------------------------------------------------


@pytest.mark.usefixtures("new_sandbox")
@pytest.mark.large
def test_plain_nbgrader_books_nothing_either(course, monkeypatch):
    api = NbGraderAPI(config=load_config(course.root))

    def run(*_: object) -> Any:
        raise RanksError("Rank 0 raised ImportError: there is no Python here")

    with monkeypatch.context() as patch:  # every case ends like a student's program that fails
        patch.setattr(Submission, "runner", lambda *_, **__: run)
        outcome = api.autograde(ASSIGNMENT, "right")
    assert not outcome["success"] and "a right solution got " in outcome["log"], outcome
    points = [value for task, value in booked(course.root)["right"].items() if task in TASKS]
    assert points == [None] * len(TASKS), "nbgrader has noted who handed in, and no points"
    assert api.autograde(ASSIGNMENT, "right")["success"]
    (sandbox,) = examine._warm.values()
    before = sandbox.passed
    sandbox.close()
    sandbox.warm()
    assert before is not None and sandbox.passed is None
    assert api.autograde(ASSIGNMENT, "sum")["success"]
    assert sandbox.passed is before, "a new sandbox is asked as well"
    assert booked(course.root)["right"]["average_gradients"] == TASKS["average_gradients"]


# The self-test -----------------------------------------------------------------------------------


@pytest.mark.large
@pytest.mark.parametrize("source", assignments(SOURCES), ids=lambda path: path.name)
def test_every_assignment_has_a_self_test(source: Path) -> None:
    self_test.SelfTest(source, ROOT / "assignments" / source.name, Settings()).run()
