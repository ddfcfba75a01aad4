"""Tied parameters: one weight in two stages, such as an embedding that is also the last layer.

On one machine both uses add to one gradient. In a pipeline each rank has a copy of the weight and
the gradient of its own use. Both copies must get the sum of the gradients, so that they stay equal:

    rank 0   g₀ ──►            ──► g₀ + g₃
    rank 3         g₀ + g₃  (g₃ from rank 3, summed on the first of them, sent back)

This takes n bytes each way for each rank except the first. For uses within one rank, autograd adds
the gradients.

M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", 2019.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from course_lib.collectives import Group, start_recv, start_send
from course_lib.pipeline_parallel.schedule import Schedule

Tied = list[tuple[nn.Parameter, list[int]]]
"""The tied parameters, each with the ranks that hold it, in the model's order on all ranks."""


def find_tied(stages: Sequence[nn.Module], schedule: Schedule) -> Tied:
    """Return the trainable parameters that are in stages of several ranks."""
    holders: dict[nn.Parameter, set[int]] = {}
    for stage, module in enumerate(stages):
        for param in module.parameters():
            if param.requires_grad:
                holders.setdefault(param, set()).add(schedule.rank_of(stage))
    return [(param, sorted(ranks)) for param, ranks in holders.items() if len(ranks) > 1]


@contextmanager
def tied_gradients(tied: Tied, rank: int, group: Group) -> Iterator[None]:
    """Sum the gradients that backward computes inside over all holders, and give all the sum.

    Accumulated gradients from before were summed already, so they are put aside, and added again at
    the end.
    """
    mine = [(param, ranks) for param, ranks in tied if rank in ranks]
    before = [param.grad for param, _ in mine]
    for param, _ in mine:
        param.grad = None
    yield
    for (param, ranks), earlier in zip(mine, before, strict=True):
        total = torch.zeros_like(param) if param.grad is None else param.grad.contiguous()
        first, *others = ranks
        if rank == first:
            part = torch.empty_like(total)
            for other in others:
                start_recv(part, other, group).wait()
                total += part
            for work in [start_send(total, other, group) for other in others]:
                work.wait()
        else:
            start_send(total, first, group).wait()
            start_recv(total, first, group).wait()
        param.grad = total if earlier is None else earlier.add_(total)
