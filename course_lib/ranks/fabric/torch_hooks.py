"""Everything that simulated ranks need of PyTorch and that PyTorch does not document.

PyTorch keeps one world of process groups per process, in ``distributed_c10d._world``. Simulated
ranks are threads, and each needs a world of its own; PyTorch's own multi-threaded tests replace
the same object. A test of each function here says what a new release of PyTorch has moved.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

BACKEND = "simulated"


class _World:
    """The process groups of one rank: the attributes that distributed_c10d keeps per process."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.pg_flight_recorder_hooks: dict[Any, Any] = {}  # after 2.13
        self.comms: list[Any] = []

    @property
    def pg_config_info(self) -> list[dict[str, Any]]:
        return [{"pg_name": name, "backend_config": BACKEND} for name in self.pg_names.values()]


class _ThreadWorlds:
    """Looks like PyTorch's world, and is another one on each thread that has entered its own."""

    def __init__(self, ordinary: Any) -> None:
        object.__setattr__(self, "_ordinary", ordinary)
        object.__setattr__(self, "_own", threading.local())

    def _mine(self) -> Any:
        return getattr(self._own, "world", None) or self._ordinary

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mine(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._mine(), name, value)

    def enter(self) -> None:
        self._own.world = _World()

    def leave(self) -> None:
        world = getattr(self._own, "world", None)
        # PyTorch keeps a second list, by name, in C++: a new world on this thread needs the names.
        for name in world.pg_names.values() if world is not None else ():
            c10d._unregister_process_group(name)
        self._own.world = None


@contextmanager
def thread_worlds() -> Iterator[None]:
    """Let threads have process groups of their own; other threads keep the ones they have."""
    if not isinstance(distributed_c10d._world, _ThreadWorlds):
        distributed_c10d._world = _ThreadWorlds(distributed_c10d._world)  # type: ignore[assignment]
    hook = sys.excepthook  # init_process_group replaces it, once per rank
    isolate = c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    isolate(True)
    try:
        yield
    finally:
        isolate(False)
        sys.excepthook = hook


def join_world(rank: int, world_size: int, create: Callable[[Any, Any], Any]) -> None:
    """Make this thread rank `rank` of a world of its own; `create` makes its process groups."""
    worlds: Any = distributed_c10d._world
    worlds.enter()
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "meta"])
    _local.create = create
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)


def leave_world() -> None:
    """Forget this thread's process groups."""
    worlds: Any = distributed_c10d._world
    worlds.leave()


_local = threading.local()


def _create(options: Any, _: Any) -> Any:
    create = getattr(_local, "create", None)
    if create is None:
        raise RuntimeError('the backend "simulated" exists only on ranks of Ranks(on="simulated")')
    members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return create(members, options.group_id)


def in_backward() -> bool:
    """Return whether this thread is inside ``backward()``."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` on this thread when the running ``backward()`` has computed everything.

    Callbacks run in the order in which they were given, so before those of an operation that is
    launched later: `DistributedDataParallel` waits for its buckets in such a callback, in C++,
    where a wait cannot be intercepted.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def raise_in_thread(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise `error` in another thread at its next step of Python code."""
    import ctypes

    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(error)
        )
