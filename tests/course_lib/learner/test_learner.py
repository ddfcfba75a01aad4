"""The commands that a learner types, and their results."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from nbformat import v4

from course_lib.learner import CannotGoOn, _course
from course_lib.learner import check as check_command
from course_lib.learner.__main__ import main
from course_lib.learner._run_cells import run_steps
from tests.course_lib.learner.conftest import NAME, RIGHT, assignment
from tests.helpers import ROOT
from tests.helpers.course_folders import needs_sources
from tests.helpers.desk_files import write
from tests.helpers.kernels import kernel, wait_until_gone

WRONG = "def rank():\n    return 7"
NEVER = "while True:\n    try:\n        time.sleep(60)\n    except KeyboardInterrupt:\n        pass"
AS_CHECK_DOES = """
import sys
from pathlib import Path
from nbformat import v4
from course_lib.learner import __main__ as program, check
from course_lib.learner._run_cells import run_steps
steps = [(1, v4.new_code_cell(sys.argv[1]))]
check.add_options = lambda parser: None
check.run = lambda arguments: run_steps(steps, Path(sys.argv[2]))
sys.exit(program.main(["check"]))
"""
SLEEPS = """
import os, pathlib, time
from course_lib.ranks import Ranks
def sleep():
    pathlib.Path(folder, str(os.getpid())).touch()
    time.sleep(60)
folder = os.getcwd()
pathlib.Path(folder, str(os.getpid())).touch()
Ranks(2, on="cpu").run(sleep)
"""


def test_start_hands_out_and_never_overwrites(mine, capsys) -> None:
    assert main(["start", "2"]) == 0
    assert f"Handed out: {mine}" in capsys.readouterr().out
    write(mine, assignment(WRONG))
    assert main(["start", "topic"]) == 0
    assert "your copy stays as it is" in capsys.readouterr().out
    assert WRONG in [cell["source"] for cell in _course.read(mine).cells]


@pytest.mark.parametrize("said", ["9", "nothing", "", "02_topik"])
@pytest.mark.parametrize("command", ["start", "check", "solution"])
def test_an_unknown_assignment_is_told_with_those_there_are(course, command, said, capsys):
    assert main([command, said]) == 2
    error = capsys.readouterr().err
    assert NAME in error and len(error.splitlines()) == 1
    assert ("Did you mean" in error) == (said == "02_topik")


def test_a_mistyped_command_or_task_is_told_with_the_one_that_is_like_it(course, capsys):
    main(["start", NAME])
    for words in (["chek", NAME], ["solution", NAME, "rnk"]):
        with contextlib.suppress(SystemExit):
            main(words)
        right = "check" if words[0] == "chek" else "rank"
        assert f"Did you mean {right}?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["check"])
    assert capsys.readouterr().err.endswith("arguments are required: ASSIGNMENT\n")


def test_assignments_are_found_by_number_topic_and_file() -> None:
    for said in ("03_collectives", "3", "03", "collectives", "work/03_collectives.ipynb", "colle"):
        assert _course.find(ROOT, said) == "03_collectives"
    with pytest.raises(CannotGoOn, match="01_minibatch_sgd, 02_data_parallel_sgd"):
        _course.find(ROOT, "sgd")


def outcome(capfd) -> str:
    """Return the line of the task in the table of points."""
    return next(line for line in capfd.readouterr().out.splitlines() if line.startswith("  rank "))


def test_check_counts_the_points_and_notes_them(course, mine, capfd, monkeypatch):
    """Also those after a cell that lasts too long, and cannot be interrupted."""
    monkeypatch.setattr("course_lib.learner._run_cells.CELLS_SECONDS", 1.0)
    main(["start", NAME])
    write(mine, assignment(RIGHT, "import time", NEVER))
    assert main(["check", NAME]) == 0
    said = capfd.readouterr().out
    assert "  rank     3 of 3" in said
    assert "  Note: cell 4 could not be interrupted, so it was left out.\n" in said
    assert said.count("Note: ") == 1
    write(mine, assignment(f"import time\n{NEVER}\n{RIGHT}"))
    assert main(["check", NAME]) == 1
    assert "there is no rank, because cell 2 could not be interrupted" in outcome(capfd)
    write(mine, assignment(RIGHT.replace("get_rank()", "get_rank() + no_such_name")))
    assert main(["check", NAME]) == 1
    assert "0 of 3   Rank 0 raised NameError" in outcome(capfd).replace("Ranks 0, 1", "Rank 0")
    assert main(["progress"]) == 0
    assert "0/3" in capfd.readouterr().out


def test_what_the_grader_judges_is_open(course, mine, capfd) -> None:
    file = course / f"assignments/{NAME}/checks.py"
    only = (
        "from dataclasses import replace\nCHECKS['rank'] = replace(CHECKS['rank'], only_form=True)"
    )
    file.write_text(f"{file.read_text()}\n{only}\n")
    main(["start", NAME])
    write(mine, assignment(RIGHT))
    assert main(["check", NAME]) == 0
    told = capfd.readouterr().out
    assert "  rank     – of 3   form ✓; the grader judges the numbers" in told
    assert re.search("from checks +0 of 0", told)
    assert main(["progress"]) == 0
    assert "3" not in capfd.readouterr().out.partition("together")[2].splitlines()[0]


def test_check_says_why_it_cannot_count(course, mine, capsys) -> None:
    assert main(["check", NAME]) == 2
    assert f"course start {NAME}" in capsys.readouterr().err
    main(["start", NAME])
    mine.write_text("<<<<<<< HEAD")
    assert main(["check", NAME]) == 2
    assert "is not a valid notebook any more" in capsys.readouterr().err
    write(mine, assignment("import os\nos._exit(5)"))
    assert main(["check", NAME]) == 2
    assert "ended with status 5" in capsys.readouterr().err


def test_a_missing_name_is_explained_by_the_cell_that_failed_first(tmp_path, capfd) -> None:
    sources = ["def rank(:\n    pass", "helper = 1 / 0", "mean = helper", "'shown'"]
    steps = list(enumerate(map(v4.new_code_cell, sources), 2))
    for name in ("rank", "mean"):
        marks = {"nbgrader": {"grade": True, "grade_id": name}}
        steps.append((6, v4.new_code_cell(name, metadata=marks)))
    checks, notes = run_steps(steps, tmp_path)
    assert checks["rank"]["reason"].startswith(
        "there is no rank, because cell 2 failed: SyntaxError"
    )
    assert checks["mean"]["reason"].startswith(
        "there is no mean, because cell 4 failed: there is no helper, because cell 3 failed: Zero"
    )
    assert [note.partition(" failed: ")[0] for note in notes] == ["cell 2", "cell 3", "cell 4"]
    assert "\n'shown'\n" in capfd.readouterr().out


def test_check_watches_a_copy_until_it_is_interrupted(mine, capsys, monkeypatch):
    main(["start", NAME])
    checked, looks = [], iter(range(4))

    def check(course, name: str, notebook):
        checked.append(notebook.stat().st_mtime_ns)
        if len(checked) == 1:
            raise CannotGoOn("the process that ran your cells ended")
        return {"rank": {"fraction": 1.0, "reason": ""}}, []

    def look(seconds: float) -> None:
        """Nothing happens; then the file is replaced, and gone for a moment; then Ctrl-C."""
        match next(looks):
            case 1:
                mine.rename(mine.with_suffix(".old"))
            case 2:
                mine.with_suffix(".old").rename(mine)
                os.utime(mine, (1, 1))
            case 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(check_command, "check_notebook", check)
    monkeypatch.setattr(check_command.time, "sleep", look)
    assert main(["check", NAME, "--watch"]) == 130
    output = capsys.readouterr()
    assert len(checked) == 2 and checked[1] == 10**9
    assert "the process that ran your cells ended" in output.err
    assert output.out.count("to check it again, or end this with Ctrl-C") == 2


@pytest.mark.parametrize(
    "how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.large)]
)
def test_check_ends_with_all_it_started(tmp_path, how: signal.Signals) -> None:
    """Interrupted at the terminal, or killed: the process of its cells and its ranks end too."""
    process = subprocess.Popen(
        [sys.executable, "-c", AS_CHECK_DOES, SLEEPS, tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 300
    while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < deadline:
        assert process.poll() is None, process.stdout and process.stdout.read()
        time.sleep(0.05)
    pids = [int(file.name) for file in tmp_path.iterdir()]
    process.send_signal(how)
    printed = process.communicate(timeout=300)[0]
    assert len(pids) == 3 and wait_until_gone(pids) == []
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert printed.endswith("\ncourse: interrupted; no process is left running\n"), printed
        assert "Traceback" not in printed


def test_progress_counts_points_and_predictions(course, capsys) -> None:
    assert main(["progress"]) == 0
    assert "Nothing is recorded yet" in capsys.readouterr().out
    notes = course / "work" / ".desk"
    notes.mkdir(parents=True)

    def note(file: str, **entry: object) -> None:
        with (notes / file).open("a") as lines:
            lines.write(json.dumps(entry) + "\n")

    note("checks.jsonl", checked=f"{NAME}/rank", fraction=1.0, all=True)
    note("checks.jsonl", checked=f"{NAME}/rank", fraction=1 / 3, all=False)  # broken since
    note("checks.jsonl", checked=f"{NAME}/rank", fraction=1.0, folder="lectures")  # no points
    note("checks.jsonl", checked="gone/task", fraction=1.0, all=True)
    for right in (True, False):
        note("predictions.jsonl", notebook=NAME, scored=f"q {right}", right=right)
        note("predictions.jsonl", notebook=NAME, scored="q True", right=False)  # the first counts
    note("predictions.jsonl", notebook="00_start", scored="later", right=True, of=3)
    with (notes / "checks.jsonl").open("a") as lines:
        lines.write("[1]\n{ cut")
    assert main(["progress"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:5]] == [
        ["00_start", "1", "of", "1"],
        [NAME, "1/3", "1", "of", "2"],
        ["gone"],
        ["together", "1/3", "2", "of", "3"],
    ]


def test_solution_is_shown_after_a_question(course, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("what?\nYES\n"))
    assert main(["solution", NAME]) == 1
    told = capsys.readouterr().out
    assert "can no longer find it yourself" in told and "get_rank" not in told
    assert main(["solution", NAME]) == 0
    told = capsys.readouterr().out
    assert RIGHT in told and "Because." in told and "SOLUTION" not in told
    assert main(["solution", NAME]) == 1, "nobody can answer"
    assert main(["solution", NAME, "why", "--yes"]) == 0
    assert "get_rank" not in capsys.readouterr().out


@needs_sources
def test_a_reader_who_has_read_enough_ends_a_command_without_a_word() -> None:
    command = f"{sys.executable} -m course_lib.learner solution 5 --yes | true"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert not done.stderr


@needs_sources
def test_a_cell_that_asks_for_a_solution_is_told_how_and_does_not_wait() -> None:
    with kernel() as notebook:
        told = notebook.run(f"!{sys.executable} -m course_lib.learner solution 2 shard_bounds")
    assert "add --yes to the command" in told.text and "Not shown." in told.text


def test_a_missing_package_or_a_read_only_place_is_one_sentence(course, capsys, monkeypatch):
    (course / "work").touch()
    assert main(["start", NAME]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Not a directory" in line and "another folder" in line and "--desk" in line
    monkeypatch.delitem(sys.modules, "course_lib.learner.start")
    monkeypatch.delattr("course_lib.learner.start")
    monkeypatch.setitem(sys.modules, "nbformat", None)
    monkeypatch.delitem(sys.modules, "course_lib.learner.notebooks")
    monkeypatch.delitem(sys.modules, "course_lib.learner._desk")
    assert main(["start", NAME]) == 2
    assert "course doctor" in capsys.readouterr().err


def test_what_is_advised_finds_the_same_desk(course, tmp_path, capsys) -> None:
    desk = tmp_path / "my desk"
    assert main(["check", NAME, "--desk", str(desk)]) == 2
    assert f"course start {NAME} --desk '{desk}'" in capsys.readouterr().err
    assert main(["start", NAME, "--desk", str(desk)]) == 0
    assert f"course check {NAME} --desk '{desk}'" in capsys.readouterr().out


@pytest.mark.large
@pytest.mark.parametrize(
    ("cells", "notes"),
    [
        (["import threading, time\nthreading.Thread(target=time.sleep, args=[600]).start()"], []),
        (["import os, time\nif os.fork() == 0:\n    time.sleep(600)"], []),
        (
            ["import time; time.sleep(60)", "time.sleep(60)", "time.sleep(0.1)", "time.sleep(60)"],
            ["cell 3 was interrupted", "cell 4 was interrupted", "cell 6 was interrupted"],
        ),
    ],
    ids=["a thread", "a fork", "all together"],
)
def test_a_cell_that_lasts_too_long_costs_no_points(mine, capfd, monkeypatch, cells, notes):
    monkeypatch.setattr("course_lib.learner._run_cells.CELLS_SECONDS", 3.0)
    main(["start", NAME])
    write(mine, assignment(RIGHT, *cells))
    assert main(["check", NAME]) == 0
    said = capfd.readouterr().out
    assert "3 of 3" in said
    assert [note in said for note in notes] == [True] * len(notes)
    assert said.count("Note: ") == len(notes)


def test_solutions_share_their_time_too(mine, capfd, monkeypatch):
    monkeypatch.setattr("course_lib.learner._run_cells.CELLS_SECONDS", 1.0)
    main(["start", NAME])
    write(mine, assignment(f"import time\ntime.sleep(60)\n{RIGHT}"))
    assert main(["check", NAME]) == 1
    said = capfd.readouterr().out
    assert "all solutions together have 1 s" in said and "0 of 3" in said
