"""Grade a class on a cluster: send chunks of submissions as a Slurm array job, through submitit.

A job gets paths and runs the local pool for its share of them. It writes its results to the disk
that all nodes see, so its answer is not needed. If a job is lost with its node, the missing
submissions are sent again.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from autograder.pool.outcome import MACHINE, Outcome
from autograder.settings import ATTEMPTS, Settings
from course_lib.ranks.explain.words import counted

LOOK_EVERY = 3.0
"""Seconds between two queries to Slurm."""


class SlurmUnavailable(RuntimeError):
    """No cluster can be reached from here; the message says what is missing."""


@dataclass(frozen=True)
class Cluster:
    """The resources to ask Slurm for.

    Attributes:
        jobs: submissions at a time in each element of the array.
        chunk: submissions per element.
        minutes: time limit of each element; Slurm ends it after that.
        partition: Slurm's partition; empty for the default one.
        gpus: number of GPUs of each element.
        at_once: number of elements that run at a time.

    """

    jobs: int
    chunk: int
    minutes: int
    partition: str = ""
    gpus: int = 0
    at_once: int = 64


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a cluster."""
    group = parser.add_argument_group("on a cluster")
    group.add_argument("--slurm", action="store_true", help="send the submissions to Slurm")
    group.add_argument(
        "--chunk", type=int, default=10, help="submissions per job (default: %(default)s)"
    )
    group.add_argument(
        "--minutes",
        type=int,
        default=60,
        help="time limit of a job, in minutes (default: %(default)s)",
    )
    group.add_argument(
        "--partition", default="", help="partition to use (default: Slurm's default partition)"
    )
    group.add_argument(
        "--gpus", type=int, default=1, help="GPUs per job, with --on gpu (default: %(default)s)"
    )


def cluster(arguments: argparse.Namespace, jobs: int) -> Cluster | None:
    """Return the resources that the command line requests, or None.

    Raises:
        SlurmUnavailable: submitit or sbatch is missing.

    """
    if not arguments.slurm:
        return None
    try:
        import submitit  # noqa: F401
    except ImportError:
        raise SlurmUnavailable("--slurm needs submitit: pip install 'sgd-to-ddp[slurm]'") from None
    if shutil.which("sbatch") is None:
        raise SlurmUnavailable(
            "--slurm needs Slurm's sbatch, which is not on PATH: log in on a machine that can "
            "submit jobs, or grade without --slurm"
        )
    return Cluster(
        jobs=jobs,
        chunk=max(1, arguments.chunk),
        minutes=arguments.minutes,
        partition=arguments.partition,
        gpus=arguments.gpus if arguments.on == "gpu" else 0,
    )


def grade_all(
    root: Path,
    paths: Sequence[Path],
    settings: Settings,
    cluster: Cluster,
    *,
    folder: Path,
    again: bool = False,
    tell: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Grade submitted notebooks on a cluster; return their outcomes, in their order.

    Args:
        root: the course folder, which all nodes see at the same path.
        paths: the notebooks: STUDENT/ASSIGNMENT/NOTEBOOK.ipynb.
        settings: how they are examined.
        cluster: the resources to ask for.
        folder: the folder for job files and logs. All nodes see it, but no student's code does.
        again: also grade notebooks that have a verdict on the same content.
        tell: called with each outcome as it arrives.

    """
    waiting = [str(path.resolve()) for path in paths]
    outcomes: dict[str, Outcome] = {}
    for attempt in range(1, ATTEMPTS + 1):
        chunks = [waiting[n : n + cluster.chunk] for n in range(0, len(waiting), cluster.chunk)]
        if not chunks:
            break
        array = _Array(root, chunks, settings, cluster, folder / f"{time.time_ns()}", again)
        print(
            f"Slurm: job array {array.id} of {counted(len(chunks), 'job')}; logs in {array.folder}",
            flush=True,
        )
        for outcome in array.outcomes():
            if outcome.path in outcomes:
                continue  # a repeated answer: Slurm itself moved the job to another node
            if outcome.fault != MACHINE or attempt == ATTEMPTS:
                outcome = replace(outcome, attempts=max(attempt, outcome.attempts))
                outcomes[outcome.path] = outcome
                tell(outcome)
        waiting = [path for path in waiting if path not in outcomes]
    for path in waiting:
        lost = f"Slurm lost the job {ATTEMPTS} times; its logs are in {folder}"
        outcomes[path] = Outcome(path, failed=lost, fault=MACHINE)
        tell(outcomes[path])
    return [outcomes[str(path.resolve())] for path in paths]


def grade_chunk(
    root: str, paths: list[str], settings: dict[str, Any], jobs: int, again: bool, answers: str
) -> None:
    """Grade a share of the class on a node; write a line of JSON per notebook to `answers`."""
    from autograder.pool import local  # imports torch, which reading options does not need

    with Path(answers).open("a", encoding="utf-8", buffering=1) as file:
        local.grade_all(
            *(Path(root), [Path(path) for path in paths], Settings(**settings)),
            jobs=jobs,
            again=again,
            tell=lambda outcome: print(json.dumps(asdict(outcome)), file=file),
        )


class _Array:
    """An array job, from sbatch to its last answer."""

    def __init__(
        self,
        root: Path,
        chunks: list[list[str]],
        settings: Settings,
        cluster: Cluster,
        folder: Path,
        again: bool,
    ) -> None:
        import submitit

        self.folder = folder
        folder.mkdir(parents=True)
        executor = submitit.AutoExecutor(folder=folder / "%j", cluster="slurm")
        executor.update_parameters(
            name="autograder",
            timeout_min=cluster.minutes,
            cpus_per_task=cluster.jobs,
            mem_gb=math.ceil(cluster.jobs * (settings.memory_gib + 1)),
            slurm_array_parallelism=cluster.at_once,
            **({"slurm_partition": cluster.partition} if cluster.partition else {}),
            **({"gpus_per_node": cluster.gpus} if cluster.gpus else {}),
        )
        self._answers = [folder / f"{number}.jsonl" for number in range(len(chunks))]
        count = len(chunks)
        jobs = executor.map_array(
            grade_chunk,
            *([str(root)] * count, chunks, [asdict(settings)] * count),
            *([cluster.jobs] * count, [again] * count, [str(path) for path in self._answers]),
        )
        self.id = str(jobs[0].job_id).partition("_")[0]

    def outcomes(self) -> Iterator[Outcome]:
        """Yield the answers until all jobs have left Slurm's queue; if interrupted, end the jobs.

        This calls squeue, which also lists a job that waits for another node. submitit would query
        Slurm's accounting, which not every cluster has.
        """
        read = [0] * len(self._answers)
        try:
            running = True
            while running:
                running = self._in_queue()  # first, so that the last answers are read after the end
                for number, path in enumerate(self._answers):
                    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
                    for line in lines[read[number] :]:
                        try:
                            outcome = Outcome(**json.loads(line))
                        except (ValueError, TypeError):
                            break  # the line is not complete yet
                        read[number] += 1
                        yield outcome
                if running:
                    time.sleep(LOOK_EVERY)
        except BaseException:
            subprocess.run(["scancel", self.id], capture_output=True, check=False)
            raise

    def _in_queue(self) -> bool:
        asked = subprocess.run(
            ["squeue", "--noheader", "--jobs", self.id, "--format", "%i"],
            capture_output=True,
            text=True,
            check=False,
        )
        if asked.returncode and "Invalid job id" not in asked.stderr:
            return True  # the controller does not answer; perhaps it restarts
        return bool(asked.stdout.strip())
