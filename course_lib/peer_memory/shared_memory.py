"""Shared memory: peer memory on the CPU, between processes of one machine.

    >>> from course_lib.peer_memory import SharedMemory
    >>> memory = SharedMemory()  # once, on all ranks
    >>> memory.all_reduce(gradient)  # in place; every rank then holds the sum

The pages and the barrier come from `shared_pages`. The barrier takes microseconds; a message takes
tens of microseconds. `SharedMemory.empty` returns an ordinary tensor; gradients stored in it are
reduced in place.
"""

from torch import Tensor

from course_lib.collectives import Group
from course_lib.peer_memory.one_and_two_shot import PeerMemory
from course_lib.peer_memory.shared_pages import SpinBarrier, map_for_all


class SharedMemory(PeerMemory):
    """Memory that the ranks of `group`, all on one machine, share.

    All members must construct it, and call its methods in the same order with the same sizes.

    Args:
        group: the process group; used to agree on names, not for the data. None for all ranks.
        timeout: seconds to wait at a barrier for a rank before raising an error.

    Raises:
        OSError: there is not enough memory, or the ranks are not on one machine.
        ValueError: this rank is not in the group.

    """

    device_type = "cpu"
    block_bytes = 512 << 10  # must stay in a core's cache between adding and copying
    staging_bytes = 2 << 20
    one_shot_bytes = 64 << 10

    def __init__(self, group: Group = None, timeout: float = 300.0) -> None:
        self._barrier = SpinBarrier(group, timeout)
        super().__init__(group)

    def map(self, nbytes: int) -> list[Tensor]:
        """Return at least `nbytes` zeros (uint8) of each rank; see `map_for_all`."""
        return map_for_all(nbytes, self.group)

    def barrier(self) -> None:
        """Return when all ranks have called. Raises TimeoutError, naming a rank that did not."""
        self._barrier()
