"""`autograder leaderboard` on a class: the order, the findings, and continued runs."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest

from autograder.commands import leaderboard as command
from autograder.commands.demo import replace_tasks
from autograder.commands.leaderboard import ASSIGNMENT, BoardError, leaderboard
from autograder.leaderboard import timing
from autograder.leaderboard.entries import DISQUALIFIED, FAILED, TIMED, UNFINISHED
from course_lib.checking.local import load_module
from course_lib.checking.mutants import mutants_of
from course_lib.ranks import RankTimeout
from tests.course_lib.capstone.test_referee import burners
from tests.helpers import ROOT
from tests.helpers.course_folders import RELEASED, SOURCES, needs_sources

pytestmark = [pytest.mark.timeout(900), needs_sources]

# Three clever ones: overlap, our own in half the bytes, local steps; and one that nobody tuned.
HONEST = {
    "overlap": "means_of_the_round_before",
    "reference": None,
    "local": "local_steps",
    "flat": "one_flat_gradient_per_step",
    "naive": "parameter_by_parameter",
}
CHEATS = {
    "by numpy": "by_numpy",
    "in a thread": "in_another_thread",
    "from home": "weights_from_home",
    "no price": "an_operator_without_a_price",
    "a smaller model": "a_smaller_model",
}
SEES_MORE = '''
def train(job):
    """Look for what nobody should have: the rows that score, and those of other ranks."""
    import gc, glob, os
    found = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.dim() == 2]
    rows = {each.data_ptr(): each for each in found if each.shape[1] == 64 and len(each) > 256}
    rows = [each for each in rows.values() if not torch.equal(each, job.x)]
    files = glob.glob("/tmp/**", recursive=True) + glob.glob("/dev/shm/*")
    files = [each for each in files if os.path.isfile(each)]
    raise RuntimeError(f"found {len(rows)} tensors and {len(files)} files")
'''


def hand_in(folder: Path, name: str, mistake: str | None = None, source: str = "") -> None:
    """Write the submission of one student: our solution, or a mutant's in its place."""
    released = nbformat.read(RELEASED / ASSIGNMENT / f"{ASSIGNMENT}.ipynb", as_version=4)
    solution = nbformat.read(SOURCES / ASSIGNMENT / f"{ASSIGNMENT}.ipynb", as_version=4)
    mutants = mutants_of(load_module(SOURCES / ASSIGNMENT / "mutants.py"))
    chosen = [each for each in mutants if (each.task, each.mistake) == ("train", mistake)]
    assert mistake is None or chosen
    notebook = replace_tasks(released, solution, chosen)
    for cell in notebook.cells:
        if cell.metadata.get("nbgrader", {}).get("grade_id") == "write_train":
            head = "import copy, os, threading\nimport numpy as np\n"
            cell.source = head + (source or cell.source)
    (folder / name / ASSIGNMENT).mkdir(parents=True)
    nbformat.write(notebook, folder / name / ASSIGNMENT / f"{ASSIGNMENT}.ipynb")


def board(folder: Path, **options: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the entries by name, in order, and the printed lines."""
    said: list[str] = []
    entries = leaderboard(
        ROOT, submitted=folder / "submitted", to=folder / "board", say=said.append, **options
    )
    return {entry.name: entry for entry in entries}, said


def test_a_board_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = tmp_path / "submitted"
    with pytest.raises(BoardError, match="nobody has submitted"):
        board(tmp_path)
    hand_in(submitted, "<b>reference", "local_steps")
    hand_in(submitted, "a cheat", "by_numpy")
    (submitted / "nothing" / ASSIGNMENT).mkdir(parents=True)
    timed = command.time_submission

    def interrupted(name: str, *rest: Any) -> Any:
        if name == "a cheat":
            raise KeyboardInterrupt
        return timed(name, *rest)

    monkeypatch.setattr(command, "time_submission", interrupted)
    with pytest.raises(KeyboardInterrupt):
        board(tmp_path, plays=1)
    text = (tmp_path / "board" / "leaderboard.html").read_text()
    assert "&lt;b&gt;reference" in text and "a cheat" not in text  # what is known is shown
    monkeypatch.setattr(command, "time_submission", timed)
    entries, said = board(tmp_path, plays=1)
    assert [entry.status for entry in entries.values()] == [TIMED, DISQUALIFIED, FAILED]
    assert "(known)" in said[0] and "disqualified" in said[1] and "there is no" in said[2]
    assert "come from nowhere (Cell In[" in entries["a cheat"].note
    before = (tmp_path / "board" / "leaderboard.csv").read_bytes()
    seed = json.loads((tmp_path / "board" / "leaderboard.json").read_text())["seed"]
    assert seed not in (tmp_path / "board" / "leaderboard.html").read_text()
    _, said = board(tmp_path, plays=1)
    assert all("(known)" in line or "there is no" in line for line in said)
    assert (tmp_path / "board" / "leaderboard.csv").read_bytes() == before


@pytest.mark.large
def test_more_seconds_are_another_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hand_in(tmp_path / "submitted", "slow", source="def train(job):\n    time.sleep(10**6)\n")
    real, runs = command.time_submission, []

    def ran_out(name: str, sources: Any, meeting: Any, place: Any) -> Any:
        def late(*_: Any) -> Any:
            raise RankTimeout("Not all ranks ended.")

        runs.append(meeting.limits.case)
        with monkeypatch.context() as patched:
            patched.setattr(timing, "_tapes", late)
            entry = real(name, [], meeting, place)  # no cell need run for this
        return replace(entry, digest=timing.digest_of(sources, meeting))

    monkeypatch.setattr(command, "time_submission", ran_out)
    for seconds in (2.0, 2.0, 1.0, 3.0, 3.0):
        entries, _ = board(tmp_path, seconds=seconds)
        assert "more time with --seconds" in entries["slow"].note
    assert runs == [2.0, 3.0]


@pytest.mark.large
def test_a_class_is_ranked_as_expected_and_cheats_are_found(tmp_path: Path) -> None:
    submitted = tmp_path / "submitted"
    for name, mistake in {**HONEST, **CHEATS}.items():
        hand_in(submitted, name, mistake)
    hand_in(submitted, "another loss", "another_loss")
    hand_in(submitted, "sees more", source=SEES_MORE)
    entries, _ = board(tmp_path)
    timed = [name for name, entry in entries.items() if entry.status == TIMED]
    assert timed == list(HONEST)
    assert entries["naive"].seconds > 5 * entries["reference"].seconds
    for name in CHEATS:
        assert entries[name].status == DISQUALIFIED, entries[name]
    assert entries["another loss"].status == UNFINISHED
    assert "found 0 tensors and 0" in entries["sees more"].note, entries["sees more"]
    text = (tmp_path / "board" / "leaderboard.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert [row["place"] for row in rows[:5]] == ["1", "2", "3", "4", "5"]


@pytest.mark.large
def test_a_busy_machine_gives_the_same_board(tmp_path: Path) -> None:
    submitted = tmp_path / "submitted"
    for name, mistake in list(HONEST.items())[:3]:
        hand_in(submitted, name, mistake)
    board(tmp_path)
    idle = (tmp_path / "board" / "leaderboard.csv").read_bytes()
    known = json.loads((tmp_path / "board" / "leaderboard.json").read_text())
    known["entries"] = []
    (tmp_path / "board" / "leaderboard.json").write_text(json.dumps(known))
    with burners(6):
        board(tmp_path)
    assert (tmp_path / "board" / "leaderboard.csv").read_bytes() == idle


@pytest.mark.large
def test_the_final_is_on_a_network_that_nobody_knows(tmp_path: Path) -> None:
    hand_in(tmp_path / "submitted", "reference")
    race, _ = board(tmp_path, plays=1)
    final, _ = board(tmp_path, plays=1, final=True)
    assert final["reference"].status == TIMED
    assert final["reference"].seconds != race["reference"].seconds
    assert (tmp_path / "board" / "final.html").is_file()
    files = [path for path in (RELEASED / ASSIGNMENT).iterdir() if path.is_file()]
    handed_out = "".join(path.read_text() for path in files)
    assert "far apart" not in handed_out and "FINAL" not in handed_out
