"""Calls in any order, with what they leave behind: each is right or explained."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from course_lib.ranks import DeadlockError, MismatchError, RankError, Ranks

WORLDS = [pytest.param(k, marks=[pytest.mark.large] * (k != 3)) for k in (1, 2, 3, 4)]
CALLS = int(os.environ.get("RANDOM_CALLS", "60"))

# A class of a notebook: it exists in __main__ only, and is sent by value.
cell: dict[str, Any] = {"__name__": "__main__"}


def run_the_cell() -> None:
    """Run the cell that makes the class, the first time or again."""
    global Message
    exec("class Message:\n    made = 0\n    def __init__(self, rank): self.rank = rank", cell)
    Message = cell["Message"]


Message: Any
run_the_cell()


def kept() -> dict[tuple[int, int], Any]:
    """Return (rank, number) → group; of a module, since the globals of cells are sent."""
    import builtins

    found: dict[tuple[int, int], Any] = vars(builtins).setdefault("kept_groups", {})
    return found


def make(number: int, members: list[int]) -> None:
    kept()[dist.get_rank(), number] = dist.new_group(members)


def make_on_some(members: list[int]) -> None:
    if dist.get_rank() in members:
        dist.new_group(members)


def add_up(number: int | None, length: int) -> list[float]:
    rank = dist.get_rank()
    group = None if number is None else kept()[rank, number]
    x = torch.full((length,), 1.0 + rank)
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.all_reduce(x, group=group)
    return x.tolist()


def exchange(number: int | None) -> list[int]:
    rank = dist.get_rank()
    group = None if number is None else kept()[rank, number]
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return []
    Message.made += 1
    assert Message.made == 1  # of this rank, and new in every call
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, Message(rank), group=group)
    assert all(type(each) is Message for each in found)
    return [each.rank for each in found]


def destroy(number: int | None) -> None:
    group = None if number is None else kept()[dist.get_rank(), number]
    dist.destroy_process_group(group)


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("as planned")
    dist.barrier()


def skip_on(rank: int) -> None:
    if dist.get_rank() != rank:
        dist.barrier()


def differ_on(rank: int) -> None:
    dist.all_reduce(torch.ones(2 + (dist.get_rank() == rank)))


class Model:
    """The values that the ranks should have."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.groups: dict[int, list[int]] = {}
        self.made = 0

    def call(self, ranks: Ranks, data: st.DataObject) -> None:
        action = data.draw(st.sampled_from(sorted(self.actions)), label="action")
        self.actions[action](self, ranks, data)

    def members(self, data: st.DataObject) -> list[int]:
        every = st.lists(st.integers(0, self.k - 1), min_size=1, unique=True)
        return sorted(data.draw(every, label="members"))

    def which(self, data: st.DataObject) -> int | None:
        return data.draw(st.sampled_from([None, *self.groups]), label="group")

    def make(self, ranks: Ranks, data: st.DataObject) -> None:
        members = self.members(data)
        ranks.run(make, self.made, members)
        self.groups[self.made] = members
        self.made += 1

    def make_on_some(self, ranks: Ranks, data: st.DataObject) -> None:
        members = self.members(data)
        if len(members) == self.k:
            ranks.run(make_on_some, members)
            return
        with pytest.raises(DeadlockError, match="new_group fewer than"):
            ranks.run(make_on_some, members)
        self.groups.clear()

    def add_up(self, ranks: Ranks, data: st.DataObject) -> None:
        number = self.which(data)
        members = range(self.k) if number is None else self.groups[number]
        length = data.draw(st.sampled_from([0, 1, 5]), label="length")
        total = float(sum(1 + member for member in members))
        for rank, found in enumerate(ranks.run(add_up, number, length)):
            assert found == [total if rank in members else 1.0 + rank] * length

    def exchange(self, ranks: Ranks, data: st.DataObject) -> None:
        number = self.which(data)
        members = list(range(self.k)) if number is None else self.groups[number]
        for rank, found in enumerate(ranks.run(exchange, number)):
            assert found == (members if rank in members else [])
        assert Message.made == 0

    def destroy(self, ranks: Ranks, data: st.DataObject) -> None:
        number = self.which(data)
        ranks.run(destroy, number)
        gone = list(self.groups) if number is None else [number]
        if gone:
            with pytest.raises(RankError, match="Make a new one with"):
                ranks.run(add_up, data.draw(st.sampled_from(gone), label="gone"), 1)
            self.groups.clear()

    def fail(self, ranks: Ranks, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, self.k - 1), label="rank")
        with pytest.raises(RankError, match="ValueError: as planned") as caught:
            ranks.run(raise_on, rank)
        assert caught.value.rank == rank
        self.groups.clear()

    def skip(self, ranks: Ranks, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, self.k - 1), label="rank")
        if self.k > 1:
            with pytest.raises(DeadlockError, match=f"rank {rank}, which ended"):
                ranks.run(skip_on, rank)
            self.groups.clear()

    def differ(self, ranks: Ranks, data: st.DataObject) -> None:
        if self.k > 1:
            with pytest.raises(MismatchError, match="3 elements"):
                ranks.run(differ_on, data.draw(st.integers(0, self.k - 1), label="rank"))
            self.groups.clear()

    actions: ClassVar = {
        "add_up": add_up,
        "destroy": destroy,
        "differ": differ,
        "exchange": exchange,
        "fail": fail,
        "make": make,
        "run_the_cell_again": lambda *_: run_the_cell(),
        "make_on_some": make_on_some,
        "make_too": make,
        "skip": skip,
    }


@pytest.fixture(autouse=True, scope="module")
def functions_travel_as_those_of_a_notebook() -> Iterator[None]:
    this = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(this)
    yield
    cloudpickle.unregister_pickle_by_value(this)


@pytest.mark.parametrize("k", WORLDS)
@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_calls(k: int, data: st.DataObject) -> None:
    model, ranks = Model(k), Ranks(k, on="simulated", timeout=60, misuse="error")
    for _ in range(CALLS // 6):
        model.call(ranks, data)
    assert not dist.is_initialized()
