"""Grade on this machine with a pool of worker processes, each with a running sandbox.

All results are on disk, so losing a worker loses no result. A worker whose machine failed, that
died or that gave no answer is replaced, and its submission is tried again later. A submission that
fails again and again stops no others. The pool gives up only if no worker can be started.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autograder.course import Settings
from autograder.examination.budget import PATIENCE
from autograder.pool.worker import MACHINE, Outcome
from autograder.sandbox.mounts import beside_packages
from course_lib.ranks.explain.failure import exit_reason

ATTEMPTS = 3
"""Number of attempts to examine a submission if the machine fails."""
START_SECONDS = 300.0
"""Seconds that a worker may take in addition to the submission's code.

In this time it starts Python and the sandbox, runs the self-test, and judges.
"""


class WorkerLost(RuntimeError):
    """A worker died, or gave no answer in time; the message says which."""


class _Worker:
    """One worker process. It dies with the thread that starts it."""

    def __init__(self, root: Path, assignment: str, settings: Settings) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        answers, theirs = os.pipe()
        # Unbuffered, because `_answer` waits on the descriptor and would miss a line in a buffer.
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "autograder.pool.worker", "--answers", str(theirs)),
                *("--course", str(root), "--assignment", assignment),
                *("--settings", json.dumps(asdict(settings))),
            ],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=self._log,  # a sitecustomize module may print before our first line runs
            stderr=self._log,
            pass_fds=[theirs],
            start_new_session=True,  # this process handles Ctrl-C
        )
        os.close(theirs)
        # At least as long as a submission's own limit allows.
        self._patience = START_SECONDS + 2 * PATIENCE * settings.submission_seconds

    def ready(self) -> Outcome:
        """Return the outcome of its self-test; this is its first answer."""
        return self._outcome("")

    def grade(self, path: str) -> Outcome:
        """Grade a submission."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: reading shows this
            self.process.stdin.write(json.dumps(path).encode() + b"\n")
            self.process.stdin.flush()
        return self._outcome(path)

    def _outcome(self, path: str) -> Outcome:
        try:
            return Outcome(**self._answer())
        except WorkerLost as lost:
            return Outcome(path, failed=str(lost), fault=MACHINE)

    def _answer(self) -> dict[str, Any]:
        why = "the worker process gave no answer within its time limit"
        if select.select([self._answers], [], [], self._patience)[0]:
            try:
                return dict(json.loads(self._answers.readline()))
            except ValueError:  # it ended, perhaps within a line
                with contextlib.suppress(subprocess.TimeoutExpired):
                    why = f"the worker process ended: {exit_reason(self.process.wait(5))}"
        self._log.seek(max(0, self._log.seek(0, 2) - 1000))
        said = self._log.read().decode(errors="replace").strip()
        raise WorkerLost(f"{why}. {said}".strip())

    def close(self) -> None:
        """End the worker and its sandbox. May be repeated."""
        self.process.kill()
        for stream in (self.process.stdin, self._answers, self._log):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
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


class _Pool:
    """The work that several threads share, each with one worker at a time.

    Attributes:
        done: the outcomes, or the exception that ended a thread.

    """

    def __init__(self, paths: Sequence[str], start: Callable[[], _Worker]) -> None:
        self.done: queue.SimpleQueue[Outcome | BaseException] = queue.SimpleQueue()
        self._waiting = deque(paths)
        self._start = start
        self._open: list[_Worker] = []
        self._attempts: Counter[str] = Counter()
        self._failed_starts = 0
        self._stopped = False

    def work(self) -> None:
        """Grade in one thread, until nothing waits or other workers do what is left."""
        try:
            while self._waiting and self._one_worker():
                pass
        except BaseException as error:
            self.done.put(error)

    def stop(self) -> None:
        """End all workers."""
        self._stopped = True
        for worker in list(self._open):
            worker.process.kill()

    def _one_worker(self) -> bool:
        """Grade with a new worker, until its machine fails; return whether to start another one."""
        self._open.append(worker := self._start())
        try:
            ready = worker.ready()
            while not (ready.failed or self._stopped):
                self._failed_starts = 0
                try:
                    path = self._waiting.popleft()
                except IndexError:
                    break
                outcome = worker.grade(path)
                self._take(outcome)
                if outcome.fault == MACHINE:
                    break
        finally:
            self._open.remove(worker)
            worker.close()
        return not self._stopped and (not ready.failed or self._again(ready))

    def _again(self, why: Outcome) -> bool:
        """After a worker did not start, return whether to try again; if nobody will, give up."""
        if why.fault == MACHINE and self._open:
            return False  # others work
        self._failed_starts += 1
        if why.fault == MACHINE and self._failed_starts < ATTEMPTS:
            return True
        while self._waiting:
            path = self._waiting.popleft()
            self.done.put(Outcome(path, failed=f"{why.failed} (not tried again)", fault=why.fault))
        return False

    def _take(self, outcome: Outcome) -> None:
        self._attempts[outcome.path] += 1
        attempts = self._attempts[outcome.path]
        if outcome.fault == MACHINE and attempts < ATTEMPTS:
            self._waiting.append(outcome.path)
            return
        if outcome.fault == MACHINE:
            outcome = replace(outcome, failed=f"{outcome.failed} (tried {ATTEMPTS} times)")
        self.done.put(replace(outcome, attempts=attempts))


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
    pool = _Pool(names, lambda: _Worker(root, assignment, settings))
    threads = [threading.Thread(target=pool.work) for _ in range(min(jobs, len(names)))]
    outcomes: dict[str, Outcome] = {}
    try:
        for thread in threads:
            thread.start()
        while len(outcomes) < len(names):
            outcome = pool.done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            outcomes[outcome.path] = outcome
            tell(outcome)
    finally:
        pool.stop()
        for thread in threads:
            thread.join()
    return [outcomes[name] for name in names]
