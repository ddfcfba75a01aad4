"""Scripts ask a group what it is, and give barriers a time limit: the answers are PyTorch's."""

import inspect
import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks import DeadlockError, RankError, Ranks

KINDS = [
    pytest.param({"on": "cpu", "metered": False}, id="plain gloo"),
    pytest.param({"on": "cpu"}, id="cpu"),
    pytest.param({"on": "simulated"}, id="simulated"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_backend_is_called_as_pytorch_calls_it(kind) -> None:
    def names() -> list[object]:
        from torch.distributed import get_backend  # as some scripts have it

        of_two, of_gloo = dist.new_group([0, 1]), dist.new_group([0, 1], backend="gloo")
        groups = [None, of_two, of_gloo]
        return [
            *(dist.get_backend(group) for group in groups),
            *(dist.get_backend_config(group) for group in groups),
            get_backend(),
        ]

    with Ranks(2, **kind) as ranks:
        config = "cpu:gloo,cuda:gloo"
        expected = ["gloo"] * 3 + [config] * 3 + ["gloo"]
        assert ranks.run(names) == [expected] * 2


def monitored(limit: timedelta) -> None:
    dist.monitored_barrier(timeout=limit)


def barrier(limit: timedelta) -> None:
    dist.barrier(timeout=limit)


needs_limit = pytest.mark.skipif(
    "timeout" not in inspect.signature(dist.barrier).parameters,
    reason="in this PyTorch, barrier() has no limit of its own",
)
BARRIERS = [monitored, pytest.param(barrier, marks=needs_limit)]


def method(limit: timedelta) -> None:
    dist.group.WORLD.monitored_barrier(limit)


def collective(limit: timedelta) -> None:
    dist.all_reduce(torch.ones(1), async_op=True).wait(limit)


def message(limit: timedelta) -> None:
    dist.irecv(torch.ones(1), src=1).wait(limit)


@pytest.mark.parametrize("on", ["cpu", "simulated"])
@pytest.mark.parametrize("waits", [*BARRIERS, method, collective, message])
@pytest.mark.parametrize("late", [False, True])
def test_a_wait_with_a_limit_of_its_own_ends_by_it(on, waits, late: bool) -> None:
    """Also where another rank never comes, which would be a deadlock without the limit."""

    def program() -> str:
        if dist.get_rank() == 1:
            time.sleep(1.5 if late else 0)
            return ""
        try:
            waits(timedelta(seconds=0.3))
        except RuntimeError as error:
            return str(error)
        return "nothing"

    with Ranks(3, on=on, timeout=60) as ranks:
        messages = ranks.run(program)
        assert messages[1] == ""
        # When one rank has given up, gloo tells the other that its connection is gone.
        assert "nothing" not in messages, messages
        assert "within its own time limit of 0.3 s" in str(messages)
        ranks.run(dist.barrier)  # the next call works


@pytest.mark.parametrize("on", ["cpu", "simulated"])
@pytest.mark.parametrize("waits", [*BARRIERS, method])
def test_a_limit_that_is_kept_changes_nothing(on, waits) -> None:
    with Ranks(3, on=on, timeout=60) as ranks:
        ranks.run(waits, timedelta(seconds=60))
        assert [ranks.trace.calls(rank)["barrier"] for rank in range(3)] == [1, 1, 1]
        with pytest.raises(DeadlockError, match="rank 1"):  # without a limit, at once
            ranks.run(lambda: dist.get_rank() == 1 or dist.monitored_barrier())


@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_that_is_refused_has_not_taken_place(kind) -> None:
    """A rank that catches the error calls it again, rightly, and meets the others."""

    def program() -> tuple[bool, float]:
        part, refused = torch.empty(1), False
        parts = [torch.tensor([10.0 + rank]) for rank in range(3)]
        root_parts = parts if dist.get_rank() == 0 else None
        if root_parts is not None:
            try:
                dist.scatter(part, root_parts[:1], src=0)
            except (RuntimeError, ValueError):
                refused = True
        dist.scatter(part, root_parts, src=0)
        return refused, part.item()

    with Ranks(3, timeout=60, **kind) as ranks:
        assert ranks.run(program) == [(True, 10.0), (False, 11.0), (False, 12.0)]


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="PyTorch has it since 2.14")
@pytest.mark.parametrize("kind", KINDS[1:])  # gloo itself cannot do it
@pytest.mark.parametrize("length", [1, 3])
def test_gather_single_fills_the_rows_of_one_tensor(kind, length: int) -> None:
    def program(length: int) -> list[float]:
        rank = dist.get_rank()
        rows = torch.zeros(3, length) if rank == 1 else None
        dist.gather_single(torch.arange(float(length)) + 10 * rank, rows, dst=1)
        return [] if rows is None else rows.flatten().tolist()

    with Ranks(3, **kind) as ranks:
        expected = [10.0 * rank + i for rank in range(3) for i in range(length)]
        assert ranks.run(program, length) == [[], expected, []]


@pytest.mark.parametrize("on", ["cpu", "simulated"])
def test_a_hook_that_would_never_run_is_refused(on) -> None:
    """PyTorch 2.14 took it, and called it only on groups in C++."""
    with Ranks(2, on=on) as ranks, pytest.raises(RankError, match=r"look at ranks\.trace"):
        ranks.run(lambda: dist.group.WORLD.register_post_hook(1, print))


WITH_RECORDER = """
import torch, torch.distributed as dist
from course_lib.ranks import Ranks

def total():
    dist.new_group([0])
    dist.all_reduce(x := torch.ones(1))
    return x.item()

for on in ("cpu", "simulated"):
    with Ranks(2, on=on) as ranks:
        assert ranks.run(total) == [2.0, 2.0]
"""


@pytest.mark.large
def test_pytorch_s_flight_recorder_may_be_on() -> None:
    """PyTorch 2.15 attached it to every group, also to those of Python, where it failed."""
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "2000"}
    command = [sys.executable, "-c", WITH_RECORDER]
    completed = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
