"""One operation of one rank, as a fabric sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from course_lib.ranks.metered.recorder import Event


@dataclass(eq=False, slots=True)
class Operation:
    """One operation of one rank, from its posting to its end."""

    rank: int
    kind: str
    """``"send"``, ``"recv"``, or a collective: ``"all_reduce"``."""
    group: str
    members: tuple[int, ...]
    """The group's ranks, as ranks of the whole."""
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    peer: int | None = None
    """The other rank, or the root, as a rank of the whole; ``None`` in a recv: any rank."""
    op: str = ""
    tag: int = 0
    where: str = ""
    uneven: bool = False
    """Whether the ranks may put in different sizes."""
    seq: int = 0
    posted: float = 0.0
    end: float | None = None
    """When it ends, in virtual seconds; ``None`` while nobody knows."""
    numel: int = field(init=False)
    """Elements that it puts in; for a receive and a scatter, that it gets."""
    nbytes: int = field(init=False)
    dtype: str = field(init=False)

    def __post_init__(self) -> None:
        tensors = self.outputs if self.kind in ("recv", "scatter") else self.inputs
        self.numel = sum([t.numel() for t in tensors])
        first = tensors[0].dtype if tensors else torch.uint8
        self.nbytes = self.numel * first.itemsize
        self.dtype = str(first)[len("torch.") :] if tensors else ""

    def signature(self) -> str:
        """Return what must be equal on all ranks of a collective, in words."""
        words = [self.kind]
        if self.op:
            words.append(self.op)
        if self.peer is not None:
            words.append(f"root={self.peer}")
        if self.dtype:
            words.append(self.dtype)
        if not self.uneven and self.dtype:
            words.append(f"{self.numel} elements")
        return " ".join(words)


class Mismatch(Exception):
    """Operations that meet do not fit together; carries them."""

    def __init__(self, summary: str, operations: list[Operation]) -> None:
        super().__init__(summary)
        self.operations = operations


def check_tensors(operation: Operation) -> None:
    """Check that an operation has the tensors that its kind needs, of the sizes that it needs.

    Raises:
        ValueError: it has not; says what.

    """
    kind, k = operation.kind, len(operation.members)
    puts = [t.numel() for t in operation.inputs]
    gets = [t.numel() for t in operation.outputs]
    here = operation.peer == operation.rank
    if len({t.dtype for t in (*operation.inputs, *operation.outputs)}) > 1:
        raise ValueError(f"all tensors of one {kind} must have the same dtype")
    expected: dict[str, tuple[bool, str]] = {
        "send": (len(puts) == 1 and not gets, "one tensor"),
        "recv": (len(gets) == 1 and not puts, "one tensor"),
        "all_reduce": (puts == gets, "the same tensors in and out"),
        "broadcast": (puts == gets, "the same tensors in and out"),
        "reduce": (puts == gets, "the same tensors in and out"),
        "all_gather": (
            len(puts) == 1 and gets == puts * k,
            f"one tensor in and {k} of its size out",
        ),
        "gather": (
            len(puts) == 1 and gets == puts * (k if here else 0),
            f"one tensor in and, at the root, {k} of its size out",
        ),
        "scatter": (
            len(gets) == 1 and puts == gets * (k if here else 0),
            f"one tensor out and, at the root, {k} of its size in",
        ),
        "reduce_scatter": (
            len(gets) == 1 and puts == gets * k,
            f"one tensor out and {k} of its size in",
        ),
        "all_to_all": (len(puts) == len(gets) == k, f"{k} tensors in and {k} out"),
        "barrier": (not puts and not gets, "no tensors"),
    }
    if kind not in expected:
        raise ValueError(f"there is no operation {kind!r}")
    right, what = expected[kind]
    if not right:
        raise ValueError(
            f"{kind} on {k} ranks needs {what}, got {puts} elements in and {gets} elements out"
        )


def event_of(operation: Operation) -> Event:
    """Return the line of the trace for an operation that is over."""
    assert operation.end is not None
    return Event(
        operation.rank,
        operation.kind,
        operation.members,
        operation.peer,
        operation.nbytes,
        operation.dtype,
        operation.seq,
        operation.posted,
        operation.end,
        operation.where,
    )
