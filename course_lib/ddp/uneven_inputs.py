"""Uneven inputs: ranks that run out of batches join in, so that the others can continue.

    >>> from course_lib.ddp import DistributedDataParallel
    >>> model = DistributedDataParallel(model)
    >>> with model.join():
    ...     for x, y in loader:  # more batches on some ranks than on others
    ...         loss_fn(model(x), y).backward()
    ...         optimizer.step()

If one rank's shard has seven batches and the others have six, the rank with seven waits for ever in
its last all-reduce. Padding the shards (`sharding`) avoids this. Otherwise, a rank that is done
*joins*: it takes part in every collective of the others, with zeros, until all are done. Its
replica does not change meanwhile. So at the end it gets the weights of a rank that was active in
the last round.

Before every forward the ranks tell one another who is still active: one all-reduce of K numbers.
To stop instead of continuing with fewer ranks, use `join(throw_on_early_termination=True)`.

PyTorch has the same in `torch.distributed.algorithms.join`.
"""

import torch
import torch.distributed as dist

from course_lib.collectives import Group, place_in

_ALONE = (
    "A rank that has left the loop of `with model.join():` repeats only what DDP itself sends. So "
    "nothing else in the loop may communicate: no optimizer whose step() does, no metric that is "
    "reduced. Move that behind the block, or give all ranks equally many batches."
)


class Activity:
    """The ranks that still had inputs at the last forward.

    The ranks of `group` tell each other with tensors on `device`. With `throw_early`, training ends
    on all ranks as soon as the first one is done. Raises ValueError if this rank is not in `group`.

    Attributes:
        active: the ranks (numbers in the group) that ran a forward in the last round in which any
            rank did; all ranks before the first round.

    """

    def __init__(
        self, group: Group, device: torch.device, throw_early: bool, by_initial: bool
    ) -> None:
        self.group = group
        self.rank, world_size = place_in(group)
        self.active = list(range(world_size))
        self._device, self._throw_early, self._by_initial = device, throw_early, by_initial
        self._world_size = world_size

    def announce(self, active: bool) -> int:
        """Tell the others whether this rank runs another forward; return the gradients' divisor.

        The divisor is the number of active ranks, or of all ranks if `by_initial`, and 0 if no rank
        runs a forward. All ranks must call, once per round. It costs one all-reduce of K int32, and
        the host waits for it. With `throw_early`, it raises RuntimeError on all ranks at once if
        some ranks run a forward and others do not.
        """
        flags = torch.zeros(self._world_size, dtype=torch.int32, device=self._device)
        flags[self.rank] = int(active)
        try:
            dist.all_reduce(flags, group=self.group)
        except BaseException as error:
            if not active:
                error.add_note(_ALONE)  # if the ranks wait for one another, a report shows it
            raise
        now = [rank for rank, flag in enumerate(flags.tolist()) if flag]
        if now:
            self.active = now
        if self._throw_early and now and len(now) < self._world_size:
            if active:
                raise RuntimeError(
                    "Detected at least one rank that exhausted inputs. Throwing across all ranks. "
                    f"Ranks {now} of {self._world_size} still have inputs."
                )
            raise RuntimeError(f"Rank {self.rank} exhausted all inputs before other ranks did.")
        return self._world_size if now and self._by_initial else len(now)

    @property
    def authority(self) -> int:
        """The rank whose buffers the others copy; at the end they also copy its parameters.

        It is the last of the active ranks, given by its number in the group.
        """
        return self.active[-1]
