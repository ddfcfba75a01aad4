"""Every operation gives, on simulated ranks, what gloo gives on real ones."""

import time

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks.ranks import Ranks


def _refused() -> list[str]:
    k = dist.get_world_size()
    texts = []
    for call in (
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), op=dist.ReduceOp.AVG),
        lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND),
        lambda: dist.send(torch.ones(1), k),
        lambda: dist.all_to_all_single(torch.ones(k + 1), torch.ones(k + 1)),
        lambda: dist.all_to_all_single(torch.ones(k), torch.ones(k), [1] * k, [2] * k),
        lambda: dist.all_reduce(torch.ones(3).to_sparse()),
        lambda: dist.all_gather([torch.ones(2)] * k, torch.ones(2, device="meta")),
        lambda: time.sleep(-1),
    ):
        try:
            call()
            texts.append("nothing")
        except (ValueError, RuntimeError, NotImplementedError) as error:
            texts.append(str(error))
    return texts


def test_what_is_refused_says_why() -> None:
    avg, band, peer, divide, splits, sparse, meta, sleep = Ranks(2, on="simulated").run(_refused)[0]
    assert "AVG" in avg and "floating" in avg
    assert "BAND" in band and "integers" in band
    assert "2" in peer
    assert "divi" in divide
    assert "split" in splits.lower()
    assert "to_dense()" in sparse and "have no values" in meta and "non-negative" in sleep


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
