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
The machines share no board. So ``--timeout`` ends a hang, without an explanation. To get an
explanation, run the script with `course_lib.ranks.watch`.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks.explain.lines import locator
from course_lib.ranks.processes.board import MAX_BOARD_RANKS, Board
from course_lib.ranks.processes.board_views import RankPhase
from course_lib.ranks.processes.rank_recorder import RankRecorder
from course_lib.ranks.processes.world import install
from course_lib.ranks.trace.event import Event
from course_lib.ranks.trace.trace import Trace

_ROUNDS = 5


def load_function(target: str) -> Callable[..., Any]:
    """Return the function that ``path/to/file.py:name`` names.

    Raises:
        SystemExit: there is no such file or function; the message says which.

    """
    path, _, name = target.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path) if path else None
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise SystemExit(f"{target!r} does not name a function: write path/to/file.py:function")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise SystemExit(f"{path} defines no function {name}")
    return function  # type: ignore[no-any-return]


def join_from_environment(timeout: float) -> RankRecorder:
    """Join the process group that ``torchrun`` describes, metered, and return its recorder."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > MAX_BOARD_RANKS:
        raise SystemExit(f"at most {MAX_BOARD_RANKS} ranks can be traced, got {world_size}")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    backend = "gloo"
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        backend = "nccl"
        torch.cuda.set_device(local)
        torch.cuda.init()  # type: ignore[no-untyped-call]
    board = Board.create(world_size)
    recorder = RankRecorder(board, rank, [], locator({}), alone=True)
    install(recorder, backend=backend)
    dist.init_process_group("metered", timeout=timedelta(seconds=timeout))
    board.set_state(rank, RankPhase.RUNNING)
    return recorder


def clock_offset() -> float:
    """Return the seconds to add to this machine's monotonic clock to get rank 0's clock."""
    differences = []
    for _ in range(_ROUNDS):
        dist.barrier()
        mine = time.monotonic()
        clocks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(clocks, mine)
        differences.append(clocks[0] - mine)
    return float(statistics.median(differences))


def gather_trace(events: list[Event], offset: float) -> Trace | None:
    """Return the trace of all ranks, in rank 0's time, on rank 0; return ``None`` elsewhere."""
    shifted = [e._replace(start=e.start + offset, end=e.end + offset) for e in events]
    first = dist.get_rank() == 0
    gathered: list[Any] | None = [None] * dist.get_world_size() if first else None
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
    # The ranks of one machine share torchrun's output. Lines of different ranks cannot mix if each
    # line is written in one piece. Under PYTHONUNBUFFERED, a print writes each argument separately.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    function = load_function(options.function)
    recorder = join_from_environment(options.timeout)
    offset = clock_offset()
    recorder.begin()
    start = time.monotonic()
    function(*options.arguments)
    end = time.monotonic()
    recorder.settle()
    events = [*recorder.events, *recorder.compute(start, end)]
    trace = gather_trace(events, offset)
    if trace is not None:
        print(trace)
        if options.trace is not None:
            trace.to_chrome(options.trace)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
