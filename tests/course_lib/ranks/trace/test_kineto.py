"""Traces of PyTorch's profiler: counted exactly in a small file, and read from gloo ranks."""

import json
import time

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from course_lib.ranks import Ranks
from course_lib.ranks.trace.kineto import hidden_and_exposed, read_profiles, waiting

SUM = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage)"


def kernel(name: str, stream: int, start: float, end: float, **notes: object) -> dict[str, object]:
    arguments = {"stream": stream, **notes}
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": "kernel", "name": name, "tid": 1, "args": arguments, **times}


def written(folder, rank: int, base: int, *events: dict[str, object]):
    path = folder / f"rank{rank}.json"
    content = {"distributedInfo": {"rank": rank, "world_size": 2}, "baseTimeNanoseconds": base}
    path.write_text(json.dumps({**content, "traceEvents": list(events)}))
    return path


def test_gpu_kernels_by_stream_with_what_is_hidden_and_who_waits(tmp_path):
    ignored = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "tid": 1, "ts": 0, "dur": 1000}
    first = written(
        tmp_path,
        0,
        5_000,
        kernel("gemm", 7, 0, 40),
        kernel("gemm", 7, 30, 60),
        kernel(SUM, 20, 50, 90, dtype="Float", **{"In msg nelems": 100}),
        kernel(SUM, 20, 100, 110),
        ignored,
    )
    # Its times count from 5 µs earlier. The profiler did not see the first sum.
    second = written(tmp_path, 1, 0, kernel("gemm", 7, 5, 65), kernel(SUM, 20, 108, 115))
    trace = read_profiles([second, first])
    computing = [(e.rank, e.where) for e in trace.events if e.kind == "compute"]
    assert computing == [(0, "stream 7"), (1, "stream 7")]
    assert [(e.rank, e.kind, e.seq, e.bytes) for e in trace.operations] == [
        (0, "all_reduce", -2, 400),
        (0, "all_reduce", -1, 0),
        (1, "all_reduce", -1, 0),
    ]
    assert hidden_and_exposed(trace, 0) == pytest.approx((10e-6, 40e-6))
    assert hidden_and_exposed(trace, 1) == pytest.approx((0, 7e-6))
    assert waiting(trace, 0) == pytest.approx(3e-6)  # from 100 + 5 to 108
    assert waiting(trace, 1) == pytest.approx(0)


def profiled(folder) -> dict[str, int]:
    rank = dist.get_rank()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(3):
            torch.ones(200, 200) @ torch.ones(200, 200)
            time.sleep(0.5 * rank)  # more than the profilers start apart
            dist.all_reduce(torch.ones(1000))
        dist.broadcast(torch.ones(3), 0)
    recorded.export_chrome_trace(str(folder / f"{rank}.json"))
    return {"all_reduce": 3, "broadcast": 1}


def test_ranks_over_gloo_and_the_late_one_waits_least(tmp_path):
    with Ranks(2, on="cpu") as ranks:
        calls = ranks.run(profiled, tmp_path)
    trace = read_profiles(tmp_path.iterdir())
    assert [dict(trace.calls(rank)) for rank in (0, 1)] == calls
    assert waiting(trace, 0) > waiting(trace, 1)
    for rank in (0, 1):
        hidden, exposed = hidden_and_exposed(trace, rank)
        assert hidden >= 0 and exposed > 0
        assert any(e.kind == "compute" and e.rank == rank for e in trace.events)
    assert "on all ranks together 6 all_reduce, 2 broadcast" in repr(trace.plot())


def test_what_is_no_profile_of_a_rank_is_refused(tmp_path):
    first = written(tmp_path, 0, 0)
    with pytest.raises(ValueError, match="is a second file of rank 0"):
        read_profiles([first, first])
    first.write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match="names no rank: profile after init_process_group"):
        read_profiles([first])
    with pytest.raises(ValueError, match="no files"):
        read_profiles([])
