"""Time one submission: its cells, its ranks and the referee's run, each in the sandbox."""

from __future__ import annotations

import hashlib
import json
import stat
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbgrader.utils import is_grade, is_solution

from autograder.examination.booth import tapes_played_in
from autograder.examination.budget import Limits
from autograder.examination.submission import Submission
from autograder.leaderboard.entries import DISQUALIFIED, FAILED, TIMED, UNFINISHED, Entry
from autograder.passes.vet import text_of
from autograder.sandbox.place import SandboxedPlace
from course_lib.capstone import Race, Score, TapeError, draw, referee
from course_lib.checking import Case, Check
from course_lib.checking.judges import form_of
from course_lib.learner.notebooks import EXPLORE
from course_lib.learner.what_counts import rebuild
from course_lib.ranks import RanksError, RankTimeout

_MAX_FILE = 50 * 2**20


@dataclass(frozen=True)
class Meeting:
    """The settings that all entries of a board share.

    Attributes:
        case: the race.
        check: the check whose program writes the tapes.
        released: the notebook as students got it.
        seed: the seed of the draws.
        plays: number of draws; an entry must reach the target on each.
        limits: limits of the wall-clock time of a submission's own code.

    """

    case: Case
    check: Check
    released: NotebookNode
    seed: str
    plays: int
    limits: Limits

    @property
    def race(self) -> Race:
        """The problem and the network."""
        return Race.of(self.case.parameters)


class Unreadable(Exception):
    """The submitted file is no notebook; the message says why."""


def sources_of(path: Path, released: NotebookNode) -> list[tuple[int, str]]:
    """Return the code cells of a submitted notebook that are run, with their numbers.

    Raises:
        Unreadable: the file is no notebook.

    """
    try:
        if not stat.S_ISREG(path.lstat().st_mode) or path.stat().st_size > _MAX_FILE:
            raise Unreadable(f"{path.name} must be a file of at most {_MAX_FILE >> 20} MB")
        theirs = json.loads(text_of(path.read_bytes()))
    except FileNotFoundError:
        raise Unreadable(f"there is no {path.name}") from None
    except (OSError, ValueError, RecursionError):
        raise Unreadable(f"{path.name} is not a notebook") from None
    if not isinstance(theirs, dict):
        raise Unreadable(f"{path.name} is not a notebook")
    notebook = NotebookNode(cells=[_as_read(cell) for cell in _list(theirs.get("cells"))])
    cells = [each for each in rebuild(released, notebook).cells if each.cell_type == "code"]
    return [
        (number, cell.source)
        for number, cell in enumerate(cells, 1)
        if not (is_grade(cell) and not is_solution(cell))
        and EXPLORE not in cell.metadata.get("tags", ())
    ]


def _as_read(cell: Any) -> Any:
    """Return a cell with its source in one piece, as nbformat gives it."""
    if isinstance(cell, dict) and isinstance(cell.get("source"), list):
        return {**cell, "source": "".join(map(str, cell["source"]))}
    return cell


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def digest_of(sources: list[tuple[int, str]], meeting: Meeting) -> str:
    """Return a digest that changes whenever the entry could change."""
    told = [sources, asdict(meeting.race), meeting.seed, meeting.plays]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def time_submission(
    name: str, sources: list[tuple[int, str]], meeting: Meeting, place: SandboxedPlace
) -> Entry:
    """Return the entry of one submission. Its code can damage only this entry."""
    digest = digest_of(sources, meeting)
    entry = Entry(name, digest, FAILED)
    with Submission(place, meeting.limits) as submission:
        errors = [submission.run_cell(source, number).error for number, source in sources]
        trouble = next((f" (a cell failed: {error})" for error in errors if error), "")
        try:
            tapes = _tapes(submission, meeting)
        except RankTimeout as error:
            told = f"{error.summary} (the instructor can give more time with --seconds)"
            return replace(entry, note=told, ran_out=meeting.limits.case)
        except RanksError as error:
            cheats = "TapeError" in error.summary
            return replace(
                entry,
                status=DISQUALIFIED if cheats else FAILED,
                note=_line(error.summary + trouble),
            )
    seeds = [f"{meeting.seed} scored {number}" for number in range(meeting.plays)]
    try:
        with tapes_played_in(place):
            score, _ = referee(meeting.race, tapes, seeds)
    except TapeError as error:
        return replace(entry, status=DISQUALIFIED, note=_line(str(error)))
    return _judged(entry, score, meeting.race)


def _tapes(submission: Submission, meeting: Meeting) -> list[Any]:
    own = draw(meeting.race, f"{meeting.seed} written").inputs(race=dict(meeting.case.parameters))
    inputs: list[Any] = [{"form": form_of(meeting.case), "own": each} for each in own]
    observed: Any = submission.runner()(meeting.check, meeting.case, inputs)
    tapes = []
    for rank, output in enumerate(observed.outputs):
        match output:
            case {"value": {"tape": tape}}:
                tapes.append(tape)
            case _:
                raise RanksError(f"Rank {rank} returned no tape, so this entry has no time.")
    return tapes


def _judged(entry: Entry, score: Score, race: Race) -> Entry:
    entry = replace(
        entry,
        status=TIMED,
        seconds=score.seconds,
        loss=score.worst,
        sent=max(score.sent),
        gradients=score.gradients,
        computed=score.computed,
        light=score.light,
    )
    if not score.equal:
        return replace(entry, status=UNFINISHED, note="the ranks end with different weights")
    if score.worst > race.target:
        told = f"a loss of {score.worst:.3f} misses the target of {race.target:g}"
        return replace(entry, status=UNFINISHED, note=told)
    return entry


def _line(text: str) -> str:
    return " ".join(text.split())[:300]


def read_released(path: Path) -> NotebookNode:
    """Return the released notebook."""
    notebook: NotebookNode = nbformat.read(path, as_version=4)
    return notebook
