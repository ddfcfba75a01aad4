"""What is right with gloo and was wrong with NCCL, on NCCL's semantics (see the helper)."""

import time
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from course_lib.compression import OneBit, compressed_all_reduce
from course_lib.ddp import DistributedDataParallel
from course_lib.ranks import Ranks, RanksError
from course_lib.ranks.placement import share
from course_lib.ranks.processes import gloo, gpu_group
from course_lib.ranks.processes.gpu_group import GpuGroup
from tests.course_lib.pipeline_parallel.test_pipeline import pipeline_of
from tests.helpers.ddp_scenarios import mlp, own_shards
from tests.helpers.emulated_nccl import bare_group, emulate
from tests.helpers.pipelines import SCHEDULES, batch

DELAY = 0.05


@pytest.fixture(scope="module", params=[2, 3, 4])
def nccl_ranks(request):
    with Ranks(request.param, on="cpu", timeout=120) as ranks:
        ranks.run(emulate, delay=0.005)
        yield ranks


# Metered ----------------------------------------------------------------------------------------


HOOKS = {
    "none": lambda net: None,
    "all_reduce": lambda net: net.register_comm_hook(None, default_hooks.allreduce_hook),
    "fp16": lambda net: net.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "powerSGD": lambda net: net.register_comm_hook(
        powerSGD_hook.PowerSGDState(None, 1, 2, min_compression_rate=0.1),
        powerSGD_hook.powerSGD_hook,
    ),
}


def gradients_of(ddp, hook):
    net = ddp(mlp(), bucket_cap_mb=0.0004)
    HOOKS[hook](net)
    x, y = own_shards(steps=1)[0]
    mse_loss(net(x), y).backward()
    return [param.grad.clone() for param in net.parameters()]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("ddp", [TorchDDP, DistributedDataParallel], ids=["PyTorch's", "ours"])
def test_ddp_trains_on_reduced_gradients(nccl_ranks, ranks_of, ddp, hook):
    got = nccl_ranks.run(gradients_of, ddp, hook)
    right = ranks_of("cpu", nccl_ranks.world_size).run(gradients_of, ddp, hook)
    torch.testing.assert_close(got, [right[0]] * len(got), rtol=1e-6, atol=1e-9)


def sum_compressed():
    rank = dist.get_rank()
    x = torch.randn(1001, generator=torch.Generator().manual_seed(rank))
    compressed_all_reduce(x, OneBit())
    return x


def test_a_compressed_all_reduce_goes_by_batches(nccl_ranks, ranks_of):
    right = ranks_of("simulated", nccl_ranks.world_size).run(sum_compressed)
    torch.testing.assert_close(nccl_ranks.run(sum_compressed), right, rtol=0, atol=0)


def steps_of_a_pipeline(name, group):
    """Return the gradients of two steps; with `group`, each of the pipeline's groups is such."""
    make = (lambda *_, **__: group()) if group else dist.new_group
    before, dist.new_group = dist.new_group, make
    try:
        pipeline = pipeline_of(name, dist.get_world_size(), 6, group=group and group())
    finally:
        dist.new_group = before
    for step in range(2):
        pipeline.step(*batch(step))
    return {key: param.grad for key, param in pipeline.named_parameters()}


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_pipeline_trains_by_nccl_alone(ranks_of, name, k):
    """Nothing metered is around it: who hangs by NCCL hangs here."""
    right = ranks_of("simulated", k).run(steps_of_a_pipeline, name, None)
    got = ranks_of("cpu", k).run(steps_of_a_pipeline, name, bare_group)
    torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-12)


# The trace and the diagnosis ----------------------------------------------------------------------


def launch_and_go_on():
    dist.all_reduce(torch.ones(4), async_op=True).wait()
    time.sleep(3 * DELAY)


def test_the_trace_has_the_end_of_the_operation_not_of_the_launch():
    with Ranks(2, on="cpu", timeout=60) as ranks:
        ranks.run(emulate, mode="host", delay=DELAY)
        ranks.run(launch_and_go_on)
        operations = [event for event in ranks.trace.operations if event.kind == "all_reduce"]
    assert len(operations) == 2
    for event in operations:
        assert event.end - event.start >= DELAY


def skipped_by_rank_1():
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(2))
        dist.group.WORLD._inner.nccl.spin()  # as x.item() would on a GPU


def test_a_rank_that_spins_behind_a_skipped_collective_is_said_to_wait_for_it():
    with Ranks(3, on="cpu", timeout=60) as ranks:
        ranks.run(emulate, mode="host")
        with pytest.raises(RanksError) as caught:
            ranks.run(skipped_by_rank_1)
    report = str(caught.value)
    assert "all_reduce" in report and "rank 1" in report
    assert "sleeping or looping" not in report


# Units: what no emulation on a CPU can show -------------------------------------------------------


def on_gpu(host=None):
    """Return as much of a GPU's tensor as is asked for here."""
    return SimpleNamespace(is_cuda=True, cpu=lambda: host)


def test_tensors_of_the_cpu_and_barriers_go_by_gloo():
    group = GpuGroup("gloo", "nccl")
    assert group.carrier([torch.ones(1)]) == "gloo"
    assert group.carrier([]) == "gloo"
    assert group.carrier([on_gpu()]) == "nccl"
    assert group.carrier([on_gpu(), torch.ones(1)]) == "gloo"
    assert GpuGroup("gloo").carrier([on_gpu()]) == "gloo"


def test_a_single_message_leaves_from_the_host():
    inner, host = Mock(), torch.ones(2)
    GpuGroup(inner, "nccl").send([on_gpu(host)], 1, 7)
    assert inner.method_calls == [call.send([host], 1, 7)]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_placement_and_not_the_process_chooses_the_backend(monkeypatch, backend):
    """Ranks that share a GPU have CUDA initialised, and NCCL may refuse them."""
    make = Mock(return_value="nccl")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(gpu_group, "connect_gloo", lambda *_: "gloo")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", make, raising=False)
    group = gpu_group.connect(backend, dist.HashStore(), 0, 1, None)
    assert isinstance(group, GpuGroup)
    assert group.nccl == ("nccl" if backend == "nccl" else None)
    assert make.call_count == (backend == "nccl")


def test_an_uneven_all_to_all_receives_where_its_tensors_lie(monkeypatch):
    inner = Mock(spec=["alltoall_base"])
    monkeypatch.setattr(gloo, "ComposedWork", lambda *_: "work")
    pieces = [torch.ones(1, device="meta"), torch.ones(3, device="meta")]
    assert gloo._all_to_all(inner, list(pieces), list(pieces)) == "work"
    came, sends, *_ = inner.alltoall_base.call_args.args
    assert came.device == sends.device == torch.device("meta")


def test_ranks_that_share_a_gpu_leave_room_for_each_other():
    placement = share(4, 1, (2, 30, 7))
    assert placement.backend == "nccl"
    assert int(placement.environment["NCCL_MAX_CTAS"]) <= 8


def test_pytorchs_backends_take_the_calls_that_a_batch_makes():
    """NCCL's is one, which no CPU has; gloo's refuses to coalesce, but not the way it is asked."""
    backend = gloo.connect_gloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    for method in ("_start_coalescing", "_end_coalescing"):
        with pytest.raises(RuntimeError, match="oalescing"):
            getattr(backend, method)()
