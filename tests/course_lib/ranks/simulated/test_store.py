"""The store of simulated ranks answers as PyTorch's own does, and its waits take virtual time."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from course_lib.ranks.ranks import Ranks
from course_lib.ranks.simulated.store import SimulatedStore

CALLS: list[tuple[Any, ...]] = [
    ("set", "a", "1"),
    ("get", "a"),
    ("add", "n", 3),
    ("add", "n", -5),
    ("get", "n"),
    ("append", "a", "x"),
    ("append", "new", "y"),
    ("multi_get", ["a", "new"]),
    ("compare_set", "c", "wrong", "not there yet"),
    ("compare_set", "c", "", "first"),
    ("compare_set", "c", "wrong", "refused"),
    ("compare_set", "c", "first", "second"),
    ("get", "c"),
    ("multi_set", ["p", "q"], ["1", "2"]),
    ("check", ["p", "q", "a"]),
    ("check", ["p", "nobody set it"]),
    ("wait", ["p", "q"]),
    ("num_keys",),
    ("delete_key", "p"),
    ("delete_key", "p"),
    ("check", ["p"]),
    ("num_keys",),
    ("has_extended_api",),
]


def answers(store: Any) -> list[Any]:
    return [getattr(store, name)(*arguments) for name, *arguments in CALLS]


def test_every_question_is_answered_as_by_pytorchs_store() -> None:
    (ours,) = Ranks(1, on="simulated").run(lambda: answers(SimulatedStore(1).clone()))
    assert ours == answers(dist.HashStore())


@pytest.mark.parametrize("k", [2, 3, 4])
def test_a_wait_ends_when_the_last_key_is_set(k: int) -> None:
    def program() -> tuple[list[int], float]:
        begin = time.monotonic()  # virtual, on simulated ranks
        rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
        if rank:
            time.sleep(rank)
            store.set(f"key {rank}", str(rank * rank))
            store.add("sum", rank)
        keys = [f"key {r}" for r in range(1, k)]
        values = store.multi_get(keys)
        return [int(value) for value in values], time.monotonic() - begin

    for rank, (values, now) in enumerate(Ranks(k, on="simulated").run(program)):
        assert values == [r * r for r in range(1, k)], f"rank {rank}"
        assert now == pytest.approx(k - 1), (
            f"rank {rank}: the last key comes {k - 1} s after the start"
        )
