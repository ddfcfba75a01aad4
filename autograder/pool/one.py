"""One submission after the other, without a gradebook: paths in, verdicts and JSON out.

    python -m autograder.pool.one --course . grading/submitted/ada/02_data_parallel_sgd/*.ipynb

This is what every engine calls: the pool of this machine, a job of Slurm's, a loop in a shell. It
writes two files, named by the content that they are about: the graded notebook, and, last, the
verdict. Where both are there already nothing is run, so whatever was killed may be started again.
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
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import nbformat

from autograder.course import Folders, find_course, load_config
from autograder.examination.check import AuthorError
from autograder.examination.verdict import Verdict
from autograder.passes.examine import blank_verdict, examine_notebook
from autograder.passes.rebuild import rebuild
from autograder.passes.settings import Settings
from autograder.passes.vet import damage, vet
from autograder.pool.outcome import AUTHOR, MACHINE, Outcome
from autograder.sandbox.place import MachineFailure
from autograder.sandbox.unavailable import SandboxUnavailable

_LOG = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1


def rebuilt(folders: Folders, path: Path) -> nbformat.NotebookNode:
    """Return the released notebook with the sources of the submitted one at `path`.

    Raises:
        FileNotFoundError: the assignment was not released.

    """
    released = folders.release / path.parent.name / path.name
    if not released.is_file():
        raise FileNotFoundError(
            f"there is no released version at {released}; "
            f"nbgrader generate_assignment {path.parent.name} makes one"
        )
    return rebuild(nbformat.read(released, as_version=4), nbformat.read(path, as_version=4))


def blank(folders: Folders, path: Path, nb: nbformat.NotebookNode, settings: Settings) -> Verdict:
    """Return the verdict on the notebook rebuilt from `path`, before anything was run."""
    assignment, student = path.parent.name, path.parents[1].name
    return blank_verdict(
        *(nb, folders.source / assignment, folders.release / assignment / path.name, folders.data),
        *(assignment, student, path.stem, settings),
    )


def grade(
    folders: Folders, path: Path, settings: Settings, *, again: bool = False
) -> tuple[Verdict, Path, bool]:
    """Grade one submitted notebook; return its verdict, where that lies, and whether it was there.

    Args:
        folders: of the course.
        path: the notebook: STUDENT/ASSIGNMENT/NOTEBOOK.ipynb.
        settings: how it is examined.
        again: examine it also if there is a verdict on the same content.

    Raises:
        MachineFailure: the machine failed, and not the submission.
        SandboxUnavailable: there is no sandbox.
        OSError: likewise: a disk, for example.
        AuthorError: a check is broken.
        LookupError: a test cell has no check.

    """
    assignment, student = path.parent.name, path.parents[1].name
    vet(assignment, student, [str(path)])
    nb = rebuilt(folders, path)
    verdict = blank(folders, path, nb, settings)
    target = folders.graded(assignment, student) / f"{verdict.key}.json"
    if not again and target.is_file() and target.with_suffix(".ipynb").is_file():
        with contextlib.suppress(ValueError):  # damaged, by a disk or an editor: as if not there
            return Verdict.read(target), target, True
    target.parent.mkdir(parents=True, exist_ok=True)  # what cannot be written is not run
    source = folders.source / assignment
    examine_notebook(nb, source, verdict, _LOG)
    draft = target.with_suffix(f".{os.getpid()}.part")
    nbformat.write(nb, draft)
    draft.replace(target.with_suffix(".ipynb"))
    verdict.write(target)  # last: with it the submission is graded
    return verdict, target, False


def outcome_of(folders: Folders, path: Path, settings: Settings, again: bool = False) -> Outcome:
    """Grade one submitted notebook, whatever happens."""
    try:
        verdict, target, unchanged = grade(folders, path, settings, again=again)
    except (AuthorError, LookupError) as error:
        return Outcome(str(path), failed=_words(error, error.__cause__), fault=AUTHOR)
    except _OF_THE_MACHINE as error:
        return Outcome(str(path), failed=_words(error), fault=MACHINE)
    except Exception:  # not foreseen, so nobody's zero
        return Outcome(str(path), failed=traceback.format_exc()[-2000:].strip(), fault=MACHINE)
    return Outcome(
        *(str(path), str(target), verdict.score, verdict.max_score),
        *(verdict.seconds, unchanged),
        notes=damage(verdict.notes),
    )


_OF_THE_MACHINE = (MachineFailure, SandboxUnavailable, OSError, MemoryError)


def _words(*errors: BaseException | None) -> str:
    return ": ".join(str(error) or type(error).__name__ for error in errors if error)[-2000:]


# As a program -----------------------------------------------------------------------------------


def serve(folders: Folders, settings: Settings, requests: Iterable[str], answers: TextIO) -> bool:
    """Answer each line of JSON with another; return whether all were graded."""
    well = True
    for line in requests:
        request = json.loads(line)
        outcome = outcome_of(folders, Path(request["path"]), settings, request["again"])
        well &= not outcome.failed
        answers.write(json.dumps(asdict(outcome)) + "\n")
        answers.flush()
    return well


def end_with_parent() -> None:
    """Have the kernel end this process when the one that started it is killed."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it was killed just before
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Grade the notebooks named on the command line, or with ``--serve`` on the input."""
    parser = argparse.ArgumentParser(prog="python -m autograder.pool.one", description=__doc__)
    parser.add_argument("paths", nargs="*", help="submitted notebooks")
    parser.add_argument("--course", type=Path, help="the course folder")
    parser.add_argument("--settings", help="JSON: the options of Examine that differ")
    parser.add_argument("--again", action="store_true", help="also where there is a verdict")
    parser.add_argument(
        *("--serve",),
        type=int,
        metavar="FD",
        help='read {"path": …, "again": …} from the input, by line, and answer to this descriptor',
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
    os.dup2(2, 1)  # what a check prints is no answer
    with os.fdopen(answers, "w") as file:
        return 0 if serve(Folders.of(root, config), settings, lines, file) else 1


if __name__ == "__main__":
    sys.exit(main())
