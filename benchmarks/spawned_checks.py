"""Test cells as courses usually write them, to compare with ours: `mp.spawn` per case, and gloo.

`grading.py` puts this file next to a notebook that stock nbgrader grades. The cases, their inputs
and what is right come from our own checks. Only the place where the ranks run differs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from autograder.passes.examine import Exam
from course_lib.checking import Case, Check, Observed, run_check
from course_lib.ranks.wire import Plain


def _rank(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
    )
    program, function, inputs = cloudpickle.loads(Path(folder, "work").read_bytes())
    Path(folder, str(rank)).write_bytes(cloudpickle.dumps(program(function, inputs[rank])))
    dist.destroy_process_group()
    # The program keeps the groups that it made, and their gloo threads are still running. So C++
    # would abort at the interpreter's end.
    os._exit(0)


def passes(name: str, function: Callable[..., Any], source: str) -> bool:
    """Return whether a function passes the check `name` of the assignment in `source`."""
    # An editable installation does not reach a spawned rank by itself.
    sys.path[:0] = [path for path in ("", str(Path(__file__).parent)) if path not in sys.path]
    check = Exam.of(Path(source)).checks[name]
    hidden = check.hidden("seed")
    alone = all(case.world_size == 1 for case in (*check.cases, *hidden))

    def run(check: Check, case: Case, inputs: Sequence[Plain]) -> Observed:
        if alone:  # no group is needed, so no process is started
            return Observed([check.program(function, inputs[0])])
        with tempfile.TemporaryDirectory() as folder:
            work = cloudpickle.dumps((check.program, function, inputs))
            Path(folder, "work").write_bytes(work)
            mp.spawn(_rank, (case.world_size, folder), nprocs=case.world_size)
            ranks = range(case.world_size)
            outputs = [Path(folder, str(rank)).read_bytes() for rank in ranks]
            return Observed([cloudpickle.loads(output) for output in outputs])

    # The messages cannot be seen from here, so expectations are left out.
    return run_check(name, replace(check, expects=()), run, seed="seed", hidden=hidden).passed
