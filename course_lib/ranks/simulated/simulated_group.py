"""The process group of a simulated rank: ``torch.distributed`` on one side, a fabric on the other.

It turns every call into an `Operation` with flat lists of tensors and posts it. Only the endpoint
knows whether the fabric is in this process or at the other end of a socket.

A group has only a name and members. Everything else belongs to the rank whose thread calls it. So a
group that was kept from an earlier call works in a later one. A module that is imported once for
all ranks may also keep a group (``torch.distributed.nn``): it works for each rank that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks._torch.collective_table import KINDS, Collective, reduction_of, why_not
from course_lib.ranks._torch.python_group import PythonGroup
from course_lib.ranks._torch.thread_worlds import here, is_known, stray_thread
from course_lib.ranks.explain.lines import own_lines
from course_lib.ranks.explain.words import names_inside
from course_lib.ranks.simulated.handles import Handles
from course_lib.ranks.simulated.operation import NEW_GROUP, Endpoint, Operation
from course_lib.ranks.simulated.simulated_work import SimulatedWork, WorkQueue

_GONE = (
    "no longer exists: dist.destroy_process_group, or a call that failed, has ended it. Make a new "
    "one with dist.new_group"
)


@dataclass(eq=False)
class SimulatedRank:
    """Everything that belongs to one rank during one call: a thread needs it to be a rank."""

    rank: int
    world_size: int
    endpoint: Endpoint
    """The rank's side of the fabric."""
    locate: Callable[[], str]
    """Returns the line of user code that is running."""
    labels: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    """File name of a cell → its name for people."""
    world: object = field(default_factory=object)
    """Distinguishes this world from others that have groups of the same names."""
    stray: bool = field(default=False, init=False)
    """Whether a thread that the rank has started has called ``torch.distributed``."""
    libraries: set[str] = field(default_factory=set, init=False)
    """What it has imported that keeps the rank in a class or module."""

    def __post_init__(self) -> None:
        self.works = WorkQueue()
        self.handles = Handles(self.locate)

    def finish(self) -> None:
        """Check, at the end of a call, for mistakes that can be seen only then.

        Raises:
            RuntimeError: a thread that the rank started has called ``torch.distributed``.

        """
        self.handles.finish()
        if self.stray:
            raise RuntimeError(stray_thread(self.rank))

    def create(self, members: tuple[int, ...], name: str) -> SimulatedProcessGroup:
        """Make a process group."""
        return SimulatedProcessGroup(self.rank, members, name, self.world)


class SimulatedProcessGroup(PythonGroup):
    """One group of one rank.

    Args:
        rank: the rank, as a rank of the whole world.
        members: the group's ranks, in order, as ranks of the whole world.
        name: the name of the group, the same on all members.
        world: distinguishes its world from others that have groups of this name.

    """

    registered = "simulated"

    def __init__(
        self, rank: int, members: tuple[int, ...], name: str, world: object = None
    ) -> None:
        super().__init__(rank, members, name)
        self._world = world

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, SimulatedProcessGroup)
            and self._name == other._name
            and self._members == other._members
            and self._world is other._world
        )

    def __hash__(self) -> int:
        return hash(self._name)

    def __repr__(self) -> str:
        gone = "" if is_known(self) else f", which {_GONE}"
        return f"<process group of {names_inside(self._members)}{gone}>"

    def rank(self) -> int:
        return self._members.index(here().rank)

    getRank = rank

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: Any = None,
        pg_options: Any = None,
        group_name: str = "",
        group_desc: str | None = None,
        **_: Any,  # releases after 2.13 also pass the backend; it is always this one
    ) -> SimulatedProcessGroup | None:
        """Make a group. PyTorch calls this in ``dist.new_group``, on every rank."""
        self.meet(members := tuple(ranks), group_name)
        context = here()
        if context.rank not in members:
            return None
        group: SimulatedProcessGroup = context.create(members, group_name)
        if group_desc:
            group._set_group_desc(group_desc)
        return group

    def meet(self, members: tuple[int, ...], group_name: str) -> None:
        """Meet the other ranks that make this group."""
        context = here()
        # If only its members make a group, its name is a hash and not a number.
        of_all = group_name.isdecimal()
        context.endpoint.post(
            Operation(
                context.rank,
                NEW_GROUP,
                self._name if of_all else group_name,
                self._members if of_all else members,
                [],
                [],
                op=f"of {names_inside(members)}",
                where=context.locate(),
                made=group_name,
            )
        )

    def _collective(
        self, collective: Collective, arguments: tuple[Any, ...], options: Any
    ) -> dist.Work:
        kind = KINDS[collective.kind]
        root = self._peer(f"{kind.name} with root", options.rootRank) if kind.to_one else None
        result = collective.result(arguments)
        works = []
        for puts, gets in collective.operations(arguments, self.size()):
            tensors = [*puts, *gets]
            variant = collective.variant
            reduction = _reduction(options.reduceOp, tensors) if kind.reduces else variant
            works.append(self._post(kind.name, puts, gets, result, peer=root, op=reduction))
            if (limit := options.timeout.total_seconds()) > 0:
                works[-1].limit(limit)
        works[-1].before = works[:-1]  # they share one group, so they end in order
        return works[-1]

    def _message(self, kind: str, tensors: Any, peer: int | None, tag: int) -> dist.Work:
        puts, gets = (tensors, []) if kind == "send" else ([], tensors)
        return self._post(kind, puts, gets, tensors, peer=peer, tag=tag)

    def _post(
        self,
        kind: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        result: Any,
        *,
        peer: int | None,
        op: str = "",
        tag: int = 0,
    ) -> SimulatedWork:
        context = here()
        self._check(context)
        operation = Operation(
            context.rank,
            kind,
            self._name,
            self._members,
            list(inputs),
            list(outputs),
            peer=peer,
            op=op,
            tag=tag,
            where=context.locate(),
            lines=own_lines(context.labels),
            group_name=self.label,
        )
        operation.check_tensors()
        context.endpoint.post(operation)
        return SimulatedWork(operation, context.endpoint, context.works, context.handles, result)

    def _check(self, context: SimulatedRank) -> None:
        if context.rank not in self._members:
            raise RuntimeError(
                f"rank {context.rank} is not in this process group, which has "
                f"{names_inside(self._members)}"
            )
        if not is_known(self):
            raise RuntimeError(f"this process group {_GONE}")


def _reduction(op: Any, tensors: Sequence[torch.Tensor]) -> str:
    """Return the name of a reduction; raise if these tensors do not allow it."""
    name = reduction_of(op)
    for tensor in tensors:
        if tensor.is_sparse:
            raise NotImplementedError(
                "simulated ranks cannot reduce sparse tensors: use to_dense()"
            )
        if reason := why_not(name, tensor.dtype):
            raise ValueError(reason)
    return name
