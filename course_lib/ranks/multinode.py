"""Run the same functions on several machines: started by ``torchrun``, with one merged trace.

On every machine, with a file ``train.py`` that defines ``main()`` as for `Ranks.run`:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 \
        --master-addr first-machine --master-port 29500 \
        -m course_lib.ranks.multinode train.py:main --trace trace.json

On the second machine, run the same with ``--node-rank 1``. Further arguments are passed to the
function as text. Under Slurm, use ``srun torchrun …`` with ``--rdzv-backend c10d``, as described in
PyTorch's documentation. If gloo picks the wrong network card, set ``GLOO_SOCKET_IFNAME``.

Rank 0 writes the trace of all machines, in the time of its own clock. The clocks of the other
machines are compared with it at barriers, so the times agree to within about the time of a message.
The machines share no board, so a hang ends by ``--timeout``, without an explanation.
"""

from __future__ import annotations

import argparse
import os
import runpy
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks.explain.lines import locator
from course_lib.ranks.memory import anonymous_file
from course_lib.ranks.processes.board import Board
from course_lib.ranks.processes.board_views import MessageChannel, RankPhase
from course_lib.ranks.processes.metered_group import MeteredProcessGroup
from course_lib.ranks.processes.rank_recorder import RankRecorder
from course_lib.ranks.processes.world import install
from course_lib.ranks.trace.event import Event
from course_lib.ranks.trace.trace import Trace

_ROUNDS = 5
_ANY_NUMBER = 1 << 60


class _OwnBoard(Board):
    """A board of one rank alone: the others count as ready for everything, and the wait is gloo's.

    Args:
        rank: this rank.
        world_size: number of ranks.

    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(anonymous_file("board"), world_size)
        self._rank = rank
        self.set_all(RankPhase.FINISHED)
        self.set_state(rank, RankPhase.RUNNING)

    def count(self, rank: int, channel: MessageChannel) -> int:
        return super().count(rank, channel) if rank == self._rank else _ANY_NUMBER

    def collectives_entered(self, rank: int, key: int) -> int:
        return super().collectives_entered(rank, key) if rank == self._rank else _ANY_NUMBER


def _no_source(*_: Any) -> dist.Work:
    raise NotImplementedError(
        "over several machines, recv needs a source: dist.recv(tensor, src=…)"
    )


def join_from_environment(timeout: float) -> RankRecorder:
    """Join the process group that ``torchrun`` describes, metered, and return its recorder."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "gloo"
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        backend = "nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.init()  # type: ignore[no-untyped-call]
    recorder = RankRecorder(_OwnBoard(rank, world_size), rank, [], locator({}))
    MeteredProcessGroup.recv_anysource = _no_source  # type: ignore[assignment]
    install(recorder, backend=backend)
    dist.init_process_group("metered", timeout=timedelta(seconds=timeout))
    return recorder


def clock_offset() -> float:
    """Return the seconds to add to this machine's monotonic clock to get rank 0's clock."""
    differences = []
    for _ in range(_ROUNDS):
        dist.barrier()
        now = time.monotonic()
        clocks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(clocks, now)
        differences.append(clocks[0] - now)
    return float(statistics.median(differences))


def gather_trace(events: list[Event], offset: float) -> Trace | None:
    """Return the trace of all ranks, in rank 0's time, on rank 0; return ``None`` elsewhere."""
    shifted = [e._replace(start=e.start + offset, end=e.end + offset) for e in events]
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object([tuple(event) for event in shifted], gathered)
    if gathered is None:
        return None
    return Trace([Event(*event) for one in gathered for event in one], dist.get_world_size())


def main() -> None:
    """Run one function on every rank that ``torchrun`` has started."""
    parser = argparse.ArgumentParser(prog="course_lib.ranks.multinode")
    parser.add_argument("function", help="the function to run: path/to/file.py:function")
    parser.add_argument("--trace", type=Path, help="file into which rank 0 writes the whole trace")
    parser.add_argument(
        "--timeout", type=float, default=600, help="time limit for one operation, in seconds"
    )
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_intermixed_args()
    path, _, name = options.function.rpartition(":")
    if not Path(path).is_file() or name not in (defined := runpy.run_path(path)):
        parser.error(f"{options.function!r} names no function: write path/to/file.py:function")
    recorder = join_from_environment(options.timeout)
    offset = clock_offset()
    recorder.begin()
    start = time.monotonic()
    defined[name](*options.arguments)
    end = time.monotonic()
    recorder.settle()
    trace = gather_trace([*recorder.events, *recorder.compute(start, end)], offset)
    if trace is not None:
        print(trace)
        if options.trace is not None:
            trace.to_chrome(options.trace)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
