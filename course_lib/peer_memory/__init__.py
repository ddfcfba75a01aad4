"""Sums without messages: every rank of a machine reads the others' memory.

    >>> from course_lib.peer_memory import shared_memory_group
    >>> group = shared_memory_group()
    >>> model = nn.parallel.DistributedDataParallel(model, process_group=group)

Read in this order:

- `one_and_two_shot`: the two algorithms, for any memory that all ranks can access
- `shared_pages`, `shared_memory`: the same on the CPU
- `symmetric_memory`: the same between GPUs
- `process_group`: a backend that uses shared memory
"""

from course_lib.peer_memory.one_and_two_shot import PeerMemory, one_shot, two_shot
from course_lib.peer_memory.process_group import SharedMemoryGroup, shared_memory_group
from course_lib.peer_memory.shared_memory import SharedMemory
from course_lib.peer_memory.symmetric_memory import SymmetricMemory

__all__ = [
    "PeerMemory",
    "SharedMemory",
    "SharedMemoryGroup",
    "SymmetricMemory",
    "one_shot",
    "shared_memory_group",
    "two_shot",
]
