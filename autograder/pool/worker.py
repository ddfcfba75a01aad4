"""A process that grades submissions of one assignment, one after the other, without a gradebook.

It first runs the self-test (`passes.self_test`) in its sandbox, and answers with an `Outcome`. Then
it reads the paths of submitted notebooks, and answers each in the same way, as lines of JSON.
For each submission it writes two files, named by the graded content: first the graded notebook,
then the verdict. So whoever reads a verdict finds the notebook, too.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import nbformat

from autograder.collection.repair import vet
from autograder.course import Folders, Settings, load_config
from autograder.errors import SandboxUnavailable
from autograder.files import write_whole
from autograder.passes.examine import blank_verdict, rebuilt
from autograder.passes.self_test import SelfTest
from autograder.sandbox.sandbox import MachineFailure
from course_lib.checking.cases import AuthorError

MACHINE, AUTHOR = "the machine failed", "the check is broken"
_PR_SET_PDEATHSIG = 1
_OF_THE_MACHINE = (MachineFailure, SandboxUnavailable, OSError, MemoryError)


@dataclass(frozen=True)
class Outcome:
    """What became of one submitted notebook, or of the self-test: a line of JSON.

    Attributes:
        path: the submitted notebook; empty for the self-test.
        verdict: the verdict's path; empty if there is none.
        unchanged: whether the verdict existed already.
        failed: why there is no verdict, or an empty string. The student is never the reason.
        fault: `MACHINE`, if another attempt may succeed, or `AUTHOR`.
        notes: damage in the submitted notebook, and what was done about it.
        attempts: number of attempts; more than one only if the machine failed.

    """

    path: str
    verdict: str = ""
    unchanged: bool = False
    failed: str = ""
    fault: str = ""
    notes: Sequence[str] = ()
    attempts: int = 1


def grade(folders: Folders, path: Path, settings: Settings, test: SelfTest) -> Outcome:
    """Grade one submitted notebook.

    Args:
        folders: the course's folders.
        path: the notebook: STUDENT/ASSIGNMENT/NOTEBOOK.ipynb.
        settings: how it is examined.
        test: the self-test of its assignment.

    """
    return outcome_of(str(path), partial(_graded, folders, path, settings, test))


def _graded(folders: Folders, path: Path, settings: Settings, test: SelfTest) -> Outcome:
    assignment, student = path.parent.name, path.parents[1].name
    vet(assignment, student, [str(path)])
    nb = rebuilt(folders, path)
    verdict = blank_verdict(nb, folders, path, settings)
    target = folders.graded(assignment, student) / f"{verdict.key}.json"
    target.parent.mkdir(parents=True, exist_ok=True)  # first, to fail before anything runs
    test.examine(nb, verdict)
    write_whole(target.with_suffix(".ipynb"), nbformat.writes(nb))
    verdict.write(target)
    return Outcome(str(path), verdict=str(target), notes=verdict.notes)


def outcome_of(path: str, step: Callable[[], Outcome | None]) -> Outcome:
    """Run a step; if it fails, return why, and whose fault that is."""
    try:
        return step() or Outcome(path)
    except (AuthorError, LookupError) as error:
        return Outcome(path, failed=_words(error, error.__cause__), fault=AUTHOR)
    except _OF_THE_MACHINE as error:
        return Outcome(path, failed=_words(error), fault=MACHINE)
    except Exception as error:  # an error of our own: all that is known about it
        known = "".join(traceback.format_exception(error))[-2000:].strip()
        return Outcome(path, failed=known, fault=MACHINE)


def _words(*errors: BaseException | None) -> str:
    return ": ".join(str(error) or type(error).__name__ for error in errors if error)[-2000:]


def _end_with_parent() -> None:
    """Make the kernel end this process when its parent is killed."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent was killed just before
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Grade the notebooks on standard input."""
    parser = argparse.ArgumentParser(prog="python -m autograder.pool.worker", description=__doc__)
    parser.add_argument("--course", type=Path, help="the course folder")
    parser.add_argument("--assignment", help="the assignment's name")
    parser.add_argument("--settings", help="the options of Examine, as JSON")
    parser.add_argument("--answers", type=int, help="the descriptor to which answers are written")
    arguments = parser.parse_args()
    _end_with_parent()
    os.dup2(2, 1)  # a check may print, and its output must not look like an answer
    settings = Settings(**json.loads(arguments.settings))
    folders, name = Folders.of(load_config(arguments.course).CourseDirectory), arguments.assignment
    test = SelfTest(folders.source / name, folders.release / name, settings)
    with os.fdopen(arguments.answers, "w", buffering=1) as answers:

        def say(answer: Outcome) -> None:
            answers.write(json.dumps(asdict(answer)) + "\n")

        say(ready := outcome_of("", test.run))
        for line in sys.stdin if not ready.failed else ():
            say(grade(folders, Path(json.loads(line)), settings, test))


if __name__ == "__main__":
    main()
