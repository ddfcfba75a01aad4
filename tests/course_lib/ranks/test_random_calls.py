"""Calls drawn at random, good and failing ones, on the same ranks: each is right or explained."""

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
from tests.helpers.emulated_nccl import emulate

# Fresh ranks would otherwise import this file, and hypothesis with it, after every failure.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

K = 3
CALLS = int(os.environ.get("RANDOM_CALLS", "60"))
"""More of them: ``RANDOM_CALLS=200``."""


def good_sum(number: int) -> None:
    x = torch.arange(float(number + 1)) + dist.get_rank()
    dist.all_reduce(x)
    assert torch.equal(x, K * torch.arange(number + 1) + K * (K - 1) / 2)


def good_exchange(number: int) -> None:
    rank = dist.get_rank()
    theirs = torch.empty(number + 1)
    request = dist.isend(torch.full((number + 1,), float(rank)), (rank + 1) % K, tag=number)
    dist.recv(theirs, (rank - 1) % K, tag=number)
    request.wait()
    assert (theirs == (rank - 1) % K).all()


def good_prints(number: int) -> None:
    for line in range(number):
        print(line, dist.get_rank())


def good_tensor(number: int) -> torch.Tensor:
    return torch.ones(number * 1000)


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


def good_objects(number: int) -> None:
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


def good_group(number: int) -> None:
    """Uses the groups of earlier calls, and makes one for a later call."""
    ends = [0, K - 1]
    for group in kept():
        x = torch.full((number + 1,), 1.0 + dist.get_rank())
        if dist.get_rank() in ends:
            dist.all_reduce(x, group=group)
        assert (x == (K + 1 if dist.get_rank() in ends else 1 + dist.get_rank())).all()
    kept().append(dist.new_group(ends))
    del kept()[:-3]


def forget() -> None:
    kept().clear()


def good_destroys(number: int) -> None:
    good_sum(number)
    kept().clear()
    dist.destroy_process_group()
    if number % 2:
        dist.init_process_group("gloo")
        good_sum(number)


def good_anyone(number: int) -> None:
    x = torch.full((number + 1,), float(number))
    if dist.get_rank():
        dist.send(x, 0)
    else:
        assert {dist.recv(x, None) for _ in range(1, K)} == set(range(1, K))


def bad_messages(number: int) -> None:
    if dist.get_rank() == 1:
        dist.send(torch.ones(number + 1), 0)
    elif dist.get_rank() == 0:
        dist.recv(torch.ones(number + 2), 1)


def bad_group(number: int) -> None:
    if dist.get_rank() == number % K:
        dist.new_group([0])


def bad_skips(number: int) -> None:
    if dist.get_rank() == number % K:
        dist.barrier()


def bad_raises(number: int) -> None:
    if dist.get_rank() == number % K:
        raise LookupError(number)
    dist.barrier()


def bad_exits(number: int) -> None:
    if dist.get_rank() == number % K:
        os._exit(number)
    dist.barrier()


def bad_leaves(number: int) -> None:
    if dist.get_rank() == number % K:
        sys.exit(number)


def bad_shapes(number: int) -> None:
    dist.all_reduce(torch.ones(1 + number * dist.get_rank() + dist.get_rank()))


def bad_dtypes(number: int) -> None:
    dtype = torch.float32 if dist.get_rank() else torch.int32
    dist.all_reduce(torch.ones(number + 1, dtype=dtype))


def bad_sources(number: int) -> None:
    dist.broadcast(torch.ones(number + 1), src=dist.get_rank())


def bad_receive(number: int) -> None:
    if dist.get_rank() == number % K:
        dist.recv(torch.ones(number + 1), src=(number + 1) % K)


def bad_sends(number: int) -> None:
    dist.send(torch.ones(number + 1), dst=(dist.get_rank() + 1) % K)


GOOD = [
    good_sum, good_exchange, good_prints, good_tensor, good_objects, good_group, good_destroys,
    good_anyone,
]  # fmt: skip
BAD: dict[Callable[[int], object], type[RanksError]] = {
    bad_skips: DeadlockError,
    bad_messages: MismatchError,
    bad_group: DeadlockError,
    bad_raises: RankError,
    bad_exits: RankError,
    bad_leaves: RankError,
    bad_shapes: MismatchError,
    bad_dtypes: MismatchError,
    bad_sources: MismatchError,
    bad_receive: DeadlockError,
    bad_sends: DeadlockError,
}


@pytest.fixture(
    scope="module", params=["simulated", "cpu", pytest.param("nccl", marks=pytest.mark.large)]
)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    on = "cpu" if request.param == "nccl" else request.param
    with Ranks(K, on=on, timeout=None) as ranks:
        if request.param == "nccl":
            ranks.run(emulate)
        yield ranks


def simulated(ranks: Ranks) -> bool:
    return not ranks.processes()


calls = st.one_of(*[st.sampled_from(GOOD)] * 3, st.sampled_from(list(BAD)))


@settings(
    max_examples=CALLS,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(call=calls, number=st.integers(0, 40), again=st.booleans())
def test_every_call_is_right_or_explained(
    ranks: Ranks, call: Callable[[int], object], number: int, again: bool
) -> None:
    if again:
        run_the_cell_again()
    if call not in BAD:
        results = ranks.run(call, number)
        if call is good_tensor:
            assert all(torch.equal(result, torch.ones(number * 1000)) for result in results)
        assert Config.made == 0  # the notebook's own
        return
    with pytest.raises(RanksError) as caught:
        ranks.run(call, number)
    if simulated(ranks):  # a call that failed has ended their groups
        ranks.run(forget)
        if call is bad_exits:  # it ends the process of all of them
            return
    assert type(caught.value) is BAD[call], caught.value
    assert len(caught.value.states) == K
    assert caught.value.summary


def boards() -> int:
    """Return how many boards this process has in its memory, those of other tests' ranks too."""
    return Path("/proc/self/maps").read_text().count("memfd:board")


def test_nothing_is_left() -> None:
    """After many calls: the ranks, and no descriptor, no file, no shared memory."""
    before = boards()
    with Ranks(K, on="cpu", timeout=None) as ranks:
        ranks.run(good_sum, 1)
        server = shared_server().process
        assert isinstance(server.pid, int)
        fds = len(os.listdir("/proc/self/fd"))
        for bad in (bad_raises, bad_exits, bad_shapes):
            with pytest.raises(RanksError):
                ranks.run(bad, 0)
            ranks.run(good_sum, 1)
        assert len(os.listdir("/proc/self/fd")) == fds
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        assert set(ranks.processes()) <= {int(pid) for pid in children}
        assert boards() <= before + 1
        assert not [name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "ranks"))]
