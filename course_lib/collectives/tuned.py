"""Tuning: which all-reduce is the fastest depends on the size, so choose by size.

    >>> from course_lib.collectives import TunedAllReduce
    >>> all_reduce = TunedAllReduce(network=network)  # without a network it measures, now
    >>> all_reduce(gradient)  # in place; every rank then holds the sum

In a one-shot all-reduce, each rank sends its whole tensor to all others at once. In a ring, it
sends 2(K-1) messages one after the other, each a K-th as long. The network, K and the size
determine which one is faster. There are two ways to find out:

- **predict**: take α and β of the network, and the formulas of `cost_model`;
- **measure**: time each algorithm for a few sizes, once, and keep the winners.

A measurement includes effects that the model leaves out. For example, on one machine the ranks'
own cores must do the work of messages. Libraries use both ways: NCCL predicts, Horovod tunes while
it trains.

All ranks must choose the same algorithm, or one rank would wait in a ring while others form a tree.
So the time of the slowest rank counts, and the ranks find it with an all-reduce.
"""

import math
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives.all_reduce import (
    central_all_reduce,
    halving_doubling_all_reduce,
    library_all_reduce,
    ring_all_reduce,
    tree_all_reduce,
)
from course_lib.collectives.direct import direct_all_reduce, one_shot_all_reduce
from course_lib.collectives.point_to_point import Group, place_in
from course_lib.cost_model import Network, fastest_all_reduce

ALGORITHMS: dict[str, Callable[[Tensor, Group], None]] = {
    "central": central_all_reduce,
    "tree": tree_all_reduce,
    "ring": ring_all_reduce,
    "halving_doubling": halving_doubling_all_reduce,
    "direct": direct_all_reduce,
    "one_shot": one_shot_all_reduce,
    "library": library_all_reduce,
}
"""Name → algorithm, with the names of `cost_model.ALL_REDUCE_TIMES` and the backend's own."""


class TunedAllReduce:
    """An all-reduce that uses the fastest algorithm for each size.

    `tuned(tensor)` replaces everyone's `tensor`, contiguous and of one shape and dtype, by the sum
    over `group`, in place. `tuned(tensor, group)`, which `gradient_sync` calls, does the same; it
    accepts only the group that it was made for.

    Args:
        group: the process group; None for all ranks.
        network: predict from its latency (s) and bandwidth (bytes/s); None: measure now.
        sizes: the sizes to measure, in bytes. For other sizes, the nearest one by ratio counts. All
            ranks must give the same sizes.
        repeats: how often to measure, 1 or more; small sizes are measured three times as often. The
            median counts.
        device: the device of the measured tensors; use that of the tensors to be reduced.

    Attributes:
        times: size → name → measured seconds; empty if predicted.

    Raises:
        ValueError: this rank is not in the group, or a size or `repeats` is not positive.

    """

    def __init__(
        self,
        group: Group = None,
        network: Network | None = None,
        sizes: Sequence[int] = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24),
        repeats: int = 5,
        device: torch.device | str = "cpu",
    ) -> None:
        self.group = group
        _, self.world_size = place_in(group)
        self.network = network
        if not sizes or min(sizes) < 1:
            raise ValueError(
                f"sizes={tuple(sizes)} must hold at least one size, and only sizes above 0 bytes"
            )
        if repeats < 1:
            raise ValueError(f"repeats={repeats}: each algorithm has to be timed at least once")
        self.times: dict[int, dict[str, float]] = {}
        if network is None:
            for size in sizes:
                tensor = torch.zeros(-(-size // 4), device=device)
                self.times[size] = self._measure(tensor, repeats)

    def __call__(self, tensor: Tensor, group: Group = None) -> None:
        """Replace everyone's `tensor` by the sum, in place.

        Raises ValueError for a group other than the one it was made for.
        """
        if group is not None and group is not (self.group or dist.group.WORLD):
            raise ValueError("this all-reduce was tuned for another group: make one for this group")
        name = self.choice(tensor.numel() * tensor.element_size())  # a sparse one has no nbytes
        ALGORITHMS[name](tensor, self.group)

    def choice(self, nbytes: int) -> str:
        """Return the name, in `ALGORITHMS`, of the algorithm for tensors of `nbytes`."""
        if self.network is not None:
            return fastest_all_reduce(nbytes, self.world_size, self.network)
        nearest = min(self.times, key=lambda size: abs(math.log(size / max(nbytes, 1))))
        return min(self.times[nearest], key=self.times[nearest].__getitem__)

    def _measure(self, tensor: Tensor, repeats: int) -> dict[str, float]:
        """Return for each algorithm the median of the slowest rank's seconds for an all-reduce.

        The algorithms take turns, so that other work on the machine affects them equally.
        """
        # Small all-reduces are timed several in a row, because a single one would mostly measure
        # the machine's wake-up. They also get more turns: they are cheap, and vary more.
        small = tensor.nbytes < 1 << 18
        in_a_row, turns = (8, 3 * repeats) if small else (1, repeats)
        seconds = torch.zeros(turns + 1, len(ALGORITHMS), dtype=torch.float64)
        for turn in seconds:
            for i, algorithm in enumerate(ALGORITHMS.values()):
                dist.barrier(self.group)
                start = time.perf_counter()
                for _ in range(in_a_row):
                    algorithm(tensor, self.group)
                if tensor.is_cuda:
                    torch.cuda.synchronize(tensor.device)
                turn[i] = (time.perf_counter() - start) / in_a_row
        slowest = seconds[1:].to(tensor.device)  # the first turn opens connections
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.group)
        return dict(zip(ALGORITHMS, slowest.median(dim=0).values.tolist(), strict=True))
