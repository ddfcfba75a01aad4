"""The zip for Gradescope grades as `autograder grade` does, by the documented contract."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import nbformat
import pytest

from autograder.__main__ import main
from autograder.commands import _gradescope_run as one
from autograder.commands.demo import ASSIGNMENT
from autograder.pool import phases
from autograder.pool.outcome import MACHINE, Outcome
from autograder.sandbox.unavailable import SandboxUnavailable
from tests.helpers.course_folders import LEFTOVERS, ROOT, SOURCES, needs_sources
from tests.helpers.whole_class import FILE, TASKS, Course, booked, course_of, small_class

pytestmark = [needs_sources, pytest.mark.filterwarnings("ignore")]

HIDDEN_CASE = "every length up to 40"
WHEN = {"hidden", "after_due_date", "after_published", "visible"}
FORMATS = {"text", "html", "simple_format", "md", "ansi"}
# https://gradescope-autograders.readthedocs.io/en/latest/specs/, read in November 2026
OF_ALL: dict[str, Any] = {
    "score": (int, float),
    "execution_time": (int, float),
    "output": str,
    "output_format": FORMATS,
    "test_output_format": FORMATS,
    "test_name_format": FORMATS,
    "visibility": WHEN,
    "stdout_visibility": WHEN,
    "extra_data": dict,
    "tests": list,
    "leaderboard": list,
}
OF_A_TEST: dict[str, Any] = {
    "score": (int, float),
    "max_score": (int, float),
    "status": {"passed", "failed"},
    "name": str,
    "name_format": FORMATS,
    "number": str,
    "output": str,
    "output_format": FORMATS,
    "tags": list,
    "visibility": WHEN,
    "extra_data": dict,
}


def against_contract(found: Any, contract: dict[str, Any] = OF_ALL) -> list[str]:
    """Return what the documented form does not allow."""
    wrong = [f"unknown: {name}" for name in set(found) - set(contract)]
    for name in set(found) & set(contract):
        value, form = found[name], contract[name]
        fits = value in form if isinstance(form, set) else isinstance(value, form)
        wrong += [] if fits and not isinstance(value, bool) else [f"{name}: {value!r}"]
    if contract is OF_ALL:
        tests = found.get("tests", [])
        wrong += [each for test in tests for each in against_contract(test, OF_A_TEST)]
        if "score" not in found and not any("score" in test for test in tests):
            wrong.append("no score, neither for all nor in a test")
    return wrong


def points(document: dict[str, Any]) -> dict[str, float]:
    return {t["name"].partition(":")[0]: t["score"] for t in document["tests"] if "score" in t}


def shown_at_once(document: dict[str, Any]) -> str:
    """Return all that a student reads before points are published."""
    tests = [test for test in document["tests"] if test["visibility"] == "visible"]
    return json.dumps([document["output"], tests], ensure_ascii=False)


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course with one assignment; its package and pages are the checkout's."""
    root = course_of(tmp_path_factory.mktemp("gradescope") / "course", less=True)
    names = ("pyproject.toml", "Makefile", "README.md", "hatch_build.py", "LICENSE")
    for name in (*names, "LICENSE-notebooks", "course_lib", "autograder", "lectures", "docs"):
        (root / name).symlink_to(ROOT / name)
    (root / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks" / "README.md", root / "benchmarks")
    shutil.copytree(SOURCES / "03_collectives", root / "instructor/03", ignore=LEFTOVERS)
    return root


@pytest.fixture(scope="module")
def packed(course: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        command = ["autograder", "gradescope", ASSIGNMENT, "--minutes", "20"]
        patch.setattr(sys, "argv", [*command, "--course", str(course)])
        assert main() == 0
    return course / "grading" / f"{ASSIGNMENT}_gradescope.zip"


@pytest.fixture
def home(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that Gradescope makes of the zip, with this Python instead of setup.sh's."""
    subprocess.run(["unzip", "-q", packed, "-d", tmp_path / "source"], check=True)
    (tmp_path / "submission").mkdir()
    (tmp_path / "source/course/.venv").symlink_to(sys.prefix)
    monkeypatch.setenv("AUTOGRADER", str(tmp_path))
    return tmp_path


def submit(home: Path, *names: str) -> None:
    for name in names:
        shutil.copy(
            home / "source/course/assignments" / ASSIGNMENT / FILE, home / "submission" / name
        )


def graded(home: Path) -> dict[str, Any]:
    document = json.loads((home / "results/results.json").read_text(encoding="utf-8"))
    assert not against_contract(document)
    return dict(document)


def in_this_process(home: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["run_autograder", ASSIGNMENT])
    return one.main()


def test_the_zip_has_scripts_at_its_root_and_one_assignment(packed: Path, home: Path) -> None:
    with zipfile.ZipFile(packed) as archive:
        modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
    assert len(modes) == len(set(modes))
    for script in ("setup.sh", "run_autograder"):
        assert modes[script] & 0o111 == 0o111
        subprocess.run(["bash", "-n", home / "source" / script], check=True)
    inside = home / "source/course"
    assert [path.name for path in (inside / "instructor").iterdir()] == [ASSIGNMENT]
    assert [path.name for path in (inside / "assignments").iterdir()] == [ASSIGNMENT]
    assert (inside / "instructor" / ASSIGNMENT / "hidden.py").is_file()
    assert (inside / "grading/seeds" / ASSIGNMENT).is_file(), "inputs are drawn as at home"
    assert "timeout --kill-after=20 1140 " in (home / "source/run_autograder").read_text()
    assert not any(part in name for name in modes for part in ("__pycache__", "/tests/", ".db"))


def test_another_name_is_refused(
    course: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["autograder", "gradescope", "2", "--course", str(course)])
    assert main() == 2
    assert f"assignments are: {ASSIGNMENT}" in capsys.readouterr().err


@pytest.mark.parametrize("names", [(), ("notes.txt",), ("other.ipynb", "another.ipynb")])
def test_no_notebook_is_a_zero_with_a_sentence(
    home: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    submit(home, *names)
    assert in_this_process(home, monkeypatch) == 0
    document = graded(home)
    assert points(document) == dict.fromkeys(TASKS, 0.0)
    assert f"There is no {FILE}." in document["output"]
    assert all(name in document["output"] for name in names)


def outcomes(home: Path, **told: Any) -> Any:
    """Return a stand-in for the pool."""

    def grade_class(root: Path, assignment: str, only: list[str], *_: Any, **__: Any) -> Any:
        path = root / "grading/submitted" / only[0] / assignment / FILE
        assert path.is_file()
        return [Outcome(str(path), **told)]

    return grade_class


def test_a_failure_of_the_machine_leaves_no_result(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    submit(home, FILE)
    failed = outcomes(home, failed="the disk is full", fault=MACHINE)
    monkeypatch.setattr(phases, "grade_class", failed)
    assert in_this_process(home, monkeypatch) == 1
    assert not (home / "results/results.json").exists()
    assert "the disk is full" in capsys.readouterr().out


def test_without_a_sandbox_there_is_a_sentence_and_no_result(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise SandboxUnavailable("No permissions to create a new namespace")

    submit(home, FILE)
    monkeypatch.setattr(phases, "grade_class", refused)
    assert in_this_process(home, monkeypatch) == 1
    assert not (home / "results/results.json").exists()
    said = capsys.readouterr().out
    assert "No permissions to create a new namespace" in said
    assert "Nobody gets a zero" in said


@pytest.mark.large
@pytest.mark.timeout(2400)
def test_it_grades_as_at_home(course: Path, home: Path) -> None:
    members = small_class(course)
    chosen = {name: members[name] for name in ("right", "overlap", "empty-file")}
    for name, member in chosen.items():
        folder = course / "grading/submitted" / name / ASSIGNMENT
        folder.mkdir(parents=True)
        member.write(folder)
    at_home = Course(course, chosen).start("grade", ASSIGNMENT, "--jobs", "1")
    said, _ = at_home.communicate()
    assert at_home.returncode == 0, said
    environment = {**os.environ, "PYTHONPATH": str(home / "source/course")}
    for number, (name, member) in enumerate(chosen.items()):
        shutil.rmtree(home / "submission")
        (home / "submission").mkdir()
        member.write(home / "submission")
        (home / "submission/helper.py").write_text("x = 1")
        metadata = {"id": number, "users": [{"id": 100 + number, "email": "x", "name": name}]}
        (home / "submission_metadata.json").write_text(json.dumps(metadata))
        ran = subprocess.run(
            ["bash", home / "source/run_autograder"],
            env=environment,
            cwd=home,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        document = graded(home)
        theirs = {task: booked(course)[name][task] for task in TASKS}
        assert points(document) == theirs
        assert theirs == {t: p * (t in member.full) for t, p in TASKS.items()}
        assert "explain_weights (3 points)" in document["output"]
        assert f"Only {FILE} is graded, not helper.py." in document["output"]
        assert HIDDEN_CASE not in json.dumps(document)
        assert not re.search(r"hidden case \d", shown_at_once(document))
        if name == "overlap":
            (told,) = (t for t in document["tests"] if t["name"] == "shard_bounds: points")
            nb = nbformat.read(course / "grading/autograded" / name / ASSIGNMENT / FILE, 4)
            cells = {c.metadata.get("nbgrader", {}).get("grade_id"): c for c in nb.cells}
            assert told["output"] == cells["shard_bounds"].outputs[0].text, (
                "the words that the feedback has"
            )
            assert HIDDEN_CASE in ran.stdout, "instructors read all of it"
