"""One operation of one rank, as a fabric sees it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from course_lib.ranks._torch.collective_table import (
    COLLECTIVES,
    KINDS,
    MONITORED_BARRIER,
    check_tensors,
    sent_to_others,
    signature_of,
    why_not,
)
from course_lib.ranks._torch.this_thread import unseen
from course_lib.ranks.trace.event import Event

NEW_GROUP = "new_group"
"""Kind of the operation in which ranks together make a process group. It takes no time."""


@dataclass(eq=False, slots=True)
class Operation:
    """One operation of one rank, from its posting to its end."""

    rank: int
    kind: str
    """``"send"``, ``"recv"``, or a collective, for example ``"all_reduce"``."""
    group: str
    """Name of the process group, the same on all its ranks."""
    members: tuple[int, ...]
    """The group's ranks, as ranks of the whole world."""
    inputs: list[torch.Tensor]
    """The tensors that this rank puts in."""
    outputs: list[torch.Tensor]
    """The tensors that it gets: written when the operation happens."""
    peer: int | None = None
    """The other rank, or the root, as a rank of the whole world; ``None`` in a recv: any rank."""
    op: str = ""
    """Of a reduction, e.g. ``"sum"``; of a new group, its ranks; else empty."""
    tag: int = 0
    where: str = ""
    """The line of the user's code."""
    lines: tuple[tuple[str, int], ...] = ()
    """The user's functions that are running; see `Event.lines`."""
    group_name: str = ""
    """The group's name in text for people; see `Event.group_name`."""
    made: str = ""
    """Name of the group that a `NEW_GROUP` makes."""
    seq: int = 0
    """Number, from 1, of the collective in its group, or of the message among similar ones.

    Similar messages have the same rank, kind and peer.
    """
    posted: float = 0.0
    """The rank's clock when it was posted, in virtual seconds."""
    turn: int = 0
    """Its place among the operations that its rank posted at the same clock."""
    end: float | None = None
    """When it ends, in virtual seconds; ``None`` while that is not known."""
    limit: float | None = None
    """Seconds that its rank waits for it; ``None``: without a limit."""
    missing: tuple[int, ...] | None = None
    """The ranks that had not started it when the limit was over; ``None`` if it was not over."""
    waited: bool = False
    """Whether its rank waited for it, or asked whether it is over."""
    numel: int = field(init=False)
    """Number of elements that the rank puts in; in a receive or a scatter, that it gets."""
    nbytes: int = field(init=False)
    dtype: str = field(init=False)

    def __post_init__(self) -> None:
        tensors = self.sizing
        self.numel = sum([t.numel() for t in tensors])
        self.dtype, size = _of_dtype(tensors[0].dtype) if tensors else ("", 1)
        self.nbytes = self.numel * size

    @property
    def sizing(self) -> list[torch.Tensor]:
        """The tensors that determine the operation's size."""
        kind = KINDS.get(self.kind)
        return self.outputs if kind and kind.sized_by_what_it_gets else self.inputs

    def check_tensors(self) -> None:
        """Raise ValueError, in words, unless it has the tensors that its kind needs."""
        k, peer_is_self = len(self.members), self.peer == self.rank
        check_tensors(self.kind, self.inputs, self.outputs, k, peer_is_self)

    def write(self, values: Iterable[torch.Tensor]) -> None:
        """Write the results, flat, into the outputs; for the network, not for the rank."""
        with torch.no_grad(), unseen():
            for target, value in zip(self.outputs, values, strict=True):
                target.detach().copy_(value.reshape(target.shape))

    def signature(self) -> str:
        """Return, in words, what must be equal on all ranks of a collective."""
        return signature_of(self.kind, self.op, self.peer, self.sizing)


@functools.cache
def _of_dtype(dtype: torch.dtype) -> tuple[str, int]:
    """Return a dtype's name, and the bytes of an element."""
    return str(dtype).removeprefix("torch."), dtype.itemsize


class Endpoint(Protocol):
    """A rank's side of a fabric: in the same process, or at the other end of a socket."""

    def post(self, operation: Operation) -> None:
        """Post an operation."""

    def wait(self, operation: Operation) -> None:
        """Return when the operation is over and its outputs are written."""

    def is_done(self, operation: Operation) -> bool:
        """Return whether the operation is over, at the rank's clock."""


class Mismatch(Exception):
    """Raised when operations that meet do not fit together; carries these operations.

    Without a `summary`, they belong to one collective and differ in what must be the same.
    """

    def __init__(self, operations: list[Operation], summary: str = "") -> None:
        super().__init__(summary)
        self.operations = operations
        self.summary = summary


def check_operation(operation: Operation) -> None:
    """Check an operation that a rank which is not trusted has described.

    Raises:
        ValueError: there is no such operation, or its rank may not post it.

    """
    members, peer = operation.members, operation.peer
    if operation.rank not in members or (peer is not None and peer not in members):
        raise ValueError("an operation names a rank outside its group")
    if operation.kind not in KINDS:
        raise ValueError(f"there is no operation {operation.kind!r}")
    kind = KINDS[operation.kind]
    operation.check_tensors()
    if kind.reduces:
        sizing = operation.sizing
        valid_op = bool(sizing) and not why_not(operation.op, sizing[0].dtype)
    else:
        valid_op = operation.op in _VARIANTS
    to_nobody = peer is None and (kind.to_one or kind.name == "send")
    if not valid_op or to_nobody:
        raise ValueError("the arguments of an operation do not fit together")


_VARIANTS = {collective.variant for collective in (*COLLECTIVES, MONITORED_BARRIER)}


def stream_of(operation: Operation) -> tuple[bool, str]:
    """Return the stream in which a collective is numbered.

    Each group has two: one for its collectives, and one for the groups that are made in it.
    """
    return operation.kind == NEW_GROUP, operation.group


def event_of(operation: Operation, end: float) -> Event:
    """Return the event of the trace for an operation that ends at `end`."""
    return Event(
        operation.rank,
        operation.kind,
        operation.members,
        operation.peer,
        operation.nbytes,
        operation.dtype,
        operation.seq,
        operation.posted,
        end,
        operation.where,
        operation.group_name,
        operation.waited,
        sent_to_others(operation.kind, operation.inputs, operation.members.index(operation.rank)),
        operation.tag,
        operation.turn,
        operation.lines,
    )
