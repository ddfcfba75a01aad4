"""PyTorch's own pipeline, on the same ranks with the same model, gives the same gradients."""

import warnings

import torch
import torch.distributed as dist
from torch.nn import functional as F

from course_lib.pipeline_parallel import Pipeline, split_layers
from tests.helpers.folding import over
from tests.helpers.pipelines import batch, model, schedule

M = 4
THEIRS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
}
CASES = [(name, 2) for name in THEIRS] + [("gpipe", 3), ("1f1b", 3)]


def ours(name, k):
    plan = schedule(name, k, M)
    pipeline = Pipeline(split_layers(model(), plan.stages), F.mse_loss, plan)
    pipeline.step(*batch(0))
    return {name.split(".", 2)[2]: param.grad for name, param in pipeline.named_parameters()}


def theirs(name, k):
    from torch.distributed import pipelining  # takes 2 s, and only ranks need it

    rank = dist.get_rank()
    several = name in ("interleaved", "zero_bubble")  # PyTorch's zero bubble is interleaved too
    parts = split_layers(model(), 2 * k if several else k)
    stages = [
        pipelining.PipelineStage(parts[i], i, len(parts), torch.device("cpu"))
        for i in range(rank, len(parts), k)
    ]
    plan = getattr(pipelining, THEIRS[name])(
        stages if several else stages[0], n_microbatches=M, loss_fn=F.mse_loss
    )
    x, y = batch(0)
    options = {"target": y, "losses": []} if rank == k - 1 else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan.step(*((x,) if rank == 0 else ()), **options)
    parameters = (pair for stage in stages for pair in stage.submod.named_parameters())
    return {name: param.grad for name, param in parameters}


@over("name, k", CASES)
def test_gradients_are_those_of_torch_distributed_pipelining(ranks_of, name, k):
    """Those of all ranks together: the same layers need not lie on the same rank."""
    ranks = ranks_of("cpu", k)
    mine, expected = {}, {}
    for part, other in zip(ranks.run(ours, name, k), ranks.run(theirs, name, k), strict=True):
        mine, expected = mine | part, expected | other
    assert mine.keys() == expected.keys() == dict(model().named_parameters()).keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(mine[key], gradient, rtol=1e-10, atol=1e-12, msg=key)
