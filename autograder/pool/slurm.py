"""A class on a cluster: chunks of submissions as an array job of Slurm's, through submitit.

A job gets paths and runs the same pool as at home over its share of them. What it has graded lies
on the disk that all nodes see, so its answer is not needed: of a job that was lost with its node,
what is not there yet is sent again.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autograder.passes.settings import ATTEMPTS, Settings
from autograder.pool.outcome import MACHINE, Outcome

LOOK_EVERY = 3.0
"""Seconds between two questions to Slurm."""


class SlurmUnavailable(RuntimeError):
    """No cluster can be reached from here; the message says what is missing."""


@dataclass(frozen=True)
class Cluster:
    """What is asked of Slurm.

    Attributes:
        jobs: submissions at a time in each element of the array.
        chunk: submissions for each element.
        minutes: for each element; longer, and Slurm ends it.
        partition: where; empty: the default one.
        gpus: for each element.
        at_once: elements at a time.

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
    group.add_argument("--chunk", type=int, default=10, help="submissions per job (%(default)s)")
    group.add_argument("--minutes", type=int, default=60, help="time limit of a job (%(default)s)")
    group.add_argument("--partition", default="", help="Slurm's partition (default: its own)")
    group.add_argument("--gpus", type=int, default=1, help="per job, with --on gpu (%(default)s)")


def cluster(arguments: argparse.Namespace, jobs: int) -> Cluster | None:
    """Return what the command line asks of Slurm, or None.

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
            "--slurm needs Slurm's sbatch, which is not on PATH: log in where jobs are submitted, "
            "or grade without --slurm"
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
    """Grade submitted notebooks on a cluster; return what became of each, in their order.

    Args:
        root: the course folder, which all nodes see at the same path.
        paths: the notebooks: STUDENT/ASSIGNMENT/NOTEBOOK.ipynb.
        settings: how they are examined.
        cluster: what is asked of Slurm.
        folder: for job files and logs, seen by all nodes. No student's code can see it.
        again: also those that have a verdict on the same content.
        tell: is given each outcome as it comes.

    """
    waiting = [str(path.resolve()) for path in paths]
    outcomes: dict[str, Outcome] = {}
    for attempt in range(1, ATTEMPTS + 1):
        chunks = [waiting[n : n + cluster.chunk] for n in range(0, len(waiting), cluster.chunk)]
        if not chunks:
            break
        array = _Array(root, chunks, settings, cluster, folder / f"{time.time_ns()}", again)
        print(f"Slurm: array {array.id} of {len(chunks)} jobs; logs in {array.folder}", flush=True)
        for outcome in array.outcomes():
            if outcome.path in outcomes:
                continue  # of a job that Slurm itself gave to another node
            if outcome.fault != MACHINE or attempt == ATTEMPTS:
                outcomes[outcome.path] = outcome
                tell(outcome)
        waiting = [path for path in waiting if path not in outcomes]
    for path in waiting:
        lost = f"its job was lost, {ATTEMPTS} times; Slurm's logs are in {folder}"
        outcomes[path] = Outcome(path, failed=lost, fault=MACHINE)
        tell(outcomes[path])
    return [outcomes[str(path.resolve())] for path in paths]


def grade_chunk(
    root: str, paths: list[str], settings: dict[str, Any], jobs: int, again: bool, answers: str
) -> None:
    """Grade a share of the class, on a node; write one line of JSON for each to `answers`."""
    from autograder.pool import local  # torch: not where only options are read

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
        """Yield what is answered until Slurm has none of the jobs any more; end them if asked to.

        Slurm is asked by squeue, which knows of a job that waits for another node; accounting, by
        which submitit would ask, is not on every cluster.
        """
        read = [0] * len(self._answers)
        try:
            running = True
            while running:
                running = self._in_queue()  # first: what it wrote before its end is read after
                for number, path in enumerate(self._answers):
                    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
                    for line in lines[read[number] :]:
                        try:
                            outcome = Outcome(**json.loads(line))
                        except (ValueError, TypeError):
                            break  # half of a line, so far
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
            return True  # the controller does not answer now: it may be restarting
        return bool(asked.stdout.strip())
