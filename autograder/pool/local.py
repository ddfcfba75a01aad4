"""The pool of this machine: worker processes, each with a warm sandbox, and nothing lost with one.

A worker is ``python -m autograder.pool.one --serve``. What it has finished is on disk, so the pool
keeps no books: a worker that dies is replaced, and what it was at is tried again, later.
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

from autograder.passes.settings import ATTEMPTS, Settings
from autograder.pool.outcome import MACHINE, Outcome
from autograder.sandbox.mounts import beside_packages
from course_lib.ranks.explain.failure import exit_reason

IN_A_ROW = 3
"""After so many failures of the machine for each worker, and nothing graded, the rest waits."""


class Worker:
    """One process of the pool. It dies with this one.

    Args:
        root: the course folder.
        settings: how it examines.

    """

    def __init__(self, root: Path, settings: Settings) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        answers, theirs = os.pipe()
        self.answers = os.fdopen(answers, "rb")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "autograder.pool.one", "--serve", str(theirs)),
                *("--course", str(root), "--settings", json.dumps(asdict(settings))),
            ],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=self._said,  # a sitecustomize may print before any of our lines is run
            stderr=self._said,
            pass_fds=[theirs],
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        os.close(theirs)
        self._patience = 300 + 3 * settings.submission_seconds
        self._deadline = 0.0
        self.path: str | None = None

    def give(self, path: str, again: bool) -> None:
        """Have it grade a submission."""
        self.path = path
        self._deadline = time.monotonic() + self._patience
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ended: seen where its answer is awaited
            self.process.stdin.write(json.dumps({"path": path, "again": again}).encode() + b"\n")
            self.process.stdin.flush()

    @property
    def late(self) -> bool:
        """Whether it should have answered long ago."""
        return time.monotonic() > self._deadline

    def answer(self) -> Outcome:
        """Return its answer, which is there; or why there is none."""
        assert self.path is not None
        line = self.answers.readline()
        try:
            return Outcome(**json.loads(line))
        except (ValueError, TypeError):
            return self.lost("")

    def lost(self, why: str) -> Outcome:
        """End it; return the outcome of what it was at."""
        assert self.path is not None
        if not why:
            try:
                status: int | None = self.process.wait(5)
            except subprocess.TimeoutExpired:
                status = None
            why = f"the worker process ended: {exit_reason(status)}"
        self._said.seek(max(0, self._said.seek(0, 2) - 1000))
        said = self._said.read().decode(errors="replace").strip()
        path = self.path
        self.close()
        return Outcome(path, failed=f"{why}. {said}".strip(), fault=MACHINE)

    def close(self) -> None:
        """End it, and with it its sandbox."""
        self.process.kill()
        for stream in (self.process.stdin, self.answers):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self.process.wait()
        self._said.close()


def _environment() -> dict[str, str]:
    """Return ours; in it Python finds the very packages that this process runs.

    Not those of the folder that it is started in, nor those that are installed, where the command
    was given with another clone.
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
                    self._take(key.data, key.data.answer(), tell)
                for worker in [w for w in self._workers if w.late]:
                    self._take(worker, worker.lost("no answer came within the time"), tell)
        finally:
            for worker in self._workers:
                worker.close()
            self._selector.close()

    def _start(self) -> None:
        worker = Worker(self._root, self._settings)
        self._workers.append(worker)
        self._selector.register(worker.answers, selectors.EVENT_READ, worker)
        worker.give(self._waiting.popleft(), self._again)

    def _take(self, worker: Worker, outcome: Outcome, tell: Callable[[Outcome], None]) -> None:
        self._attempts[outcome.path] += 1
        failed = outcome.fault == MACHINE
        self._in_a_row = self._in_a_row + 1 if failed else 0
        if failed and self._attempts[outcome.path] < ATTEMPTS:
            self._waiting.append(outcome.path)
            time.sleep(0.2)  # what failed for want of memory or of a file may be there in a moment
        else:
            if failed:
                told = f"{outcome.failed} (tried {ATTEMPTS} times)"
                outcome = replace(outcome, failed=told)
            tell(outcome)
        if self._in_a_row >= IN_A_ROW * self._jobs and self._in_a_row >= ATTEMPTS:
            while self._waiting:
                path = self._waiting.popleft()
                tell(Outcome(path, failed=f"not tried: {outcome.failed}", fault=MACHINE))
        ended = worker.process.returncode is not None
        if self._waiting and not ended:
            worker.give(self._waiting.popleft(), self._again)
            return
        if ended or not self._waiting:
            self._drop(worker)
        if self._waiting:
            self._start()

    def _drop(self, worker: Worker) -> None:
        self._workers.remove(worker)
        for key in [k for k in self._selector.get_map().values() if k.data is worker]:
            self._selector.unregister(key.fileobj)
        if worker.process.returncode is None:
            worker.close()


def grade_all(
    root: Path,
    paths: Sequence[Path],
    settings: Settings,
    *,
    jobs: int = 1,
    again: bool = False,
    tell: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Grade submitted notebooks in `jobs` processes; return what became of each, in their order.

    Args:
        root: the course folder.
        paths: the notebooks: STUDENT/ASSIGNMENT/NOTEBOOK.ipynb.
        settings: how they are examined.
        jobs: how many at a time.
        again: also those that have a verdict on the same content.
        tell: is given each outcome as it comes.

    """
    outcomes: dict[str, Outcome] = {}

    def take(outcome: Outcome) -> None:
        outcomes[outcome.path] = outcome
        tell(outcome)

    names = [str(path.resolve()) for path in paths]
    if names:
        _Pool(root, settings, jobs, again).run(names, take)
    return [outcomes[name] for name in names]
