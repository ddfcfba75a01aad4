"""Shared pages: memory that all ranks of one machine can access, and a barrier built on it.

`map_for_all` asks the system for a file in memory that is in no folder. So it disappears with the
last process. It does not need a large /dev/shm, which containers often limit to 64 MiB. The other
ranks open the file by its descriptor in the first rank's process. All ranks map it into their own
memory, so each of them can read at once the data that another one has written.

A reader must also know when the writer is done. `SpinBarrier` is a counter per rank that the others
watch. It sends nothing and does not call the system, so it takes microseconds. The others must see
the data before the counter. x86 guarantees this, because it keeps the order of writes. Machines
that reorder writes (ARM) are not supported.
"""

import contextlib
import errno
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives import Group, place_in

_PAGE = 4096


def map_for_all(nbytes: int, group: Group = None) -> list[Tensor]:
    """Return for each rank `nbytes` zeros of memory that all ranks in `group` share.

    Entry r, a vector of at least `nbytes` elements of dtype uint8, belongs to rank r. All members
    must call, with the same number, 1 or more. Raises OSError on all ranks if one of them cannot
    get the memory, and ValueError if this rank is not in the group.
    """
    rank, world_size = place_in(group)
    length = -(-max(1, nbytes) // _PAGE) * _PAGE
    total = length * world_size
    with contextlib.ExitStack() as until_all_have_it:
        here = _machine()
        made: list[str | None] = [None, here]  # path, where
        refusal: Exception | None = None
        memory = torch.empty(0, dtype=torch.uint8)
        try:
            if rank == 0:
                made[0] = until_all_have_it.enter_context(_file_in_memory(total))
        except OSError as error:
            refusal = error
        dist.broadcast_object_list(made, group=group, group_src=0)
        path, where = made
        try:
            if where != here:  # there, the path may belong to a different file
                raise OSError("it is on a different machine, or in a different container")
            if path is not None:
                memory = torch.from_file(path, shared=True, size=total, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            refusal = error
        answers: list[tuple[Exception | None, int]] = [(None, 0)] * world_size
        dist.all_gather_object(answers, (refusal, os.getpid()), group=group)
    if len({process for _, process in answers}) < world_size:
        raise OSError(
            "shared pages need one process per rank, but some of these ranks are threads of one "
            "process, as simulated ranks are"
        )
    for r, (refusal, _) in enumerate(answers):
        if refusal is not None:
            raise OSError(
                f"rank {r} of the group cannot have {total >> 20} MiB of memory that all ranks "
                f"share ({refusal}): all ranks must be on one machine with so much shared memory"
            )
    return list(memory.split(length))  # type: ignore[no-untyped-call]


def _machine() -> str:
    """Return a string that identifies the machine and, because of /proc, the container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # macOS
        return platform.node()


@contextlib.contextmanager
def _file_in_memory(nbytes: int) -> Iterator[str]:
    """Provide the path of a file of `nbytes` zeros, with its pages reserved.

    A process that has mapped the file keeps its memory after the path is gone.
    """
    if nbytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("shared pages")
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
    else:  # macOS
        descriptor, path = tempfile.mkstemp(prefix="shared-pages-")
    try:
        if hasattr(os, "posix_fallocate"):
            # Reserve the memory now: if it were missing on first use, the process would be killed.
            os.posix_fallocate(descriptor, 0, nbytes)
        else:
            os.ftruncate(descriptor, nbytes)
        yield path
    finally:
        os.close(descriptor)
        if not path.startswith("/proc/"):
            os.unlink(path)


class SpinBarrier:
    """A barrier of the ranks of `group` (None: all ranks), all on one machine.

    All members must construct it, which raises as `map_for_all`. `barrier()` returns when all ranks
    have called it equally often. This rank then sees all their earlier writes. It raises
    TimeoutError, naming the rank, if a rank does not call within `timeout` seconds.
    """

    def __init__(self, group: Group = None, timeout: float = 300.0) -> None:
        self.rank, world_size = place_in(group)
        self.timeout = timeout
        counters = map_for_all(8, group)  # a page each, so that no two share a cache line
        self._counters = [memoryview(slot.view(torch.int64).numpy().data) for slot in counters]
        self._count = 0
        self._waiting_since = 0.0
        # If ranks share a core, a waiting rank must soon leave it to the rank it waits for.
        self._spins = 300 if world_size <= (os.cpu_count() or 1) else 20

    def __call__(self) -> None:
        self._count = count = self._count + 1
        self._counters[self.rank][0] = count
        for other, counter in enumerate(self._counters):
            spins = 0
            while counter[0] < count:
                spins += 1
                if spins > self._spins:
                    os.sched_yield()
                    if spins % 1024 == 0:
                        self._give_up_after(other, spins)

    def _give_up_after(self, other: int, spins: int) -> None:
        if spins == 1024:
            self._waiting_since = time.monotonic()
        if time.monotonic() - self._waiting_since > self.timeout:
            raise TimeoutError(
                f"rank {self.rank} waited {self.timeout:g} s at a shared-memory barrier for rank "
                f"{other} of the group: rank {other} has died, or called all_reduce less often"
            )
