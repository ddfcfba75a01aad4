"""After a failed call there are still the ranks, their variables, and the work they had done."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks import RankError, Ranks, RanksError
from course_lib.ranks.processes import object_pipe
from course_lib.ranks.processes.fork_client import shared_server
from course_lib.ranks.processes.object_pipe import ObjectPipe
from tests.course_lib.ranks.test_every_carrier import (
    a_ddp_step_against_a_receive,
    a_mismatch_that_was_not_waited_for,
)
from tests.helpers.student_bugs import one_raises


@pytest.fixture(scope="module")
def ranks():
    with Ranks(3, on="cpu", timeout=30) as ranks:
        yield ranks


def keep() -> None:
    import builtins

    builtins.kept = torch.full((2,), float(dist.get_rank())), dist.new_group([0, 2])


def use() -> list[float]:
    import builtins

    tensor, group = builtins.kept
    total = tensor.clone()
    if dist.get_rank() != 1:
        dist.all_reduce(total, group=group)
    dist.all_reduce(total)
    return total.tolist()


def raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise LookupError("gone")


def others_loop() -> None:
    raise_on_one()
    while True:
        pass


def left_behind() -> None:
    dist.isend(torch.ones(1), (dist.get_rank() + 1) % 3)


@pytest.mark.parametrize(
    "program",
    [
        others_loop,
        one_raises,
        a_ddp_step_against_a_receive,
        a_mismatch_that_was_not_waited_for,
        left_behind,
    ],
)
def test_the_ranks_and_their_variables_stay(ranks: Ranks, program) -> None:
    ranks.run(keep)
    before = ranks.processes()
    with pytest.raises(RanksError):
        ranks.run(program)
    for _ in range(2):
        assert ranks.run(use) == [[5.0, 5.0]] * 3
    assert ranks.processes() == before


def test_ranks_that_cannot_be_ended_are_replaced(ranks: Ranks) -> None:
    def stubborn() -> None:
        raise_on_one()
        while True:
            try:  # noqa: SIM105
                time.sleep(10)
            except BaseException:
                pass

    before = ranks.processes()
    with pytest.raises(RankError):
        ranks.run(stubborn)
    assert ranks.run(dist.get_rank) == [0, 1, 2]
    assert not set(ranks.processes()) & set(before)


def test_a_signal_that_is_heard_late_does_not_end_the_next_call(ranks: Ranks) -> None:
    """It is: the rank answers from its main thread, while the one that hears it has no turn."""

    def program() -> bool:
        from course_lib.ranks.processes import worker, world

        if dist.get_rank() == 0:
            time.sleep(0.5)
        waiting = dist.all_reduce(torch.ones(3), async_op=True).get_future()
        call = worker._current
        world._installed[0].board.give_up(call - 1)
        sys.setswitchinterval(10.0)
        worker._current = 0  # the call before has ended, and its signal comes
        os.kill(os.getpid(), signal.SIGUSR2)
        worker._begin(call)
        os.kill(os.getpid(), signal.SIGUSR2)  # and comes again
        sys.setswitchinterval(0.005)
        waiting.wait()
        return True

    assert ranks.run(program) == [True, True, True]


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize("end", ["closed", "exits", "killed"])
def test_what_a_rank_has_started_ends_with_it(end: str) -> None:
    """Also the processes that those have started, and however the rank ends."""
    from tests.helpers.kernels import wait_until_gone

    def start() -> list[int]:
        import subprocess

        shell = subprocess.Popen(
            ["sh", "-c", "sleep 300 & echo $!; wait"], stdout=subprocess.PIPE, text=True
        )
        return [shell.pid, int(shell.stdout.readline())]

    with Ranks(2, on="cpu") as short:
        first, *further = short.run(start)
        assert all(os.path.exists(f"/proc/{pid}") for pid in first)
        if end == "exits":
            with pytest.raises(RankError):
                short.run(lambda: os._exit(3) if dist.get_rank() == 0 else None)
        elif end == "killed":
            os.kill(short.processes()[0], signal.SIGKILL)
        if end != "closed":
            assert wait_until_gone(first) == []
    assert wait_until_gone([pid for pids in [first, *further] for pid in pids]) == []


@pytest.mark.parametrize(
    ("holder", "method"), [(object_pipe, "receive_exactly"), (ObjectPipe, "send")]
)
def test_an_interrupt_inside_a_message_waits_for_its_end(ranks, holder, method, monkeypatch):
    """Half of it would be taken for the next one, or a rank would wait for its call."""
    ranks.run(dist.get_rank)
    before = ranks.processes()
    once, interrupted = iter([True]), getattr(holder, method)

    def interrupt(*args):
        if next(once, False):
            signal.raise_signal(signal.SIGINT)
        return interrupted(*args)

    monkeypatch.setattr(holder, method, interrupt)
    with pytest.raises(KeyboardInterrupt):
        ranks.run(lambda: "x" * 5000)
    assert ranks.run(dist.get_rank) == [0, 1, 2]
    assert ranks.processes() == before


def gloo_threads() -> int:
    names = Path("/proc/self/task").glob("*/comm")
    return sum(name.read_text().startswith("gloo") for name in names)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_what_failed_calls_leave_behind_does_not_grow(ranks: Ranks) -> None:
    for _ in range(20):
        with pytest.raises(RankError):
            ranks.run(one_raises)
    deadline = time.monotonic() + 60
    # One of each group that is in use, and one of each in the last call that was given up.
    while max(ranks.run(gloo_threads)) > 16 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert max(ranks.run(gloo_threads)) <= 16


def boards() -> int:
    """Return how many boards this process has in its memory, those of other tests' ranks too."""
    return Path("/proc/self/maps").read_text().count("memfd:board")


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_nothing_is_left() -> None:
    """After failed calls: the ranks, and no descriptor, no file, no shared memory."""
    before = boards()
    with Ranks(3, on="cpu", timeout=30) as ranks:
        ranks.run(dist.barrier)
        server = shared_server().process
        fds = len(os.listdir("/proc/self/fd"))
        for failing in (lambda: os._exit(3), raise_on_one, a_ddp_step_against_a_receive):
            with pytest.raises(RanksError):
                ranks.run(failing)
            ranks.run(dist.barrier)
        assert len(os.listdir("/proc/self/fd")) <= fds  # fewer: garbage of earlier tests may go
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        assert set(ranks.processes()) <= {int(pid) for pid in children}
        assert boards() <= before + 1
        assert not [name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "ranks"))]
