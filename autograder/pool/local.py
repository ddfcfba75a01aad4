"""Grade on this machine with a pool of worker processes, each with a running sandbox.

A worker is ``python -m autograder.pool.one --serve``. All results are on disk, so the pool keeps no
records, and losing a worker loses no result. A worker that dies, or that fails its self-test, is
replaced, and its submission is tried again later. A submission that fails again and again stops
no others: the pool gives up only if machines fail before they examine anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autograder.examination.budget import PATIENCE
from autograder.pool.outcome import MACHINE, Outcome
from autograder.sandbox.mounts import beside_packages
from autograder.settings import ATTEMPTS, Settings
from course_lib.ranks.explain.failure import exit_reason

IN_A_ROW = 3
"""The pool gives up after this many failures in a row per worker, in all of which the machine
examined nothing."""
START_SECONDS = 300.0
"""Seconds that a worker may take in addition to the submissions' code.

In this time it starts Python and the sandbox, and judges.
"""


class Worker:
    """One process of the pool. It dies with this process.

    Args:
        root: the course folder.
        settings: how it examines submissions.

    Attributes:
        open: the submission without an answer so far; empty if there is none.
        tested: whether it has passed a self-test.

    """

    def __init__(self, root: Path, settings: Settings) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        answers, theirs = os.pipe()
        # Unbuffered, because the pool waits on the descriptor and would miss a line in a buffer.
        self.answers = os.fdopen(answers, "rb", buffering=0)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "autograder.pool.one", "--serve", str(theirs)),
                *("--course", str(root), "--settings", json.dumps(asdict(settings))),
            ],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=self._said,  # a sitecustomize module may print before our first line runs
            stderr=self._said,
            bufsize=0,
            pass_fds=[theirs],
            start_new_session=True,  # this process handles Ctrl-C
        )
        os.close(theirs)
        # At least as long as a submission's own limit allows.
        self._patience = START_SECONDS + 2 * PATIENCE * settings.submission_seconds
        self._deadline = 0.0
        self.open = ""
        self.tested = False

    def give(self, path: str, again: bool) -> None:
        """Make the worker grade a submission."""
        self.open = path
        self._deadline = time.monotonic() + self._patience
        assert self.process.stdin is not None
        line = json.dumps({"path": path, "again": again}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it has ended: reading its answer shows this
            self.process.stdin.write(line)

    def finish(self) -> None:
        """Make the worker end."""
        assert self.process.stdin is not None
        self._deadline = time.monotonic() + self._patience
        self.process.stdin.close()

    @property
    def late(self) -> bool:
        """Whether the worker's answer is overdue."""
        return time.monotonic() > self._deadline

    def answer(self) -> dict[str, Any] | None:
        """Return the worker's answer, as `one.serve` writes it; None if there are no more."""
        self._deadline = time.monotonic() + self._patience
        try:
            said = json.loads(self.answers.readline())
        except ValueError:
            return None
        return said if isinstance(said, dict) else None

    def lost(self, why: str) -> Outcome | None:
        """End the worker; return a failed outcome if a submission has no answer."""
        if not why:
            try:
                status: int | None = self.process.wait(5)
            except subprocess.TimeoutExpired:
                status = None
            why = f"the worker process ended: {exit_reason(status)}"
        self._said.seek(max(0, self._said.seek(0, 2) - 1000))
        said = self._said.read().decode(errors="replace").strip()
        self.close()
        failed = f"{why}. {said}".strip()
        everywhere = not self.tested
        return (
            Outcome(self.open, failed=failed, fault=MACHINE, everywhere=everywhere)
            if self.open
            else None
        )

    def close(self) -> None:
        """End the worker and its sandbox."""
        self.process.kill()
        for stream in (self.process.stdin, self.answers):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self.process.wait()
        self._said.close()


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
    def __init__(self, root: Path, settings: Settings, jobs: int, again: bool) -> None:
        self._root, self._settings, self._again = root, settings, again
        self._jobs = jobs
        self._attempts: Counter[str] = Counter()
        self._waiting: deque[str] = deque()
        self._selector = selectors.DefaultSelector()
        self._workers: list[Worker] = []
        self._in_a_row = 0

    def run(self, paths: Sequence[str], tell: Callable[[Outcome], None]) -> None:
        self._waiting.extend(paths)
        try:
            for _ in range(min(self._jobs, len(paths))):
                self._start()
            while self._workers:
                for key, _ in self._selector.select(1.0):
                    self._hear(key.data, tell)
                for worker in [w for w in self._workers if w.late]:
                    self._replace(
                        worker, "the worker process gave no answer within its time limit", tell
                    )
        finally:
            for worker in self._workers:
                worker.close()
            self._selector.close()

    def _start(self) -> None:
        worker = Worker(self._root, self._settings)
        self._workers.append(worker)
        self._selector.register(worker.answers, selectors.EVENT_READ, worker)
        self._give(worker)

    def _give(self, worker: Worker) -> None:
        path = self._waiting.popleft()
        worker.give(path, self._again)

    def _hear(self, worker: Worker, tell: Callable[[Outcome], None]) -> None:
        said = worker.answer()
        if said is None:
            self._replace(worker, "", tell)
        elif "path" in said:
            outcome = Outcome(**said)
            worker.open = ""
            self._take(outcome, tell)
        elif "next" not in said:
            worker.tested = True
        elif self._waiting:
            self._give(worker)
        else:
            worker.finish()

    def _replace(self, worker: Worker, why: str, tell: Callable[[Outcome], None]) -> None:
        """End a worker that has failed or is late; start a new one if there is work for it."""
        self._workers.remove(worker)
        for key in [k for k in self._selector.get_map().values() if k.data is worker]:
            self._selector.unregister(key.fileobj)
        if (outcome := worker.lost(why)) is not None:
            self._take(outcome, tell)
        if self._waiting:
            self._start()

    def _take(self, outcome: Outcome, tell: Callable[[Outcome], None]) -> None:
        self._attempts[outcome.path] += 1
        attempts = self._attempts[outcome.path]
        if outcome.fault != MACHINE:
            self._in_a_row = 0
            tell(replace(outcome, attempts=attempts))
            return
        if attempts < ATTEMPTS:
            self._waiting.append(outcome.path)
        else:
            failed = f"{outcome.failed} (tried {ATTEMPTS} times)"
            tell(replace(outcome, failed=failed, attempts=attempts))
        if outcome.everywhere:
            self._in_a_row += 1
            time.sleep(0.2)  # memory or a file that is missing may be available in a moment
        if self._in_a_row >= IN_A_ROW * self._jobs and self._in_a_row >= ATTEMPTS:
            while self._waiting:
                failed = f"{outcome.failed} (not tried again)"
                tell(Outcome(self._waiting.popleft(), failed=failed, fault=MACHINE))


def grade_all(
    root: Path,
    paths: Sequence[Path],
    settings: Settings,
    *,
    jobs: int = 1,
    again: bool = False,
    tell: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Grade submitted notebooks in `jobs` processes; return their outcomes, in their order.

    Args:
        root: the course folder.
        paths: the notebooks: STUDENT/ASSIGNMENT/NOTEBOOK.ipynb.
        settings: how they are examined.
        jobs: how many at a time.
        again: also grade notebooks that have a verdict on the same content.
        tell: called with each outcome as it arrives.

    """
    outcomes: dict[str, Outcome] = {}

    def take(outcome: Outcome) -> None:
        outcomes[outcome.path] = outcome
        tell(outcome)

    names = [str(path.resolve()) for path in paths]
    if names:
        _Pool(root, settings, jobs, again).run(names, take)
    return [outcomes[name] for name in names]
