"""Where PyTorch waits for futures in C++, the other ranks get their turn all the same.

`ddp.test_surroundings` has PyTorch's own DDP, which does so with a static graph.
"""

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks.ranks import Ranks


def all_of(futures):
    return torch.futures.wait_all(futures)


def collected(futures):
    return [future.value() for future in torch.futures.collect_all(futures).wait()]


def chained(futures):
    return [future.then(lambda f: f.value()).wait() for future in futures]


@pytest.mark.parametrize("wait", [all_of, collected, chained])
def test_futures_waited_for_together(wait) -> None:
    def fn() -> list[float]:
        x = [torch.full((2,), i + 1.0 + dist.get_rank()) for i in range(3)]
        futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in x]
        wait(futures)
        return [tensor[0].item() for tensor in x]

    assert Ranks(3, on="simulated", timeout=60).run(fn) == [[6.0, 9.0, 12.0]] * 3
