"""Ranks that start anew agree on a name, whatever an earlier start has left."""

import threading
import time

import pytest
from torch.distributed import HashStore

from course_lib.train.meeting import agree_on_name


def test_ranks_agree_on_a_new_name_whatever_an_earlier_start_has_left():
    store = HashStore()
    seen: set[str] = set()
    for late in (0, 1, 2, 0):  # who comes last sees the others' keys, or they the old ones
        names: list[str] = [""] * 3

        def come(rank: int, late: int = late, names: list[str] = names) -> None:
            time.sleep(0.05 * (rank == late))
            names[rank] = agree_on_name(store, rank, 3, timeout=10)

        threads = [threading.Thread(target=come, args=(rank,), daemon=True) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=300)
        assert len(set(names)) == 1
        assert names[0] not in seen | {""}
        seen.add(names[0])
    # One that was killed between two of its steps has left a token that nobody will answer for.
    store.set("token of rank 1", "abandoned")
    with pytest.raises(TimeoutError, match=r"did not join within 0.1 s: 1, 2\."):
        agree_on_name(store, 0, 3, timeout=0.1)
