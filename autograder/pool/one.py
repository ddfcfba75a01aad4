"""Grade submissions one after the other, without a gradebook: paths in, verdicts and JSON out.

    python -m autograder.pool.one --course . grading/submitted/ada/02_data_parallel_sgd/*.ipynb

The pool of this machine, a Slurm job or a loop in a shell can call this program. For each
submission it writes two files, named by the graded content: first the graded notebook, then the
verdict. If both exist already, it runs nothing. So a killed command may simply be started again.

The files get these names only after a test has shown that this machine grades correctly. Canaries
are solutions whose points are known. The same sandbox grades them before and after the submissions
(`Bench`). Until then the files are drafts. Nothing reads drafts, and the next command removes them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import nbformat

from autograder.course import Folders, find_course, load_config
from autograder.examination.check import AuthorError
from autograder.examination.verdict import Verdict
from autograder.passes.canary import Canaries, CanaryError
from autograder.passes.examine import Exam, blank_verdict, examine_notebook
from autograder.passes.rebuild import released_notebook
from autograder.passes.vet import vet
from autograder.pool.outcome import AUTHOR, MACHINE, Outcome
from autograder.sandbox.place import MachineFailure
from autograder.sandbox.unavailable import SandboxUnavailable
from autograder.settings import Settings
from course_lib.learner.what_counts import pictures_in, rebuild

_LOG = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1


def rebuilt(folders: Folders, path: Path) -> nbformat.NotebookNode:
    """Return the released notebook with the sources of the submitted notebook at `path`.

    Raises:
        FileNotFoundError: the assignment was not released.

    """
    released = released_notebook(folders.release / path.parent.name, path.stem)
    return rebuild(released, nbformat.read(path, as_version=4), pictures_in(path.parent))


def blank(folders: Folders, path: Path, nb: nbformat.NotebookNode, settings: Settings) -> Verdict:
    """Return the verdict on the notebook rebuilt from `path`, before anything is run."""
    assignment, student = path.parent.name, path.parents[1].name
    return blank_verdict(
        *(nb, folders.source / assignment, folders.release / assignment / path.name, folders.data),
        *(assignment, student, path.stem, settings),
    )


SHARE = 20
"""Canaries are graded again after submissions have taken this many times as long as the canaries.
So canaries cost a twentieth of the time, and little work is lost if the process is killed."""


@dataclass(frozen=True)
class Draft:
    """A graded submission that does not count yet.

    Attributes:
        path: the submitted notebook.
        verdict: the verdict on it.
        target: the verdict's final path; the graded notebook is in the same folder.

    """

    path: Path
    verdict: Verdict
    target: Path

    @property
    def _files(self) -> list[tuple[Path, Path]]:
        """The drafts with their final names. With the second name, the submission is graded."""
        names = (self.target.with_suffix(".ipynb"), self.target)
        return [(name.with_name(f"{name.name}.{os.getpid()}.part"), name) for name in names]

    def write(self, nb: nbformat.NotebookNode) -> None:
        """Write both files under the names of drafts, which nothing reads."""
        (notebook, _), (verdict, _) = self._files
        nbformat.write(nb, notebook)
        self.verdict.write(verdict)

    def keep(self) -> Outcome:
        """Make the draft count: give its files their final names."""
        for draft, name in self._files:
            draft.replace(name)
        return _graded(self.path, self.verdict, self.target)

    def drop(self, why: str) -> Outcome:
        """Remove the draft because the machine failed."""
        for draft, _ in self._files:
            draft.unlink(missing_ok=True)
        return Outcome(str(self.path), failed=why, fault=MACHINE)


class Bench:
    """Grades one submission after the other; a verdict counts after canaries have confirmed it.

    Canaries are graded before the first submission, before the first submission in each new
    sandbox, as often as `SHARE` allows, after any failure of the machine, and at the end. If they
    get the right points in the same sandbox as the last time, all verdicts in between count.
    Otherwise none of these verdicts counts.

    Args:
        folders: the course's folders.
        settings: how submissions are examined.
        tell: called with the outcome of each submission, and with None whenever a part of the work
            starts that has its own time limit.

    Attributes:
        distrust: why this process may grade nothing more; empty if it may grade.

    """

    def __init__(
        self, folders: Folders, settings: Settings, tell: Callable[[Outcome | None], None]
    ) -> None:
        self._folders, self._settings, self._tell = folders, settings, tell
        self._assignment = ""
        self._canaries: Canaries | None = None
        self._drafts: list[Draft] = []
        self._seconds = 0.0
        self.distrust = ""

    def grade(self, path: Path, again: bool, alone: bool = False) -> None:
        """Grade one submitted notebook, and report any failure as its outcome.

        Args:
            path: the notebook: STUDENT/ASSIGNMENT/NOTEBOOK.ipynb.
            again: examine it even if there is a verdict on the same content.
            alone: grade canaries directly before and after it, because the machine failed before.

        """
        try:
            if alone or path.parent.name != self._assignment:
                self.confirm()
            self._grade(path, again, alone)
        except (AuthorError, LookupError) as error:
            told = _words(error, error.__cause__)
            self._tell(Outcome(str(path), failed=told, fault=AUTHOR))
        except Exception as error:
            self._tell(Outcome(str(path), failed=_told(error), fault=MACHINE))
            if self._drafts:
                self.confirm()
            elif self._canaries is not None:
                self._canaries.sandbox = None  # next time, grade the canaries first

    def _grade(self, path: Path, again: bool, alone: bool) -> None:
        """Grade one submitted notebook.

        Raises:
            CanaryError: the canaries got wrong points.
            MachineFailure: the machine failed, not the submission.
            SandboxUnavailable: there is no sandbox.
            OSError: the machine failed: a disk, for example.
            AuthorError: a check is broken.
            LookupError: a test cell has no check.

        """
        assignment, student = path.parent.name, path.parents[1].name
        source = self._folders.source / assignment
        vet(assignment, student, [str(path)])
        nb = rebuilt(self._folders, path)
        verdict = blank(self._folders, path, nb, self._settings)
        target = self._folders.graded(assignment, student) / f"{verdict.key}.json"
        if not again and target.is_file() and target.with_suffix(".ipynb").is_file():
            # A verdict that a disk or an editor damaged counts as missing.
            with contextlib.suppress(ValueError):
                old = Verdict.read(target)
                self._tell(_graded(path, old, target, unchanged=True))
                return
        target.parent.mkdir(parents=True, exist_ok=True)  # first, to fail before anything runs
        canaries = self._canaries_of(assignment)
        if not canaries.trusted():
            self.confirm()  # decide on the drafts that an earlier sandbox graded
            if not canaries.trusted():
                self._check_canaries()
        self._tell(None)
        examine_notebook(nb, Exam.of(source), verdict, _LOG)
        if not canaries.trusted():
            raise MachineFailure("The sandbox ended unexpectedly while this submission was graded")
        draft = Draft(path, verdict, target)
        draft.write(nb)
        self._drafts.append(draft)
        self._seconds += verdict.seconds
        if alone or self._seconds > SHARE * canaries.seconds:
            self.confirm()

    def _canaries_of(self, assignment: str) -> Canaries:
        if self._canaries is None or assignment != self._assignment:
            folders = self._folders
            self._canaries = Canaries(
                folders.source / assignment, folders.release / assignment, self._settings
            )
            self._assignment = assignment
        return self._canaries

    def _check_canaries(self) -> None:
        """Grade the canaries. If they fail for any reason, this process grades no more."""
        assert self._canaries is not None
        self._tell(None)
        try:
            if self.distrust:
                raise CanaryError(self.distrust)
            self._canaries.check()
        except (AuthorError, LookupError):
            raise
        except Exception as error:
            self.distrust = _told(error)
            raise

    def confirm(self) -> None:
        """Grade the canaries; by the result, keep or drop all drafts since the last canaries."""
        drafts, self._drafts, self._seconds, why = self._drafts, [], 0.0, ""
        if not drafts:
            return
        assert self._canaries is not None
        before = self._canaries.sandbox
        try:
            self._check_canaries()
        except Exception as error:
            why = _told(error)
        else:
            if self._canaries.sandbox != before:
                why = "the sandbox ended before a test could show that it grades correctly"
        for draft in drafts:
            try:
                self._tell(draft.drop(why) if why else draft.keep())
            except OSError as error:
                self._tell(Outcome(str(draft.path), failed=_told(error), fault=MACHINE))


def _graded(path: Path, verdict: Verdict, target: Path, unchanged: bool = False) -> Outcome:
    return Outcome(
        *(str(path), str(target), verdict.score, verdict.max_score),
        *(verdict.seconds, unchanged),
        notes=verdict.notes,
    )


_OF_THE_MACHINE = (MachineFailure, SandboxUnavailable, OSError, MemoryError)


def _told(error: Exception) -> str:
    """Return the message of an expected failure, or everything known about an unexpected one."""
    if isinstance(error, _OF_THE_MACHINE):
        return _words(error)
    return "".join(traceback.format_exception(error))[-2000:].strip()


def _words(*errors: BaseException | None) -> str:
    return ": ".join(str(error) or type(error).__name__ for error in errors if error)[-2000:]


# As a program -----------------------------------------------------------------------------------


def serve(
    folders: Folders, settings: Settings, requests: Iterable[str], answers: TextIO, ask: bool
) -> bool:
    """Grade the submission in each line of JSON, until this process is no longer trusted.

    Each answer is an `Outcome` as a line of JSON. Several answers may come at once, after the
    canaries have confirmed them.

    Args:
        folders: the course's folders.
        settings: how submissions are examined.
        requests: the lines.
        answers: the stream to which the answers are written.
        ask: also write ``{}`` whenever a part of the work starts that has its own time limit, and
            ``{"next": true}`` when this process is ready for the next line.

    Returns:
        Whether all submissions were graded.

    """
    well = True

    def say(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    def tell(outcome: Outcome | None) -> None:
        nonlocal well
        well &= outcome is None or not outcome.failed
        if outcome is not None or ask:
            say(asdict(outcome) if outcome else {})

    bench = Bench(folders, settings, tell)
    for line in requests:
        request = json.loads(line)
        bench.grade(Path(request["path"]), request["again"], request["alone"])
        if bench.distrust:
            return False
        if ask:
            say({"next": True})
    bench.confirm()
    return well


def end_with_parent() -> None:
    """Make the kernel end this process when its parent is killed."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent was killed just before
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Grade the notebooks named on the command line, or, with ``--serve``, on standard input."""
    parser = argparse.ArgumentParser(prog="python -m autograder.pool.one", description=__doc__)
    parser.add_argument("paths", nargs="*", help="submitted notebooks")
    parser.add_argument("--course", type=Path, help="the course folder")
    parser.add_argument(
        "--settings", help="options of Examine, as JSON, that differ from nbgrader_config.py"
    )
    parser.add_argument(
        "--again", action="store_true", help="also grade submissions that have a verdict"
    )
    parser.add_argument(
        "--serve",
        type=int,
        metavar="FD",
        help='read lines of {"path": …, "again": …, "alone": …} from the input, and write answers '
        "to this descriptor",
    )
    arguments = parser.parse_args()
    root = find_course(arguments.course)
    config = load_config(root)
    settings = Settings.of(config)
    if arguments.settings:
        settings = Settings(**{**asdict(settings), **json.loads(arguments.settings)})
    if arguments.serve is not None:
        end_with_parent()
    paths = [str(Path(path).resolve()) for path in arguments.paths]
    requests = (
        json.dumps({"path": path, "again": arguments.again, "alone": False}) for path in paths
    )
    lines: Iterable[str] = requests
    answers = os.dup(1)
    if arguments.serve is not None:
        lines, answers = sys.stdin, arguments.serve
    os.dup2(2, 1)  # a check may print, and its output must not look like an answer
    with os.fdopen(answers, "w") as file:
        ask = arguments.serve is not None
        return 0 if serve(Folders.of(root, config), settings, lines, file, ask) else 1


if __name__ == "__main__":
    sys.exit(main())
