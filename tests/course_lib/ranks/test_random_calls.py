"""Calls drawn at random, right and wrong ones, on the same ranks: each is right or explained."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from course_lib.ranks import DeadlockError, MismatchError, RankError, Ranks, RanksError
from course_lib.ranks.processes.fork_client import shared_server
from tests.course_lib.ranks import test_every_carrier
from tests.course_lib.ranks.test_every_carrier import PROGRAMS
from tests.helpers import student_bugs
from tests.helpers.emulated_nccl import emulate
from tests.helpers.student_bugs import BUGS

# Fresh ranks would otherwise import these files, and hypothesis with them, after every failure.
for each in (sys.modules[__name__], test_every_carrier, student_bugs):
    cloudpickle.register_pickle_by_value(each)

K = 4
CALLS = int(os.environ.get("RANDOM_CALLS", "40"))
"""More of them: ``RANDOM_CALLS=200``."""


def prints(number: int) -> None:
    for line in range(number):
        print(line, dist.get_rank())


def tensor(number: int) -> None:
    x = torch.arange(float(number + 1)) + dist.get_rank()
    dist.all_reduce(x)
    assert torch.equal(x, K * torch.arange(number + 1) + K * (K - 1) / 2)


class Config:
    """Stands for a class of a notebook: it travels by value, and is new in every call."""

    made = 0

    def __init__(self, number: int) -> None:
        self.number = number
        type(self).made += 1


def run_the_cell_again() -> None:
    """Make the class anew, as a notebook does when its cell runs again: the ranks know the old."""
    global Config
    body = {k: v for k, v in vars(Config).items() if k not in ("__dict__", "__weakref__")}
    Config = type("Config", (), body)  # type: ignore[misc]


def objects(number: int) -> None:
    everyone: list[Config | None] = [None] * K
    dist.all_gather_object(everyone, Config(number + dist.get_rank()))
    assert Config.made == 1  # of this rank
    assert [each.number for each in everyone if type(each) is Config] == list(
        range(number, number + K)
    )


def kept() -> list[Any]:
    """Return the groups that this rank keeps between calls; simulated ranks share a process."""
    import builtins

    found: list[Any] = vars(builtins).setdefault(f"kept_groups_{dist.get_rank()}", [])
    return found


def group(number: int) -> None:
    """Uses the groups of earlier calls, and makes one for a later call."""
    ends = [0, K - 1]
    for group in kept():
        x = torch.full((number + 1,), 1.0 + dist.get_rank())
        if dist.get_rank() in ends:
            dist.all_reduce(x, group=group)
        assert (x == (K + 1 if dist.get_rank() in ends else 1 + dist.get_rank())).all()
    kept().append(dist.new_group(ends))
    del kept()[:-3]


def forget(number: int = 0) -> None:
    kept().clear()
    if number:
        dist.destroy_process_group()


def exits(number: int) -> None:
    if dist.get_rank() == number % K:
        os._exit(number)
    dist.barrier()


RIGHT: list[Callable[[int], object]] = [prints, tensor, objects, group, forget]
EXPLAINED = (DeadlockError, MismatchError, RankError)
WRONG = [bug for bug in BUGS if bug.error in EXPLAINED and not bug.differs]
calls = st.one_of(
    st.sampled_from(RIGHT),
    st.sampled_from([each for each in PROGRAMS if K in each.ks and not each.but]),
    st.sampled_from([*WRONG, exits]),
)


@pytest.fixture(
    scope="module", params=["simulated", "cpu", pytest.param("nccl", marks=pytest.mark.large)]
)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    on = "cpu" if request.param == "nccl" else request.param
    with Ranks(K, on=on, timeout=None) as ranks:
        if request.param == "nccl":
            ranks.run(emulate)
        yield ranks


@settings(
    max_examples=CALLS,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(call=calls, number=st.integers(0, 40), again=st.booleans())
def test_every_call_is_right_or_explained(
    ranks: Ranks, call: Any, number: int, again: bool
) -> None:
    simulated = not ranks.processes()
    if again:
        run_the_cell_again()
    if call in RIGHT:
        ranks.run(call, number)
        assert Config.made == 0  # the notebook's own
        return
    if call in PROGRAMS:
        assert ranks.run(call.fn) == [call.returns(rank, K) for rank in range(K)]
        return
    with pytest.raises(RanksError) as caught:
        ranks.run(call.fn) if call in WRONG else ranks.run(call, number)
    if simulated:  # a call that failed has ended their groups
        ranks.run(forget)
    if call in WRONG:
        assert type(caught.value) is call.error, caught.value
    if call in WRONG or not simulated:  # else the process of all of them has ended
        assert len(caught.value.states) == K
    assert caught.value.summary


def boards() -> int:
    """Return how many boards this process has in its memory, those of other tests' ranks too."""
    return Path("/proc/self/maps").read_text().count("memfd:board")


def test_nothing_is_left() -> None:
    """After many calls: the ranks, and no descriptor, no file, no shared memory."""
    before = boards()
    with Ranks(K, on="cpu", timeout=None) as ranks:
        ranks.run(tensor, 1)
        server = shared_server().process
        assert isinstance(server.pid, int)
        fds = len(os.listdir("/proc/self/fd"))
        for wrong in (exits, *[bug.fn for bug in WRONG[:2]]):
            with pytest.raises(RanksError):
                ranks.run(*[wrong, 0][: 1 + (wrong is exits)])
            ranks.run(tensor, 1)
        assert len(os.listdir("/proc/self/fd")) == fds
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        assert set(ranks.processes()) <= {int(pid) for pid in children}
        assert boards() <= before + 1
        assert not [name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "ranks"))]
