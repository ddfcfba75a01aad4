"""Grade a class with several workers; each is a process that a command starts.

All results are on disk, so losing a worker loses no result. A worker whose machine failed, that
ended or that gave no answer is replaced, and its submission is tried again later. A submission that
fails again and again stops no others. Nobody is given up while a worker runs, or waits to be run by
a busy cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from autograder.course import Settings
from autograder.errors import CommandFailed
from autograder.examination.budget import PATIENCE
from autograder.pool.worker import MACHINE, Outcome
from autograder.sandbox.mounts import beside_packages
from course_lib.ranks.explain.failure import exit_reason

ATTEMPTS = 3
"""Number of attempts to examine a submission if the machine fails."""
START_SECONDS = 300.0
"""Seconds that a worker may take in addition to the submission's code.

In this time it starts the sandbox, runs the self-test, and judges. Waiting for a cluster does not
count.
"""
END_SECONDS = 10.0
"""Seconds for a worker to end after its input has ended, and for the command that started it."""
PAUSE_SECONDS = 1.0
"""Seconds to wait before another attempt to start a worker; other workers may free memory."""
TELL_SECONDS = 10.0
"""Seconds between two lines about workers that wait."""


def grade_all(
    root: Path,
    assignment: str,
    paths: Sequence[Path],
    settings: Settings,
    *,
    jobs: int = 1,
    launch: Sequence[str] = (),
    tell: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Grade submitted notebooks with `jobs` workers; return their outcomes, in their order.

    Args:
        root: the course folder.
        assignment: its name.
        paths: the notebooks: STUDENT/ASSIGNMENT/NOTEBOOK.ipynb.
        settings: how they are examined.
        jobs: how many at a time.
        launch: what stands before the command of each worker, to run it on another machine that
            has the same folders. By default it is a child of this process.
        tell: called with each outcome as it arrives.

    Raises:
        CommandFailed: no worker could be started, and nobody was graded.

    """
    names = [str(path.resolve()) for path in paths]
    job = {"course": str(root), "assignment": assignment, "settings": asdict(settings)}
    seconds = START_SECONDS + 2 * PATIENCE * settings.submission_seconds
    pool = _Pool(deque(names), launch, job, seconds, tell)
    asyncio.run(pool.grade(min(jobs, len(names))))
    return [pool.outcomes[name] for name in names]


@dataclass
class _Pool:
    """The submissions of a class, and the workers that grade them.

    Attributes:
        waiting: the paths of the notebooks that no worker has.
        outcomes: path → outcome, of the notebooks that are done.
        workers: those that are started, and not ended.
        attempts: path → number of attempts.
        failure: the last outcome of a self-test that failed.

    """

    waiting: deque[str]
    launch: Sequence[str]
    job: dict[str, Any]
    seconds: float
    tell: Callable[[Outcome], None]
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    workers: list[_Worker] = field(default_factory=list)
    attempts: Counter[str] = field(default_factory=Counter)
    failure: Outcome = field(default_factory=lambda: Outcome(""))

    async def grade(self, jobs: int) -> None:
        """Grade all, or give up if no worker can be started any more."""
        total, not_running = len(self.waiting), 0
        working = {asyncio.create_task(self._work()) for _ in range(jobs)}
        while working and len(self.outcomes) < total:
            ended, working = await asyncio.wait(
                working, timeout=TELL_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            for task in ended:
                task.result()
            before, not_running = not_running, jobs - sum(w.host is not None for w in self.workers)
            if self.launch and self.waiting and not_running not in (0, before):
                line = f"{not_running} of {jobs} workers wait for the cluster"
                failed = self.failure.failed
                print(f"{line}. The last that failed: {failed}" if failed else line, flush=True)
        while working:
            for worker in self.workers:  # those for which a cluster still has no room
                worker.end()
            _, working = await asyncio.wait(working, timeout=PAUSE_SECONDS)
        failure = self.failure
        if self.waiting and not self.outcomes:
            raise CommandFailed(f"nobody was graded: {failure.fault}: {failure.failed}")
        for path in self.waiting:
            self._done(replace(failure, path=path, failed=f"{failure.failed} (not tried again)"))

    async def _work(self) -> None:
        """Grade with one worker after the other, until nothing waits or none can be started."""
        failed_starts = 0
        while self.waiting and failed_starts < ATTEMPTS:
            ready = await self._one_worker()
            failed_starts = failed_starts + 1 if ready.failed else 0
            if ready.failed:
                self.failure = ready
                if ready.fault != MACHINE:
                    break
                await asyncio.sleep(PAUSE_SECONDS)

    async def _one_worker(self) -> Outcome:
        """Grade with a new worker, until its machine fails; return the outcome of its self-test."""
        try:
            worker = await _Worker.start(self.launch, self.seconds)
        except OSError as error:
            return Outcome("", failed=str(error), fault=MACHINE)
        self.workers.append(worker)
        try:
            outcome = ready = await worker.answer(self.job)
            while self.waiting and outcome.fault != MACHINE and not ready.failed:
                path = self.waiting.popleft()
                outcome = await worker.answer(path, path)
                self._take(outcome)
            return ready
        finally:
            self.workers.remove(worker)
            await worker.close()

    def _take(self, outcome: Outcome) -> None:
        self.attempts[outcome.path] += 1
        attempts = self.attempts[outcome.path]
        if outcome.fault == MACHINE and attempts < ATTEMPTS:
            self.waiting.append(outcome.path)
            return
        if outcome.fault == MACHINE:
            outcome = replace(outcome, failed=f"{outcome.failed} (tried {ATTEMPTS} times)")
        self._done(replace(outcome, attempts=attempts))

    def _done(self, outcome: Outcome) -> None:
        self.outcomes[outcome.path] = outcome
        self.tell(outcome)


class _Worker:
    """A worker's process, as `pool.worker` describes it.

    Attributes:
        host: the machine on which it runs; None until it runs.

    """

    def __init__(self, process: Process, log: IO[bytes], seconds: float) -> None:
        self.host: str | None = None
        assert process.stdin is not None and process.stdout is not None
        self._process, self._log, self._seconds = process, log, seconds
        self._input, self._output = process.stdin, process.stdout

    @classmethod
    async def start(cls, launch: Sequence[str], seconds: float) -> _Worker:
        """Start a worker, which may take `seconds` for an answer.

        It imports the same packages as this process. Otherwise it would import the installed ones
        if the command was called from a different clone.
        """
        package = Path(__file__).parents[1]
        path = [str(package.parent)] if beside_packages(package) else []
        path += filter(None, [os.environ.get("PYTHONPATH")])
        python = ["env", f"PYTHONPATH={os.pathsep.join(path)}", sys.executable, "-P"]
        with contextlib.ExitStack() as resources:
            log = resources.enter_context(tempfile.TemporaryFile())
            process = await asyncio.create_subprocess_exec(
                *(*launch, *python, "-m", "autograder.pool.worker"),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                limit=2**20,
                start_new_session=True,  # this process handles Ctrl-C
            )
            resources.pop_all()  # `close` closes it
        return cls(process, log, seconds)

    async def answer(self, request: Any, path: str = "") -> Outcome:
        """Send a line; return the outcome of the self-test, or of the submission at `path`.

        Before the first answer it waits for the worker to run, however long a cluster is busy.
        """
        self._input.write(json.dumps(request).encode() + b"\n")
        while self.host is None and (line := await self._output.readline()):
            with contextlib.suppress(ValueError, TypeError, KeyError):  # what a shell prints first
                self.host = str(json.loads(line)["host"])
        reason = ""
        try:
            async with asyncio.timeout(self._seconds):
                outcome = Outcome(**json.loads(await self._output.readline()))
        except TimeoutError:
            reason = "gave no answer within its time limit"
        except ValueError:  # it ended, perhaps within a line
            reason = f"ended: {exit_reason(await self._exit_status())}"
        if reason:
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 1000))
            printed = self._log.read().decode(errors="replace")
            failed = f"the worker process {reason}. {printed}".strip()
            outcome = Outcome(path, failed=failed, fault=MACHINE)
        if outcome.fault == MACHINE and self.host:
            outcome = replace(outcome, failed=f"{self.host}: {outcome.failed}")
        return outcome

    def end(self) -> None:
        """Have the worker end soon, also one that a cluster has not started yet."""
        self._input.close()
        self._signal(signal.SIGTERM)

    async def close(self) -> None:
        """End the worker, and wait until it is gone."""
        with self._log:
            self.end()
            await self._exit_status()

    async def _exit_status(self) -> int:
        """Wait until it and all that has its output have ended; kill them if they do not."""
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._process.communicate()
        except TimeoutError:
            self._signal(signal.SIGKILL)
        return await self._process.wait()

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)  # also what a script in `launch` has started
