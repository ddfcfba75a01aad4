"""NCCL's semantics over gloo, so that code for GPUs can be wrong, and be seen to be, on a CPU.

A process group that behaves as NCCL's does where that differs from gloo's:

- A launch returns at once. Operations of one communicator run one after the other, on its stream.
- ``wait()`` orders data, not the host: what the calling stream does next comes after the operation.
- A future is complete at once. Only who waits for *that* future, or for one that ``then`` made of
  it, comes after the operation; its ``value()`` is what is in memory now.
- Two ranks that exchange an unbatched message make a communicator of that pair. Its first use
  blocks the host until both are there. All messages of a pair, in both directions, run in the order
  in which they were posted; tags are ignored.
- The messages of a batch run together, in no order, on the communicator of the group.

A CPU has no streams, so there are two ways to look. With ``mode="data"`` the host is the stream:
``wait()`` stands still until the data is there, and a value that is read without it is the old one.
With ``mode="host"`` the host runs on, as it does beside a GPU: data is not ordered, but who hangs,
who spins and when things end is as on a GPU. `delay` seconds before each operation make the old
value stay long enough to be seen.

After PyTorch's ProcessGroupNCCL.cpp and ivalue_inl.h (futures), and NCCL's user guide.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from course_lib.ranks._torch.python_group import PythonGroup
from course_lib.ranks.processes import gloo, world
from course_lib.ranks.processes.gpu_group import GpuGroup

COLLECTIVES, PAIRS, BATCHES = "collectives", "pairs", "batches"


@dataclass(frozen=True)
class Emulation:
    """How to look at it.

    Args:
        mode: ``"data"`` or ``"host"``; see above.
        delay: seconds that each operation takes at least.

    """

    mode: str = "data"
    delay: float = 0.0


class EmulatedFuture(torch.futures.Future[Any]):
    """Complete at once for who asks the host; ordered for who waits for it.

    C++, such as DDP's reducer, waits for the C++ future inside: for the stream, that is.
    """

    def __init__(self, emulation: Emulation, value: Any = None) -> None:
        super().__init__()
        self._emulation = emulation
        self._early = value
        self._filled = threading.Event()

    def fill(self, value: Any) -> None:
        """Let those go on whose stream waits."""
        self._filled.set()
        self.set_result(value)

    def done(self) -> bool:
        return True

    def value(self) -> Any:
        if self._early is None:  # made by `then`: on a GPU its value is there at once as well
            self._filled.wait()
            return super().value()
        return self._early

    def wait(self) -> Any:
        if self._emulation.mode == "host":
            return self.value()
        return super().wait()

    def then(self, callback) -> EmulatedFuture:
        child = EmulatedFuture(self._emulation)
        super().then(lambda future: child.fill(callback(future)))
        return child

    def add_done_callback(self, callback) -> None:
        callback(self)


class EmulatedWork(dist.Work):
    """An operation on a stream."""

    def __init__(self, emulation: Emulation, result: Any) -> None:
        super().__init__()
        self._emulation = emulation
        self._result = result
        self._done = threading.Event()
        self._error: Exception | None = None
        self._future = EmulatedFuture(emulation, result)

    def run(self, operation) -> None:
        """Carry it out; on its stream's thread."""
        time.sleep(self._emulation.delay)
        try:
            operation()
        except Exception as error:  # shown to who waits
            self._error = error
        self._done.set()
        self._future.fill(self._result)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._emulation.mode == "data":
            self.synchronize()
        return True

    def synchronize(self) -> None:
        """Stand still until it is over, as ``torch.cuda.synchronize`` does."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return self._done.is_set()

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Any:
        return self._future


class Stream:
    """Runs what is put on it, one after the other."""

    def __init__(self) -> None:
        self._queue = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def launch(self, work: EmulatedWork, operation) -> EmulatedWork:
        """Put an operation on the stream."""
        self._queue.put((work, operation))
        return work

    def _run(self) -> None:
        while True:
            work, operation = self._queue.get()
            work.run(operation)


class EmulatedNccl(PythonGroup):
    """One rank's end of a process group.

    Args:
        store: of this group alone.
        rank: in the group.
        size: of the group.
        timeout: of gloo, below.
        emulation: how to look at it.

    """

    backend = "nccl"

    def __init__(self, store, rank, size, timeout, emulation):
        super().__init__(rank, tuple(range(size)), "emulated")
        self._emulation = emulation
        self._store = store
        self._below = {
            name: gloo.connect_gloo(c10d.PrefixStore(name, store), rank, size, timeout, lazy=True)
            for name in (COLLECTIVES, PAIRS, BATCHES)
        }
        self._stream = Stream()
        self._pairs: dict[int, Stream] = {}
        self._batch: list[tuple[str, Any, int]] | None = None
        self.launched: list[EmulatedWork] = []

    def _launch(self, stream: Stream, result: Any, operation) -> EmulatedWork:
        work = stream.launch(EmulatedWork(self._emulation, result), operation)
        self.launched.append(work)
        return work

    def spin(self) -> None:
        """Use the processor until all that was launched is over, as ``x.item()`` does on a GPU."""
        while not all(work.is_completed() for work in self.launched):
            pass

    # Collectives ---------------------------------------------------------------------------

    def _collective(self, collective, arguments, options):
        below = self._below[COLLECTIVES]
        return self._launch(
            self._stream,
            collective.result(arguments),
            lambda: gloo.launch(below, collective, arguments, options).wait(),
        )

    # Messages ------------------------------------------------------------------------------

    def _message(self, kind: str, tensors: Any, peer: int | None, tag: int) -> Any:
        if peer is None:
            raise NotImplementedError("NCCL has no receive from any rank")
        if self._batch is not None:
            self._batch.append((kind, tensors, peer))
            return None
        below = self._below[PAIRS]
        start = below.send if kind == "send" else below.recv
        return self._launch(self._pair(peer), list(tensors), lambda: start(tensors, peer, 0).wait())

    def _pair(self, peer: int) -> Stream:
        """Return the pair's stream; at its first use wait, the host too, for the other rank."""
        if peer not in self._pairs:
            me = self.rank()
            self._store.set(f"pair {me} {peer}", "here")
            self._store.wait([f"pair {peer} {me}"])
            self._pairs[peer] = Stream()
        return self._pairs[peer]

    def _start_coalescing(self) -> None:  # as a Backend's
        self._batch = []

    def _end_coalescing(self) -> dist.Work:
        messages, self._batch = self._batch or [], None
        below = self._below[BATCHES]

        def together() -> None:
            works = [
                (below.send if kind == "send" else below.recv)(tensors, peer, 0)
                for kind, tensors, peer in messages
            ]
            for work in works:
                work.wait()

        return self._launch(self._stream, [t for _, ts, _ in messages for t in ts], together)


class EmulatedGpuGroup(GpuGroup):
    """The inner groups of a GPU rank, with every tensor taken for one on a GPU."""

    def takes(self, tensor: torch.Tensor) -> bool:
        return True


def emulate(mode: str = "data", delay: float = 0.0) -> None:
    """Let this rank's metered groups connect by emulated NCCL; to be called on all ranks.

    ``Ranks(3, on="cpu").run(emulate)`` is the way; it holds for all later calls.
    """
    emulation = Emulation(mode, delay)
    if getattr(world, "emulation", None) == emulation:
        return  # these ranks do already

    def connect(backend, store, rank, size, timeout, lazy=False):
        apart = c10d.PrefixStore("emulated NCCL", store)
        below = gloo.connect_gloo(apart, rank, size, timeout, lazy)
        return EmulatedGpuGroup(below, EmulatedNccl(apart, rank, size, timeout, emulation))

    vars(world).update(connect=connect, emulation=emulation)
    here = world.joined_world()
    for group in list(here._groups.values()):
        group.connect()


# How the next bare group is looked at.
_bare = Emulation()


def bare_group(mode: str = "data", delay: float = 0.0) -> Any:
    """Return a new group of all ranks that is emulated NCCL with nothing around it."""
    global _bare
    _bare = Emulation(mode, delay)
    if "emulated_nccl" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "emulated_nccl", lambda *given: EmulatedNccl(*given, _bare), devices=["cpu"]
        )
        together = functools.partial(_batch, c10d.batch_isend_irecv)
        for module in (dist, c10d):
            vars(module)["batch_isend_irecv"] = together
    return c10d.new_group(backend="emulated_nccl")


def _batch(one_by_one, p2p_op_list) -> list[Any]:
    group = p2p_op_list[0].group
    if not isinstance(group, EmulatedNccl):
        return one_by_one(p2p_op_list)
    group._start_coalescing()
    for each in p2p_op_list:
        send = each.op is dist.isend
        (group.send if send else group.recv)([each.tensor], each.group_peer)
    return [group._end_coalescing()]
