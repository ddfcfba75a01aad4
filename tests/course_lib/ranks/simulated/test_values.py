"""Every operation gives, on simulated ranks, what gloo gives on real ones."""

import time

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks.explain.errors import RankError
from course_lib.ranks.ranks import Ranks


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: dist.all_reduce(torch.ones(2).int(), op=dist.ReduceOp.AVG), "AVG.*floating"),
        (lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND), "BAND.*integers"),
        (lambda: dist.send(torch.ones(1), 2), "rank 2"),
        (lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)), "divi"),
        (lambda: dist.all_to_all_single(torch.ones(2), torch.ones(2), [1] * 2, [2] * 2), "split"),
        (lambda: dist.all_reduce(torch.ones(3).to_sparse()), r"to_dense\(\)"),
        (lambda: dist.all_gather([torch.ones(2)] * 2, torch.ones(2, device="meta")), "no values"),
        (lambda: time.sleep(-1), "non-negative"),
    ],
)
def test_what_is_refused_says_why(ranks_of, call, reason):
    with pytest.raises(RankError, match=f"raised.*{reason}"):
        ranks_of("simulated", 2).run(call)


def _meta() -> torch.Size:
    x = torch.empty(10**12, device="meta", dtype=torch.float32)
    dist.all_reduce(x)
    peer = 1 - dist.get_rank()
    work = dist.isend(x, peer)
    dist.recv(torch.empty_like(x), peer)
    work.wait()
    return x.shape


def test_meta_tensors_cost_time_and_no_memory() -> None:
    ranks = Ranks(2, on="simulated")
    assert ranks.run(_meta) == [torch.Size([10**12])] * 2
    # Ring all-reduce of n bytes on two ranks, then n bytes each way: 2 n/β and three latencies.
    assert ranks.trace.makespan == pytest.approx(3 * 20e-6 + 2 * 4e12 / 10e9)
