"""A worker: a process that grades submissions of one assignment, on this machine or another one.

It needs the course's folder and its three standard streams. Each line is JSON:

    in   {"course": …, "assignment": …, "settings": {…}}     first
    out  {"host": "n1"}                                      it runs, on this machine
    out  an `Outcome`                                        of the self-test, in its sandbox
    in   "…/submitted/ada/02_name/02_name.ipynb"             a submission, as often as wanted
    out  an `Outcome`                                        of this submission

When the input ends, the worker ends at once, also if it is busy, and its sandbox ends with it. So
it outlives nobody who could use its answers, on whatever machine it runs.

For each submission it writes two files, named by the graded content: first the graded notebook,
then the verdict. So whoever reads a verdict finds the notebook, too. It knows no gradebook.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from autograder.collection.repair import vet
from autograder.course import Folders, Settings
from autograder.errors import SandboxUnavailable
from autograder.passes.examine import blank_verdict, keep, rebuilt
from autograder.passes.self_test import SelfTest
from autograder.sandbox.sandbox import MachineFailure
from course_lib.checking.cases import AuthorError

MACHINE, AUTHOR = "the machine failed", "the check is broken"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one submitted notebook, or of the self-test.

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

    def graded() -> Outcome:
        vet(path.parent.name, path.parents[1].name, [str(path)])
        nb = rebuilt(folders, path)
        verdict = blank_verdict(nb, folders, path, settings)
        target = verdict.kept_in(folders)
        target.parent.mkdir(parents=True, exist_ok=True)  # first, to fail before anything runs
        test.examine(nb, verdict)
        keep(nb, verdict, folders)
        return Outcome(str(path), verdict=str(target), notes=verdict.notes)

    return outcome_of(str(path), graded)


def outcome_of(path: str, step: Callable[[], Outcome | None]) -> Outcome:
    """Run a step; if it fails, return why, and whose fault that is."""
    try:
        return step() or Outcome(path)
    except AuthorError as error:
        return Outcome(path, failed=_words(error, error.__cause__), fault=AUTHOR)
    except (MachineFailure, SandboxUnavailable, OSError, MemoryError) as error:
        return Outcome(path, failed=_words(error), fault=MACHINE)
    except Exception as error:  # an error of our own: all that is known about it
        report = "".join(traceback.format_exception(error))[-2000:].strip()
        return Outcome(path, failed=report, fault=MACHINE)


def _words(*errors: BaseException | None) -> str:
    return ": ".join(str(error) or type(error).__name__ for error in errors if error)[-2000:]


def main() -> None:
    """Answer the lines of standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a check may print
    requests = SimpleQueue[Any]()

    def read() -> None:
        with open(0) as lines:
            for line in lines:
                requests.put(json.loads(line))
        os._exit(0)

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    threading.Thread(target=read, daemon=True).start()
    job = requests.get()
    print(file=answers)  # ends what a sitecustomize module has printed
    say({"host": platform.node()})
    folders, settings = Folders.at(Path(job["course"])), Settings(**job["settings"])
    name = job["assignment"]
    test = SelfTest(folders.source / name, folders.release / name, settings)
    say(asdict(outcome_of("", test.run)))
    while True:
        say(asdict(grade(folders, Path(requests.get()), settings, test)))


if __name__ == "__main__":
    main()
