"""Ranks that another thread closes while they run a call: the call says so, and all is ended."""

import threading
import time

import pytest
import torch.distributed as dist

from course_lib.ranks import Ranks, RanksError
from tests.helpers.kernels import wait_until_gone

KINDS = [{"on": "cpu"}, {"on": "cpu", "metered": False}, {"on": "simulated"}]


def without_end(marker, messages: bool) -> None:
    marker.touch()
    while True:
        if messages:
            dist.barrier()


@pytest.mark.parametrize("messages", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_call_is_told_that_its_ranks_are_closed(kind, messages, tmp_path):
    marker = tmp_path / "begun"

    def closes() -> None:
        while not marker.exists():
            time.sleep(0.01)
        ranks.close()

    ranks = Ranks(2, timeout=120, **kind)
    ranks.run(dist.barrier)
    pids = ranks.processes()
    closing = threading.Thread(target=closes, daemon=True)
    closing.start()
    with pytest.raises(RanksError, match="Another thread closed the ranks while they ran"):
        ranks.run(without_end, marker, messages)
    closing.join()
    with pytest.raises(RanksError, match="closed"):
        ranks.run(dist.barrier)
    assert not wait_until_gone(pids)
    with Ranks(2, **kind) as further:  # they do not share what was closed
        further.run(dist.barrier)
