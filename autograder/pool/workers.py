"""Grade on this machine, in a pool of worker processes, each with a running sandbox.

All results are on disk, so losing a worker loses no result. A worker whose machine failed, that
died or that gave no answer is replaced, and its submission is tried again later. A submission that
fails again and again stops no others. The pool gives up only if no worker can be started.

A worker grades submissions of one assignment, one after the other, without a gradebook. It first
runs the self-test (`passes.self_test`) in its sandbox, and answers with an `Outcome`. Then it reads
the paths of submitted notebooks, and answers each in the same way, as lines of JSON. For each
submission it writes two files, named by the graded content: first the graded notebook, then the
verdict. So whoever reads a verdict finds the notebook, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from autograder.collection.repair import vet
from autograder.course import Folders, Settings
from autograder.errors import SandboxUnavailable
from autograder.examination.budget import PATIENCE
from autograder.passes.examine import blank_verdict, keep, rebuilt
from autograder.passes.self_test import SelfTest
from autograder.sandbox.mounts import beside_packages
from autograder.sandbox.sandbox import MachineFailure
from course_lib.checking.cases import AuthorError
from course_lib.ranks.explain.failure import exit_reason
from course_lib.ranks.for_graders import die_with_parent

ATTEMPTS = 3
"""Number of attempts to examine a submission if the machine fails."""
START_SECONDS = 300.0
"""Seconds that a worker may take in addition to the submission's code.

In this time it starts Python and the sandbox, runs the self-test, and judges.
"""
PAUSE_SECONDS = 1.0
"""Seconds to wait before another attempt to start a worker; other workers may free memory."""
MACHINE, AUTHOR = "the machine failed", "the check is broken"
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


# The pool -------------------------------------------------------------------------------------


def grade_all(
    root: Path,
    assignment: str,
    paths: Sequence[Path],
    settings: Settings,
    *,
    jobs: int = 1,
    tell: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Grade submitted notebooks in `jobs` processes; return their outcomes, in their order.

    Args:
        root: the course folder.
        assignment: its name.
        paths: the notebooks: STUDENT/ASSIGNMENT/NOTEBOOK.ipynb.
        settings: how they are examined.
        jobs: how many at a time.
        tell: called with each outcome as it arrives.

    """
    names = [str(path.resolve()) for path in paths]
    jobs = min(jobs, len(names))
    pool = _Pool(names, lambda: _Worker(root, assignment, settings), tell)
    with ThreadPoolExecutor(max(1, jobs)) as threads:
        try:
            working = [threads.submit(pool.work) for _ in range(jobs)]
            for ended in as_completed(working):
                ended.result()
        finally:
            pool.stop()
    return [pool.outcomes[name] for name in names]


class _Pool:
    """The work that several threads share, each with one worker at a time.

    Attributes:
        outcomes: path → outcome, of the notebooks that are done.

    """

    def __init__(
        self, paths: Sequence[str], start: Callable[[], _Worker], tell: Callable[[Outcome], None]
    ) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._waiting = deque(paths)
        self._start, self._tell = start, tell
        self._lock = threading.Lock()
        self._open: list[_Worker] = []
        self._attempts: Counter[str] = Counter()
        self._failed_starts = 0
        self._stopped = False

    def work(self) -> None:
        """Grade in one thread, until nothing waits or other workers do what is left."""
        while self._waiting and self._one_worker():
            pass

    def stop(self) -> None:
        """End all workers."""
        self._stopped = True
        for worker in list(self._open):
            worker.process.kill()

    def _one_worker(self) -> bool:
        """Grade with a new worker, until its machine fails; return whether to start another one."""
        try:
            worker = self._start()
        except _OF_THE_MACHINE as error:
            failure = Outcome("", failed=_words(error), fault=MACHINE)
            return not self._stopped and self._again(failure)
        self._open.append(worker)
        try:
            ready = worker.answer()
            while not (ready.failed or self._stopped):
                self._failed_starts = 0
                try:
                    path = self._waiting.popleft()
                except IndexError:
                    break
                outcome = worker.answer(path)
                self._take(outcome)
                if outcome.fault == MACHINE:
                    break
        finally:
            self._open.remove(worker)
            worker.close()
        return not self._stopped and (not ready.failed or self._again(ready))

    def _again(self, failure: Outcome) -> bool:
        """After a worker did not start, return whether to try again; if nobody will, give up."""
        if failure.fault == MACHINE and self._open:
            return False  # others work
        self._failed_starts += 1
        if failure.fault == MACHINE and self._failed_starts < ATTEMPTS:
            time.sleep(PAUSE_SECONDS)
            return not self._stopped
        while self._waiting:
            path = self._waiting.popleft()
            self._done(
                Outcome(path, failed=f"{failure.failed} (not tried again)", fault=failure.fault)
            )
        return False

    def _take(self, outcome: Outcome) -> None:
        self._attempts[outcome.path] += 1
        attempts = self._attempts[outcome.path]
        if outcome.fault == MACHINE and attempts < ATTEMPTS:
            self._waiting.append(outcome.path)
            return
        if outcome.fault == MACHINE:
            outcome = replace(outcome, failed=f"{outcome.failed} (tried {ATTEMPTS} times)")
        self._done(replace(outcome, attempts=attempts))

    def _done(self, outcome: Outcome) -> None:
        with self._lock:
            self.outcomes[outcome.path] = outcome
            self._tell(outcome)


class _Worker:
    """One worker process. It dies with the thread that starts it."""

    def __init__(self, root: Path, assignment: str, settings: Settings) -> None:
        with contextlib.ExitStack() as resources:
            self._log = resources.enter_context(tempfile.TemporaryFile())
            self._channel, worker_end = map(resources.enter_context, socket.socketpair())
            job = [worker_end.fileno(), str(root), assignment, asdict(settings)]
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "autograder.pool.workers", json.dumps(job)],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._log,  # a sitecustomize module may print before our first line runs
                stderr=self._log,
                pass_fds=[worker_end.fileno()],
                start_new_session=True,  # this process handles Ctrl-C
            )
            resources.pop_all()  # `close` closes them
        worker_end.close()
        # At least as long as a submission's own limit allows.
        self._channel.settimeout(START_SECONDS + 2 * PATIENCE * settings.submission_seconds)
        self._lines = self._channel.makefile("rwb", buffering=0)

    def answer(self, path: str = "") -> Outcome:
        """Grade a submission; without a path, return the first answer, that of the self-test."""
        reason = "the worker process gave no answer within its time limit"
        try:
            if path:
                self._lines.write(json.dumps(path).encode() + b"\n")
            return Outcome(**json.loads(self._lines.readline()))
        except TimeoutError:
            pass
        except (OSError, ValueError):  # it ended, perhaps within a line
            with contextlib.suppress(subprocess.TimeoutExpired):
                reason = f"the worker process ended: {exit_reason(self.process.wait(5))}"
        self._log.seek(max(0, self._log.seek(0, 2) - 1000))
        output = self._log.read().decode(errors="replace").strip()
        return Outcome(path, failed=f"{reason}. {output}".strip(), fault=MACHINE)

    def close(self) -> None:
        """End the worker and its sandbox. May be repeated."""
        self.process.kill()
        for resource in (self._lines, self._channel, self._log):
            resource.close()
        self.process.wait()


def _environment() -> dict[str, str]:
    """Return our environment, changed so that a worker imports the same packages as this process.

    Otherwise the worker would import those in its working folder, or the installed packages if the
    command was called from a different clone.
    """
    package = Path(__file__).parents[1]
    path = [str(package.parent)] if beside_packages(package) else []
    path += filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, **({"PYTHONPATH": os.pathsep.join(path)} if path else {})}


# A worker -------------------------------------------------------------------------------------


def grade(folders: Folders, path: Path, settings: Settings, test: SelfTest) -> Outcome:
    """Grade one submitted notebook.

    Args:
        folders: the course's folders.
        path: the notebook: STUDENT/ASSIGNMENT/NOTEBOOK.ipynb.
        settings: how it is examined.
        test: the self-test of its assignment.

    """

    def graded() -> Outcome:
        assignment, student = path.parent.name, path.parents[1].name
        vet(assignment, student, [str(path)])
        nb = rebuilt(folders, path)
        verdict = blank_verdict(nb, folders, path, settings)
        target = folders.graded(assignment, student) / f"{verdict.key}.json"
        target.parent.mkdir(parents=True, exist_ok=True)  # first, to fail before anything runs
        test.examine(nb, verdict)
        keep(nb, verdict, folders)
        return Outcome(str(path), verdict=str(target), notes=verdict.notes)

    return outcome_of(str(path), graded)


def outcome_of(path: str, step: Callable[[], Outcome | None]) -> Outcome:
    """Run a step; if it fails, return why, and whose fault that is."""
    try:
        return step() or Outcome(path)
    except (AuthorError, LookupError) as error:
        return Outcome(path, failed=_words(error, error.__cause__), fault=AUTHOR)
    except _OF_THE_MACHINE as error:
        return Outcome(path, failed=_words(error), fault=MACHINE)
    except Exception as error:  # an error of our own: all that is known about it
        report = "".join(traceback.format_exception(error))[-2000:].strip()
        return Outcome(path, failed=report, fault=MACHINE)


def _words(*errors: BaseException | None) -> str:
    return ": ".join(str(error) or type(error).__name__ for error in errors if error)[-2000:]


def main() -> None:
    """Grade the notebooks whose paths come in; the first argument is `_Worker`'s job, as JSON."""
    channel, course, name, settings = json.loads(sys.argv[1])
    die_with_parent(os.getppid())
    os.dup2(2, 1)  # a check may print
    folders, settings = Folders.at(Path(course)), Settings(**settings)
    test = SelfTest(folders.source / name, folders.release / name, settings)
    lines = socket.socket(fileno=channel).makefile("rw")

    def say(answer: Outcome) -> None:
        print(json.dumps(asdict(answer)), file=lines, flush=True)

    say(ready := outcome_of("", test.run))
    for line in lines if not ready.failed else ():
        say(grade(folders, Path(json.loads(line)), settings, test))


if __name__ == "__main__":
    main()
