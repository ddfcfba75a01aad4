"""All undocumented parts of PyTorch that simulated ranks need.

PyTorch keeps one world of process groups per process, in ``distributed_c10d._world``. Simulated
ranks are threads, and each needs its own world. PyTorch's own multi-threaded tests replace the same
object. Each function here has a test, which shows what a new release of PyTorch has changed.
"""

from __future__ import annotations

import builtins
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._guards import TracingContext
from torch.autograd import profiler
from torch.distributed import distributed_c10d

from course_lib.ranks._torch.process_world import refuse_other_numbers
from course_lib.ranks._torch.python_group import STAND_INS

BACKEND = "simulated"
_KEEP_THE_RANK = {
    *("accelerate", "colossalai", "deepspeed", "fairscale", "horovod", "ignite", "lightning"),
    *("lightning_fabric", "megatron", "pytorch_lightning"),
}
"""Libraries that keep the rank in a class or module, of which all threads share one."""


class World:
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
    """Stands in for PyTorch's world: it has the attributes of the thread's world, if there is one.

    Otherwise, it has those of the world of the process.
    """

    def __init__(self, ordinary: Any) -> None:
        object.__setattr__(self, "_ordinary", ordinary)

    @property
    def _here(self) -> Any:
        return self._ordinary if _local.world is None else _local.world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._here, name, value)


@contextmanager
def thread_worlds() -> Iterator[None]:
    """Let threads have their own process groups; all other threads keep the process's groups."""
    if not isinstance(distributed_c10d._world, _ThreadWorlds):
        distributed_c10d._world = _ThreadWorlds(distributed_c10d._world)  # type: ignore[assignment]
    hook = sys.excepthook  # init_process_group replaces it, once per rank
    isolate = c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    both = dist, distributed_c10d
    stand_ins: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        *((module, "init_process_group", _init_process_group) for module in both),
        (dist, "rendezvous", _rendezvous),
        (distributed_c10d, "_new_group_with_tag", _new_group),
        (distributed_c10d, "_new_process_group_helper", _new_process_group),
        (distributed_c10d, "_get_default_group", _get_default_group),
        (builtins, "__import__", _import),
        (threading.Thread, "start", _start_thread),
        (torch._C.Future, "wait", _wait_for_future),
        (torch.autograd, "_engine_run_backward", _run_backward),
        (torch.autograd.graph, "_engine_run_backward", _run_backward),
        (torch._C, "_ForceDispatchKeyGuard", _dispatch_key_guard),
        (torch, "compile", _compile),
    )
    with ExitStack() as stack:
        for owner, name, stand_in in stand_ins:
            stack.enter_context(_replaced(owner, name, stand_in))
        for module in both:
            for name, wrap in STAND_INS.items():
                stack.enter_context(replaced(module, name, wrap(getattr(module, name))))
        isolate(True)
        try:
            yield
        finally:
            isolate(False)
            sys.excepthook = hook


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or a class inside a ``with`` block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _replaced(owner: Any, name: str, stand_in: Callable[..., Any]) -> Any:
    """Replace a function by `stand_in`, whose first argument is the function as it was."""
    before = getattr(owner, name)

    @functools.wraps(before)
    def function(*args: Any, **kwargs: Any) -> Any:
        return stand_in(before, *args, **kwargs)

    return replaced(owner, name, function)


@contextmanager
def no_profiler() -> Iterator[None]:
    """Refuse PyTorch's profiler, which crashes when two threads of a process use it."""
    with ExitStack() as stack:
        for owner, *names in (
            (torch.profiler.profile, "start"),
            (torch.profiler.ExecutionTraceObserver, "start"),
            (profiler, "_prepare_profiler", "_run_on_profiler_start", "_disable_profiler"),
        ):
            for name in names:
                stack.enter_context(replaced(owner, name, _refuse_profiler))
        yield


def _refuse_profiler(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        "PyTorch's profiler is for one rank in a process, but simulated ranks are threads of one "
        "process. Use ranks.trace, which shows what the ranks did, or profile on "
        'Ranks(…, on="cpu")'
    )


# These functions stand in for PyTorch's or Python's own, which each gets as `before`.


def _init_process_group(
    before: Any,
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    *args: Any,
    **kwargs: Any,
) -> None:
    """On a rank, do nothing, or rejoin a world that the rank has left."""
    context = _local.context
    if context is None or backend == BACKEND:
        before(backend, init_method, timeout, world_size, rank, *args, **kwargs)
        return
    refuse_other_numbers(rank, world_size, context.rank, context.world_size)
    if not dist.is_initialized():
        _initialize(context)


def _new_group(
    before: Any,
    ranks: Any = None,
    timeout: Any = None,
    backend: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Make a simulated group on a rank, whatever backend it asks for.

    Releases up to 2.8 would make a real group of gloo if it is asked for by name.
    """
    requested_backend = backend if _local.context is None else None
    return before(ranks, timeout, requested_backend, *args, **kwargs)


def _new_process_group(
    before: Any, size: int, rank: int, ranks: Any, backend: Any, store: Any, name: str,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Let the ranks meet for a new group: releases up to 2.12 do not let them.

    There, a rank that does not make the group went unnoticed.
    """
    if _local.context is not None and ranks:
        distributed_c10d._get_default_group().meet(tuple(ranks), name)  # type: ignore[attr-defined]
    return before(size, rank, ranks, backend, store, name, *args, **kwargs)


def _rendezvous(before: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse what on a rank cannot work; in PyTorch only ``rpc`` still uses it."""
    if _local.context is None:
        return before(*args, **kwargs)
    raise RuntimeError(
        "torch.distributed.rpc needs a process for each rank, but simulated ranks are threads "
        'of one process: use Ranks(…, on="cpu")'
    )


def _import(before: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Note libraries that keep the rank when a rank imports them, also if they are loaded already.

    All ranks share their classes and modules, and so the rank that they keep.
    """
    module = before(name, *args, **kwargs)
    if _local.context is not None:
        _local.context.libraries |= _KEEP_THE_RANK & {name.partition(".")[0]}
    return module


def _start_thread(before: Any, thread: Any) -> None:
    """Let a new thread remember which rank has started it."""
    thread._started_by = _local.context
    before(thread)


def _get_default_group(before: Any) -> Any:
    """Raise a clear error on a thread that a rank has started."""
    _refuse_stray_thread()
    return before()


def _refuse_stray_thread() -> None:
    """Raise if a rank has started this thread, as only the rank's own thread may communicate.

    The rank notes that this happened.
    """
    rank = getattr(threading.current_thread(), "_started_by", None)
    if rank is not None and _local.context is None:
        rank.stray = True
        raise RuntimeError(stray_thread(rank.rank))


def stray_thread(rank: int) -> str:
    """Return the error text for ``torch.distributed`` on a thread that a rank has started."""
    return (
        f"rank {rank} calls torch.distributed on a thread that it has started. A simulated rank "
        "can communicate only on the thread that runs its function: make the call there, or use "
        'Ranks(…, on="cpu")'
    )


def _wait_for_future(before: Any, future: Any) -> Any:
    """On a rank, let other ranks run until a future is done.

    In C++, PyTorch combines the ranks' futures into plain ones (``torch.futures.collect_all``, the
    reducer). These end when the rank's works do, but their own wait would let no other rank run.
    """
    context = _local.context
    if context is not None and not future.done():
        context.works.finish_until(future.done)
    return before(future)


def _run_backward(before: Any, *args: Any, **kwargs: Any) -> Any:
    """After autograd's backward, watch the rank's handles again."""
    try:
        return before(*args, **kwargs)
    finally:
        if _local.context is not None:
            _local.context.handles.resume()


def _compile(before: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile for a rank alone: ranks share code, but compiled code has a rank's number inside.

    Releases before 2.13 cannot keep it apart. There, only functions of cells are a rank's own.
    """
    if _local.context is not None:
        if torch._C._len_torch_dispatch_stack():  # as operators are counted, each one must run
            kwargs["disable"] = True
        if "isolate_recompiles" in signature(before).parameters:
            kwargs.setdefault("isolate_recompiles", True)
    return before(*args, **kwargs)


@contextmanager
def _dispatch_key_guard(before: Any, *keys: Any) -> Iterator[None]:
    """After compiled code, around which this guard stands, watch the rank's handles again."""
    try:
        with before(*keys):
            yield
    finally:
        # While the compiler traces, PyTorch itself puts the modes back.
        if _local.context is not None and TracingContext.try_get() is None:
            _local.context.handles.resume()


def join_world(context: Any, world: World | None = None) -> None:
    """Make this thread a rank; `world` has its groups from earlier calls, if there are any."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "meta"])
    _local.context = context
    _local.world = World() if world is None else world
    # PyTorch keeps a second table of groups by name in C++, one for each thread.
    for group, name in _local.world.pg_names.items():
        c10d._register_process_group(name, group)  # type: ignore[arg-type]
    if not dist.is_initialized():
        _initialize(context)


def _initialize(context: Any) -> None:
    """Make the rank's default group, whose store is the rank's own.

    No other rank can set a key there, so a wait for one ends at once, with an error.
    """
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(milliseconds=1))
    dist.init_process_group(BACKEND, store=store, rank=context.rank, world_size=context.world_size)


def leave_world() -> None:
    """Leave this thread's process groups. The world keeps them."""
    world, _local.world, _local.context = _local.world, None, None
    for name in world.pg_names.values() if world is not None else ():
        c10d._unregister_process_group(name)  # type: ignore[arg-type]


def is_known(group: Any) -> bool:
    """Return whether this thread's world has a process group."""
    return group in distributed_c10d._world.pg_names


class _Local(threading.local):
    context: Any = None
    """The rank that this thread is: a `SimulatedRank`."""
    world: World | None = None


_local = _Local()


def current() -> Any:
    """Return the rank of this thread; ``None`` if this thread is not a rank."""
    return _local.context


def here() -> Any:
    """Return the rank of this thread.

    Raises:
        RuntimeError: this thread is not a rank.

    """
    _refuse_stray_thread()
    if _local.context is None:
        raise RuntimeError(
            f'the backend "{BACKEND}" works only on ranks of Ranks(on="simulated"), and there only '
            "on the thread that runs the function"
        )
    return _local.context


def _create(options: Any, _: Any) -> Any:
    members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return here().create(members, options.group_id)
