"""The frontier of a step names the rank that delayed it, and the stage.

    >>> from course_lib.frontier import frontier
    >>> increments, leaders = frontier(durations)  # of K ranks and S stages, in seconds

Ranks wait for each other. So a slow rank makes all others slow, in the stage in which they wait,
and it is the rank that waits *least*. An average over the ranks therefore blames the wrong stage.

Each rank times its own stages from the moment at which all ranks set off together, the end of the
last sum; no common clock is needed. Waiting is a stage of its own, from the last gradient of the
rank to the sum. With d_rs seconds of rank r in stage s, its stage s ends at e_rs = d_r1 + … + d_rs,
and all ranks have ended it at the *frontier*:

    f_s = max over r of e_rs        increment f_s - f_(s-1)        leader: the r of the maximum

The increments add up to the step. Each names a stage, and its leader the rank that was last.

StageFrontier, arXiv 2606.06751.
"""

import torch
from torch import Tensor


def frontier(durations: Tensor) -> tuple[Tensor, Tensor]:
    """Return the increment of the frontier in each stage, and its leader: both of shape (…, S).

    `durations[…, r, s]` are the seconds of rank r in stage s, in order. Of several leaders it is
    the lowest rank.
    """
    ends = durations.cumsum(-1)
    latest = ends.amax(-2)
    return latest.diff(prepend=torch.zeros_like(latest[..., :1])), ends.argmax(-2)


def late_rank(durations: Tensor) -> tuple[int, int, float]:
    """Return the rank that delays the others most, its stage, and the seconds of delay a step.

    `durations[i, r, s]` are the seconds of rank r in stage s of step i. The delay of a stage is its
    increment less what the median rank needed for it, and its leader answers for it.
    """
    increments, leaders = frontier(durations)
    delays = torch.zeros_like(durations[0])  # of each rank, by stage
    delays.scatter_add_(0, leaders, increments - durations.median(1).values)
    rank, stage = divmod(int(delays.argmax()), delays.shape[1])
    return rank, stage, delays[rank, stage].item() / len(durations)
