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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
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
    pool = _Pool(names, lambda: _Worker.start(launch, job, seconds), tell)
    asyncio.run(pool.grade(min(jobs, len(names)), bool(launch)))
    return [pool.outcomes[name] for name in names]


class _Pool:
    """The submissions of a class, and the workers that grade them.

    Attributes:
        outcomes: path → outcome, of the notebooks that are done.

    """

    def __init__(
        self,
        paths: Sequence[str],
        start: Callable[[], Awaitable[_Worker]],
        tell: Callable[[Outcome], None],
    ) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._waiting = deque(paths)
        self._start, self._tell = start, tell
        self._workers: list[_Worker] = []
        self._attempts: Counter[str] = Counter()
        self._failed_starts = 0
        self._said = ""

    async def grade(self, jobs: int, elsewhere: bool) -> None:
        """Grade all; then nobody waits for workers that still wait for a cluster."""
        total = len(self._waiting)
        working = {asyncio.create_task(self._work()) for _ in range(jobs)}
        while len(self.outcomes) < total:
            ended, working = await asyncio.wait(
                working, timeout=TELL_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            for task in ended:
                task.result()
            if elsewhere and (waiting := sum(w.host is None for w in self._workers)):
                self._say(f"{waiting} of {len(self._workers)} workers wait for the cluster")

    async def _work(self) -> None:
        """Grade with one worker after the other, until nothing waits or others do what is left."""
        while self._waiting:
            failure = await self._one_worker()
            if failure and not await self._again(failure):
                break

    async def _one_worker(self) -> Outcome | None:
        """Grade with a new worker, until its machine fails; return why it could not begin."""
        try:
            worker = await self._start()
        except OSError as error:
            return Outcome("", failed=str(error), fault=MACHINE)
        self._workers.append(worker)
        try:
            ready = await worker.ready()
            if ready.failed:
                return ready
            self._failed_starts = 0
            while self._waiting:
                outcome = await worker.grade(self._waiting.popleft())
                self._take(outcome)
                if outcome.fault == MACHINE:
                    break
            return None
        finally:
            self._workers.remove(worker)
            await worker.close()

    async def _again(self, failure: Outcome) -> bool:
        """After a worker could not begin, return whether to start one; if nobody will, give up."""
        if failure.fault == MACHINE and self._workers:
            self._say(f"a worker could not begin, others go on: {failure.failed}")
            return False
        self._failed_starts += 1
        if failure.fault == MACHINE and self._failed_starts < ATTEMPTS:
            await asyncio.sleep(PAUSE_SECONDS)
            return True
        if not self.outcomes:
            raise CommandFailed(f"nobody was graded: {failure.fault}: {failure.failed}")
        while self._waiting:
            path = self._waiting.popleft()
            self._done(replace(failure, path=path, failed=f"{failure.failed} (not tried again)"))
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
        self.outcomes[outcome.path] = outcome
        self._tell(outcome)

    def _say(self, text: str) -> None:
        if text != self._said:
            print(text, flush=True)
        self._said = text


class _Worker:
    """A worker's process, as `pool.worker` describes it.

    Attributes:
        host: the machine on which it runs; None until it runs.

    """

    def __init__(self, process: Process, log: IO[bytes], job: Any, seconds: float) -> None:
        self.host: str | None = None
        assert process.stdin is not None and process.stdout is not None
        self._process, self._log, self._seconds = process, log, seconds
        self._input, self._output = process.stdin, process.stdout
        self._write(job)

    @classmethod
    async def start(cls, launch: Sequence[str], job: Any, seconds: float) -> _Worker:
        """Start a worker for a job; it may take `seconds` for an answer.

        It imports the same packages as this process. Otherwise it would import the installed ones
        if the command was called from a different clone.
        """
        package = Path(__file__).parents[1]
        path = [str(package.parent)] if beside_packages(package) else []
        path += filter(None, [os.environ.get("PYTHONPATH")])
        with contextlib.ExitStack() as resources:
            log = resources.enter_context(tempfile.TemporaryFile())
            process = await asyncio.create_subprocess_exec(
                *(*launch, "env", f"PYTHONPATH={os.pathsep.join(path)}"),
                *(sys.executable, "-P", "-m", "autograder.pool.worker"),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                limit=2**20,
                start_new_session=True,  # this process handles Ctrl-C
            )
            resources.pop_all()  # `close` closes it
        return cls(process, log, job, seconds)

    async def ready(self) -> Outcome:
        """Wait until it runs, however long a cluster is busy; return the self-test's outcome."""
        while self.host is None and (line := await self._output.readline()):
            with contextlib.suppress(ValueError, TypeError, KeyError):  # what a shell prints first
                self.host = str(json.loads(line)["host"])
        return await self._answer("")

    async def grade(self, path: str) -> Outcome:
        """Grade a submission."""
        self._write(path)
        return await self._answer(path)

    async def close(self) -> None:
        """End the worker, also one that a cluster has not started yet."""
        self._input.close()
        self._signal(signal.SIGTERM)
        await self._exit_status()
        self._log.close()

    def _write(self, request: Any) -> None:
        self._input.write(json.dumps(request).encode() + b"\n")

    async def _answer(self, path: str) -> Outcome:
        try:
            async with asyncio.timeout(self._seconds):
                outcome = Outcome(**json.loads(await self._output.readline()))
        except TimeoutError:
            outcome = self._failed(path, "the worker process gave no answer within its time limit")
        except ValueError:  # it ended, perhaps within a line
            reason = exit_reason(await self._exit_status())
            outcome = self._failed(path, f"the worker process ended: {reason}")
        if outcome.fault == MACHINE and self.host:
            outcome = replace(outcome, failed=f"{self.host}: {outcome.failed}")
        return outcome

    def _failed(self, path: str, reason: str) -> Outcome:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 1000))
        output = self._log.read().decode(errors="replace").strip()
        return Outcome(path, failed=f"{reason}. {output}".strip(), fault=MACHINE)

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
