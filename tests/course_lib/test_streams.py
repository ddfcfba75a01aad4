"""Rows of a stream: none twice, none lost, whatever K, workers and position are."""

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from course_lib.data import own_rows, shuffled, until_one_ends
from course_lib.ranks import Ranks


def readers(n: int, k: int, workers: int, position: int, batch_size: int) -> list[list[int]]:
    return [
        list(own_rows(iter(range(n)), rank, k, worker, workers, position, batch_size))
        for rank in range(k)
        for worker in range(workers)
    ]


@given(
    st.integers(0, 60),
    *(st.integers(1, 4), st.integers(1, 3), st.integers(0, 4), st.integers(1, 5)),
    st.integers(1, 3),
)
def test_no_row_is_lost_if_other_ranks_go_on(left, k, workers, steps, other_k, batch_size):
    """From the position after some steps, the ranks read the rows that are left, each once."""
    n = steps * k * batch_size + left
    first = []
    for rank in range(k):
        by_worker = [own_rows(range(n), rank, k, w, workers, 0, batch_size) for w in range(workers)]
        for step in range(steps):  # as a DataLoader: a batch from each worker in turn
            first += [next(by_worker[step % workers]) for _ in range(batch_size)]
    rest = readers(n, other_k, workers, n - left, batch_size)
    assert sorted(chain(first, *rest)) == list(range(n))


class Stream(IterableDataset[int]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self):
        worker = get_worker_info()
        return own_rows(range(20), self.rank, 2, worker.id, worker.num_workers, batch_size=3)


def test_a_loader_with_workers_gives_the_steps_in_order():
    first, second = (list(DataLoader(Stream(rank), 3, num_workers=2)) for rank in (0, 1))
    steps = [sorted(a.tolist() + b.tolist()) for a, b in zip(first, second, strict=True)]
    assert steps == [list(range(start, min(20, start + 6))) for start in range(0, 20, 6)]


@given(st.integers(0, 40), st.integers(1, 8), st.integers(0, 5))
def test_shuffled_is_an_order_of_the_rows_and_equal_on_all_readers(n, size, seed):
    once, again = (
        list(shuffled(iter(range(n)), size, torch.Generator().manual_seed(seed))) for _ in range(2)
    )
    assert once == again
    assert sorted(once) == list(range(n))
    assert all(row <= place + size for place, row in enumerate(once))


def test_shuffled_moves_rows():
    assert list(shuffled(range(40), 10, torch.Generator().manual_seed(0))) != list(range(40))


def unequal_steps() -> list[int]:
    count = 5 - dist.get_rank()
    steps = []
    for step in until_one_ends(range(count)):
        dist.all_reduce(torch.ones(3))  # hangs if one rank steps more often
        steps.append(step)
    return steps


@pytest.mark.parametrize("on", ["simulated", "cpu"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_all_ranks_take_as_many_steps_as_the_shortest(on, k):
    with Ranks(k, on=on) as ranks:
        assert ranks.run(unequal_steps) == [list(range(6 - k))] * k
