"""One rank's world of process groups, from call to call.

A script makes its world, uses it and destroys it, but a notebook uses its ranks again and again. So
here a call cannot destroy the world for good:

- ``dist.init_process_group(...)`` finds that the ranks have already joined.
  ``destroy_process_group()`` has effect only until the end of the call.
- Every call numbers its groups from its own start number. So a rank that skipped a group in an
  earlier call is in step again. Calls of ``dist.new_group`` are counted on the board: a call that a
  rank skipped is found at the end.
- Groups that nothing refers to any more are freed, together with gloo's threads and sockets.
- After a call that was given up, every group connects again, so that data left in the old
  connections cannot be received.

All this needs parts of PyTorch that are not documented; their use is in `_torch.process_world`.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from course_lib.ranks._torch.compiler import untraced
from course_lib.ranks._torch.process_world import (
    all_groups,
    group_names,
    is_registered,
    name_of,
    number_groups_from,
    put_back,
    refuse_other_numbers,
    replace_new_group,
    tables_of,
)
from course_lib.ranks._torch.python_group import STAND_INS
from course_lib.ranks.explain.words import spans
from course_lib.ranks.processes.gpu_group import connect
from course_lib.ranks.processes.metered_group import NAMES_PER_CALL, MeteredProcessGroup
from course_lib.ranks.processes.rank_recorder import RankRecorder

_FEW_GROUPS = 8
"""Up to this number of groups, it is not worth looking for groups that can be freed."""

_installed: tuple[RankRecorder, str] | None = None
_world: World | None = None


def install(recorder: RankRecorder, backend: str = "gloo") -> None:
    """Make the backend ``metered`` known to torch.distributed in this process.

    Args:
        recorder: the recorder of this rank.
        backend: ``"gloo"`` or ``"nccl"``: through which the metered groups communicate.

    """
    global _installed
    _installed = recorder, backend
    if "metered" not in dist.Backend.backend_list:
        together = functools.partial(_start_batch, c10d.batch_isend_irecv)
        _stand_in("batch_isend_irecv", together)
        for name, stand_in in STAND_INS.items():
            _stand_in(name, stand_in(getattr(c10d, name)))
        dist.Backend.register_backend(
            "metered", _create, extended_api=True, devices=["cpu", "cuda"]
        )


def joined_world() -> World | None:
    """Return the world of this process, if it is one of the ranks that `Ranks` started."""
    return _world


def _create(options: Any, _: Any) -> MeteredProcessGroup:
    if _installed is None:
        raise RuntimeError("the backend 'metered' exists only on ranks that Ranks(...) started")
    recorder, backend = _installed
    members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    name, store, timeout = options.group_id, options.store, options.timeout
    if _world is not None:
        return _world.create(members, name, timeout)
    rank = members.index(recorder.rank)
    group = MeteredProcessGroup(
        members, name, recorder, lambda: connect(backend, store, rank, len(members), timeout)
    )
    _connect(group, recorder, backend)
    return group


def _connect(group: MeteredProcessGroup, recorder: RankRecorder, backend: str) -> None:
    """Connect a new group, and show that this rank may wait for the other members."""
    group.backend = backend
    with _without_greeting(), recorder.connecting(group.key, group.members):
        group.connect()


def _stand_in(name: str, function: Callable[..., Any]) -> None:
    """Replace a function of ``torch.distributed`` by `function`."""
    for module in (dist, c10d):
        setattr(module, name, function)


def count_new_groups(recorder: RankRecorder) -> None:
    """Let ``dist.new_group`` count its calls on the board, and make only metered groups."""

    def wrap(new_group: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(new_group)

        def counted(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            backend = bound.arguments.get("backend")
            if not is_registered(backend):
                bound.arguments["backend"] = None  # use the metered default, also for "gloo"
            if not bound.arguments.get("use_local_synchronization"):
                recorder.enter_new_group(bound.arguments.get("ranks"))
            group = new_group(*bound.args, **bound.kwargs)
            if backend and isinstance(group, MeteredProcessGroup):
                group.backend = str(backend)
            return group

        return counted

    replace_new_group(wrap)


@untraced
def _start_batch(
    one_by_one: Callable[[Any], list[dist.Work]], p2p_op_list: list[Any]
) -> list[dist.Work]:
    """Stand in for ``dist.batch_isend_irecv``, which cannot launch a batch on metered groups."""
    if not all(isinstance(op, dist.P2POp) for op in p2p_op_list):
        return one_by_one(p2p_op_list)  # PyTorch reports the wrong argument
    groups = {dist.group.WORLD if op.group is None else op.group for op in p2p_op_list}
    group = groups.pop() if len(groups) == 1 else None
    if not isinstance(group, MeteredProcessGroup) or not group.launches_batches(
        [op.tensor for op in p2p_op_list]
    ):
        return one_by_one(p2p_op_list)
    return group.batch(
        [
            ("send" if op.op is dist.isend else "recv", op.tensor, op.group_peer, op.tag)
            for op in p2p_op_list
        ]
    )


@contextmanager
def _without_greeting() -> Iterator[None]:
    """Hide what gloo prints after it has connected, which it does before PyTorch 2.11."""
    if torch.__version__ >= "2.11":
        yield
        return
    sys.stdout.flush()
    output = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(output, 1)
        os.close(output)


class World:
    """The process groups of a rank that `Ranks` started. There is one per process.

    Args:
        recorder: the recorder of this rank.
        path: the path of the file through which the ranks find one another.
        timeout: the time limit of waits in gloo.
        backend: ``"gloo"`` or ``"nccl"``: through which its groups communicate.

    """

    def __init__(
        self, recorder: RankRecorder, path: str, timeout: timedelta, backend: str = "gloo"
    ) -> None:
        global _world
        _world = self
        self.recorder = recorder
        self._size = recorder.board.world_size
        self._timeout = timeout
        self.backend = backend
        self._store = dist.FileStore(path, self._size)  # type: ignore[attr-defined]
        self._generation = 0
        self._call = 0
        self._destroyed = 0
        self._everyone: MeteredProcessGroup | None = None
        # In the order in which they were made, which is the same on all ranks: on macOS, connecting
        # them again waits for the other members.
        self._groups: weakref.WeakValueDictionary[int, MeteredProcessGroup]
        self._groups = weakref.WeakValueDictionary()
        self._made = 0
        # Each is in its own list, so that a separate thread can free it: freeing one takes as long
        # as it still waits for something.
        self._given_up: list[list[Any]] = []
        self._looked_at = _FEW_GROUPS
        self._local: Counter[tuple[int, ...]] = Counter()
        """Members → how many groups they have made without the other ranks in this call."""
        install(recorder, backend)
        self._init = c10d.init_process_group
        _stand_in("init_process_group", self._join_again)
        count_new_groups(recorder)
        self._join()

    # Joining, and joining again -----------------------------------------------------------------

    def _join(self) -> None:
        rank, store = self.recorder.rank, self._store
        number_groups_from(0)  # so the group of all ranks always has the same name
        self._init("metered", store=store, rank=rank, world_size=self._size, timeout=self._timeout)
        self._destroyed += 1
        number_groups_from(self._call * NAMES_PER_CALL + self._destroyed * 1000)

    def _join_again(
        self,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        world_size: int = -1,
        rank: int = -1,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Stand in for ``dist.init_process_group``, because these ranks have already joined."""
        if is_registered(backend) and backend != "metered":
            self._init(backend, init_method, timeout, world_size, rank, *args, **kwargs)
            return
        refuse_other_numbers(rank, world_size, self.recorder.rank, self._size)
        if not dist.is_initialized():
            self._join()

    def begin(self, call: int, generation: int) -> None:
        """Restore the world before a call, whose number `call` is the same on all ranks.

        `generation` says how many calls were given up before it.
        """
        if generation != self._generation:
            self._generation = generation
            self.recorder.give_up()
            if self.backend == "gloo":  # keep NCCL's: freeing a stuck one is not tested on a GPU
                self._free_given_up()
            groups = list(self._groups.values())
            self._given_up += [[group._inner] for group in groups]
            for group in groups:
                group.connect()
        self._call, self._destroyed = call, 0
        self._local.clear()
        if not dist.is_initialized():
            self._join()
        number_groups_from(call * NAMES_PER_CALL + 1)
        if len(all_groups()) > self._looked_at:
            self._free_groups()
            self._looked_at = max(_FEW_GROUPS, 2 * len(all_groups()))

    # Groups -------------------------------------------------------------------------------------

    def create(
        self, members: tuple[int, ...], name: str, timeout: timedelta
    ) -> MeteredProcessGroup:
        """Return a new group; for the group of all ranks, return the existing one, if any."""
        everyone = self._everyone
        if name == "0" and everyone is not None:
            return everyone
        rank = members.index(self.recorder.rank)
        if not name.isdecimal():
            # Only its members make this group. PyTorch's own name counts all groups of this rank,
            # and other members may have others.
            self._local[members] += 1
            name = f"ranks {spans(members)}, number {self._local[members]}"
        made_in = f"{name} of call {self._call}, world {self._destroyed}"

        def inner() -> Any:
            prefix = f"{made_in}, generation {self._generation}"
            apart = dist.PrefixStore(prefix, self._store)  # type: ignore[attr-defined]
            return connect(self.backend, apart, rank, len(members), timeout, lazy=name != "0")

        group = MeteredProcessGroup(members, name, self.recorder, inner)
        _connect(group, self.recorder, self.backend)
        self._made += 1
        self._groups[self._made] = group
        if name == "0":
            self._everyone = group
        return group

    def _free_given_up(self) -> None:
        """Free the connections that were replaced when an earlier call was given up.

        Nothing else refers to them any more. Each has a gloo thread that wakes 100 times a second.
        """
        for connection in self._given_up:
            threading.Thread(target=connection.clear, daemon=True).start()
        self._given_up = []

    def _free_groups(self) -> None:
        """Destroy the groups that only PyTorch's tables hold, and no variable or device mesh."""
        mesh_group_names = {
            name for obj in gc.get_objects() if type(obj) is DeviceMesh for name in group_names(obj)
        }
        recorder = self.recorder
        works = [*recorder.open_collectives, *recorder.open_messages]
        busy = {work.group for work in works}
        groups = all_groups()
        while groups:
            group = groups.pop()
            name = name_of(group)
            if (
                group is self._everyone
                or name in mesh_group_names
                or getattr(group, "key", 0) in busy
            ):
                continue
            entries = tables_of(group)
            reference = weakref.ref(group)
            dist.destroy_process_group(group)
            del group
            if (still := reference()) is not None:
                put_back(still, entries)
