"""Grade submissions one after the other, without a gradebook: paths in, verdicts and JSON out.

    python -m autograder.pool.one --course . grading/submitted/ada/02_data_parallel_sgd/*.ipynb

The pool of this machine, a Slurm job or a loop in a shell can call this program. For each
submission it writes two files, named by the graded content: first the graded notebook, then the
verdict. If both exist already, it runs nothing. So a killed command may simply be started again.

Nothing is graded in a sandbox that has not passed the self-test (`passes.self_test`).
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
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import nbformat

from autograder.course import Folders, find_course, load_config
from autograder.examination.check import AuthorError
from autograder.examination.verdict import Verdict
from autograder.files import write_whole
from autograder.passes.examine import Exam, blank_verdict, examine_notebook
from autograder.passes.rebuild import released_notebook
from autograder.passes.self_test import SelfTest, SelfTestFailed
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


class Bench:
    """Grades one submission after the other, in sandboxes that have passed the self-test.

    Args:
        folders: the course's folders.
        settings: how submissions are examined.
        tell: called with the outcome of each submission, and with None before a submission is
            examined, after the self-test.

    Attributes:
        distrust: why this process may grade nothing more; empty if it may grade.

    """

    def __init__(
        self, folders: Folders, settings: Settings, tell: Callable[[Outcome | None], None]
    ) -> None:
        self._folders, self._settings, self._tell = folders, settings, tell
        self._assignment = ""
        self._test: SelfTest | None = None
        self.distrust = ""

    def grade(self, path: Path, again: bool) -> None:
        """Grade one submitted notebook, and report any failure as its outcome.

        Args:
            path: the notebook: STUDENT/ASSIGNMENT/NOTEBOOK.ipynb.
            again: examine it even if there is a verdict on the same content.

        """
        try:
            self._tell(self._grade(path, again))
        except (AuthorError, LookupError) as error:
            told = _words(error, error.__cause__)
            self._tell(Outcome(str(path), failed=told, fault=AUTHOR))
        except Exception as error:
            self._tell(Outcome(str(path), failed=_told(error), fault=MACHINE, everywhere=True))

    def _grade(self, path: Path, again: bool) -> Outcome:
        """Grade one submitted notebook.

        Raises:
            MachineFailure: the machine failed before this submission was examined.
            SandboxUnavailable: there is no sandbox.
            OSError: the machine failed: a disk, for example.
            AuthorError: a check is broken.
            LookupError: a test cell has no check.

        """
        assignment, student = path.parent.name, path.parents[1].name
        vet(assignment, student, [str(path)])
        nb = rebuilt(self._folders, path)
        verdict = blank(self._folders, path, nb, self._settings)
        target = self._folders.graded(assignment, student) / f"{verdict.key}.json"
        if not again and target.is_file() and target.with_suffix(".ipynb").is_file():
            # A verdict that a disk or an editor damaged counts as missing.
            with contextlib.suppress(ValueError):
                return _graded(path, Verdict.read(target), target, unchanged=True)
        target.parent.mkdir(parents=True, exist_ok=True)  # first, to fail before anything runs
        test = self._tested(assignment)
        self._tell(None)
        try:
            examine_notebook(nb, Exam.of(self._folders.source / assignment), verdict, _LOG)
            if not test.trusted():
                raise MachineFailure("The sandbox ended while this submission was graded")
        except (AuthorError, LookupError, SandboxUnavailable):
            raise
        except Exception as error:  # it may be due to this submission, so no others are given up
            test.sandbox = None
            return Outcome(str(path), failed=_told(error), fault=MACHINE)
        write_whole(target.with_suffix(".ipynb"), nbformat.writes(nb))
        verdict.write(target)
        return _graded(path, verdict, target)

    def _tested(self, assignment: str) -> SelfTest:
        """Return the self-test of an assignment, which the running sandbox has passed.

        If it fails for any reason but a broken check, this process grades no more.
        """
        if self._test is None or assignment != self._assignment:
            source, released = self._folders.source, self._folders.release
            self._test = SelfTest(source / assignment, released / assignment, self._settings)
            self._assignment = assignment
        try:
            if self.distrust:
                raise SelfTestFailed(self.distrust)
            if not self._test.trusted():
                self._test.run()
        except (AuthorError, LookupError):
            raise
        except Exception as error:
            self.distrust = _told(error)
            raise
        return self._test


def _graded(path: Path, verdict: Verdict, target: Path, unchanged: bool = False) -> Outcome:
    return Outcome(
        path=str(path),
        verdict=str(target),
        score=verdict.score,
        max_score=verdict.max_score,
        seconds=verdict.seconds,
        unchanged=unchanged,
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

    Each answer is an `Outcome` as a line of JSON.

    Args:
        folders: the course's folders.
        settings: how submissions are examined.
        requests: the lines.
        answers: the stream to which the answers are written.
        ask: also write ``{}`` before a submission is examined, after the self-test, and
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
        bench.grade(Path(request["path"]), request["again"])
        if bench.distrust:
            return False
        if ask:
            say({"next": True})
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
        help='read lines of {"path": …, "again": …} from the input, and write answers '
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
    requests = (json.dumps({"path": path, "again": arguments.again}) for path in paths)
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
