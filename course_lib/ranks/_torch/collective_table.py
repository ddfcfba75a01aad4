"""The one table of all operations of ``torch.distributed``, for all code that must know them.

`KINDS` describes each operation, independently of what carries it out: gloo, NCCL, a fabric or a
socket. An entry has the operation's schema (`Kind.needs`, `Kind.fits`), its text for people
(`Kind.needs`, `signature_of`) and its effect on values (`Kind.effect`). Its cost is the entry of
the same name in `costs.collective_time.COSTS`, because `trace`, in a lower layer, needs it, too. A
test compares the two.

`COLLECTIVES` describes how PyTorch calls a process group: it has several methods for one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from course_lib.ranks.explain.mismatch import Splits
from course_lib.ranks.explain.words import counted

Tensors = list[torch.Tensor]
Sizes = Sequence[int]


# These functions carry out a collective on the tensors of all ranks. A sum is added in rank order,
# in float32 for the 16-bit types, and rounded once. Every rank gets the same bits. gloo and NCCL
# add in other orders, so their results differ from these by rounding.

Effect = Callable[[Sequence[Tensors], Sequence[Tensors], int, str], None]
"""``effect(inputs, outputs, root, op)``: reads every rank's inputs, writes every rank's outputs."""

REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,
    "product": torch.Tensor.mul_,
    "min": lambda total, part: torch.minimum(total, part, out=total),
    "max": lambda total, part: torch.maximum(total, part, out=total),
    "band": torch.Tensor.bitwise_and_,
    "bor": torch.Tensor.bitwise_or_,
    "bxor": torch.Tensor.bitwise_xor_,
}


def why_not(op: str, dtype: torch.dtype) -> str:
    """Return why tensors of `dtype` cannot be reduced by `op`; empty if they can."""
    is_integer = not (dtype.is_floating_point or dtype.is_complex)
    if op not in REDUCTIONS:
        return f"ReduceOp.{op.upper()} does not work on simulated ranks"
    if op == "avg" and is_integer:
        return f"ReduceOp.AVG needs a floating-point dtype, got {dtype}"
    if op in ("band", "bor", "bxor") and not is_integer:
        return f"ReduceOp.{op.upper()} needs integers, got {dtype}"
    if op in ("min", "max") and dtype.is_complex:
        return f"ReduceOp.{op.upper()} compares numbers, but {dtype} numbers have no order"
    return ""


def reduce_tensors(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Return the reduction of tensors of equal size, flat.

    Raises:
        ValueError: the operation, or the operation on this dtype, does not exist.

    """
    dtype = parts[0].dtype
    if reason := why_not(op, dtype):
        raise ValueError(reason)
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    total = parts[0].reshape(-1).to(wide, copy=True)
    for part in parts[1:]:
        REDUCTIONS[op](total, part.reshape(-1).to(wide))
    if op == "avg":
        total /= len(parts)
    return total.to(dtype)


def _write(target: torch.Tensor, source: torch.Tensor) -> None:
    target.detach().copy_(source.detach().reshape(target.shape))


def _all_reduce(inputs: Sequence[Tensors], outputs: Sequence[Tensors], root: int, op: str) -> None:
    _reduce_to(range(len(inputs)), inputs, outputs, op)


def _reduce(inputs: Sequence[Tensors], outputs: Sequence[Tensors], root: int, op: str) -> None:
    _reduce_to([root], inputs, outputs, op)


def _reduce_to(
    targets: Sequence[int], inputs: Sequence[Tensors], outputs: Sequence[Tensors], op: str
) -> None:
    for i in range(len(inputs[0])):
        total = reduce_tensors([tensors[i] for tensors in inputs], op)
        for rank in targets:
            _write(outputs[rank][i], total)


def _reduce_scatter(
    inputs: Sequence[Tensors], outputs: Sequence[Tensors], root: int, op: str
) -> None:
    ranks = range(len(inputs))
    totals = [reduce_tensors([tensors[i] for tensors in inputs], op) for i in ranks]
    for rank in ranks:
        _write(outputs[rank][0], totals[rank])


def _broadcast(inputs: Sequence[Tensors], outputs: Sequence[Tensors], root: int, op: str) -> None:
    for rank in range(len(inputs)):
        for target, value in zip(outputs[rank], inputs[root], strict=True):
            if rank != root:
                _write(target, value)


def _all_gather(inputs: Sequence[Tensors], outputs: Sequence[Tensors], root: int, op: str) -> None:
    for gets in outputs:
        for target, puts in zip(gets, inputs, strict=True):
            _write(target, puts[0])


def _gather(inputs: Sequence[Tensors], outputs: Sequence[Tensors], root: int, op: str) -> None:
    for target, puts in zip(outputs[root], inputs, strict=True):
        _write(target, puts[0])


def _scatter(inputs: Sequence[Tensors], outputs: Sequence[Tensors], root: int, op: str) -> None:
    for gets, value in zip(outputs, inputs[root], strict=True):
        _write(gets[0], value)


def _all_to_all(inputs: Sequence[Tensors], outputs: Sequence[Tensors], root: int, op: str) -> None:
    sent = [[tensor.clone() for tensor in tensors] for tensors in inputs]
    for rank, gets in enumerate(outputs):
        for source, target in enumerate(gets):
            _write(target, sent[source][rank])


def _nothing(inputs: Sequence[Tensors], outputs: Sequence[Tensors], root: int, op: str) -> None:
    pass


@dataclass(frozen=True)
class Kind:
    """A kind of operation."""

    name: str
    """Its name in ``torch.distributed``."""
    needs: str
    """In words, the tensors that a rank must bring; ``{k}`` stands for the number of ranks."""
    fits: Callable[[Sizes, Sizes, int, bool], bool]
    """``fits(puts, gets, k, at_root)`` returns whether tensors with these numbers of elements are
    what the operation needs; `at_root` is whether the rank is the root."""
    to_one: bool = False
    """Whether the operation must name a rank: the receiver of a send, the root of a collective."""
    reduces: bool = False
    in_place: bool = False
    """Whether a rank's input tensors are also its output tensors."""
    uneven: bool = False
    """Whether sizes may differ between ranks."""
    sized_by_what_it_gets: bool = False
    effect: Effect | None = None
    """Carries out a collective; ``None`` for a message."""


def _same(puts: Sizes, gets: Sizes, k: int, at_root: bool) -> bool:
    return list(puts) == list(gets)


_IN_PLACE = "the same tensors as inputs and outputs"

KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "send", "one tensor", lambda puts, gets, k, at_root: len(puts) == 1 and not gets,
            to_one=True,
        ),
        Kind(
            "recv", "one tensor", lambda puts, gets, k, at_root: len(gets) == 1 and not puts,
            sized_by_what_it_gets=True,
        ),
        Kind(
            "barrier", "no tensors", lambda puts, gets, k, at_root: not puts and not gets,
            effect=_nothing,
        ),
        Kind("broadcast", _IN_PLACE, _same, to_one=True, in_place=True, effect=_broadcast),
        Kind(
            "reduce", _IN_PLACE, _same, to_one=True, reduces=True, in_place=True, effect=_reduce,
        ),
        Kind("all_reduce", _IN_PLACE, _same, reduces=True, in_place=True, effect=_all_reduce),
        Kind(
            "gather", "one input tensor and, on the root, {k} output tensors of the same size",
            lambda puts, gets, k, at_root: (
                len(puts) == 1 and list(gets) == list(puts) * (k if at_root else 0)
            ),
            to_one=True, effect=_gather,
        ),
        Kind(
            "scatter", "one output tensor and, on the root, {k} input tensors of the same size",
            lambda puts, gets, k, at_root: (
                len(gets) == 1 and list(puts) == list(gets) * (k if at_root else 0)
            ),
            to_one=True, sized_by_what_it_gets=True, effect=_scatter,
        ),
        Kind(
            "all_gather", "one input tensor and {k} output tensors of the same size",
            lambda puts, gets, k, at_root: len(puts) == 1 and list(gets) == list(puts) * k,
            effect=_all_gather,
        ),
        Kind(
            "reduce_scatter", "one output tensor and {k} input tensors of the same size",
            lambda puts, gets, k, at_root: len(gets) == 1 and list(puts) == list(gets) * k,
            reduces=True, effect=_reduce_scatter,
        ),
        Kind(
            "all_to_all", "{k} input tensors and {k} output tensors",
            lambda puts, gets, k, at_root: len(puts) == len(gets) == k,
            uneven=True, effect=_all_to_all,
        ),
    )
}  # fmt: skip
"""The operations. Their order must never change, because a socket sends their positions."""


@dataclass(frozen=True)
class Collective:
    """How PyTorch calls a process group for a collective."""

    kind: str
    method: str
    options: Callable[[], Any]
    arguments: int
    """How many arguments come before the options."""
    operations: Callable[[tuple[Any, ...], int], list[tuple[Tensors, Tensors]]]
    """``operations(arguments, k)`` returns the operations of the call, usually one: for each, the
    tensors that this rank puts in and the tensors that it gets."""
    result: Callable[[tuple[Any, ...]], Any] = lambda arguments: arguments[0]
    """Returns the value of the future."""
    one_by_one: str = ""
    """The method for a single operation, for backends that lack the method for several."""
    variant: str = ""
    """A word that all ranks of one call must have in common, beside the kind."""
    old_method: str = ""
    """Name of the method in releases before 2.13."""

    @property
    def in_place(self) -> bool:
        """Whether its only argument is a list of tensors, which it writes to."""
        return self.operations is _in_place


def _in_place(arguments: tuple[Any, ...], k: int) -> list[tuple[Tensors, Tensors]]:
    return [(list(arguments[0]), list(arguments[0]))]


def _from_lists(arguments: tuple[Any, ...], k: int) -> list[tuple[Tensors, Tensors]]:
    """Return the operation of a call with one input and one list of outputs."""
    outputs, inputs = arguments
    return [(list(inputs), list(outputs[0]) if outputs else [])]


def _to_lists(arguments: tuple[Any, ...], k: int) -> list[tuple[Tensors, Tensors]]:
    """Return the operation of a call with one list of inputs and one output."""
    outputs, inputs = arguments
    return [(list(inputs[0]) if inputs else [], list(outputs))]


def _first(arguments: tuple[Any, ...]) -> list[Any]:
    return [arguments[0]]


COLLECTIVES = (
    Collective(
        "broadcast", "broadcast", dist.BroadcastOptions, 1, _in_place,
    ),
    Collective(
        "all_reduce", "allreduce", dist.AllreduceOptions, 1, _in_place,
    ),
    Collective(
        "all_reduce", "allreduce_coalesced", dist.AllreduceCoalescedOptions, 1, _in_place,
    ),
    Collective(
        "reduce", "reduce", dist.ReduceOptions, 1, _in_place,
    ),
    Collective(
        "all_gather", "allgather", c10d.AllgatherOptions, 2, _from_lists,
    ),
    Collective(
        "all_gather", "all_gather_single", c10d.AllgatherOptions, 2,
        lambda arguments, k: [([arguments[1]], pieces(arguments[0], k))],
        result=_first, old_method="_allgather_base",
    ),
    Collective(
        "all_gather", "allgather_coalesced", c10d.AllgatherOptions, 2,
        lambda arguments, k: [
            ([tensor], [output[i] for output in arguments[0]])
            for i, tensor in enumerate(arguments[1])
        ],
    ),
    Collective(
        "all_gather", "all_gather_single_coalesced", c10d.AllgatherOptions, 2,
        lambda arguments, k: [
            ([tensor], pieces(output, k))
            for output, tensor in zip(*arguments, strict=True)
        ],
        one_by_one="all_gather_single", old_method="allgather_into_tensor_coalesced",
    ),
    Collective(
        "gather", "gather", c10d.GatherOptions, 2, _from_lists,
    ),
    Collective(
        "scatter", "scatter", c10d.ScatterOptions, 2, _to_lists,
    ),
    Collective(
        "reduce_scatter", "reduce_scatter", c10d.ReduceScatterOptions, 2, _to_lists,
    ),
    Collective(
        "reduce_scatter", "reduce_scatter_single", c10d.ReduceScatterOptions, 2,
        lambda arguments, k: [(pieces(arguments[1], k), [arguments[0]])],
        result=_first, old_method="_reduce_scatter_base",
    ),
    Collective(
        "reduce_scatter", "reduce_scatter_single_coalesced", c10d.ReduceScatterOptions, 2,
        lambda arguments, k: [
            (pieces(tensor, k), [output]) for output, tensor in zip(*arguments, strict=True)
        ],
        one_by_one="reduce_scatter_single", old_method="reduce_scatter_tensor_coalesced",
    ),
    Collective(
        "all_to_all", "all_to_all_single", dist.AllToAllOptions, 4,
        lambda arguments, k: [
            (pieces(arguments[1], k, arguments[3]), pieces(arguments[0], k, arguments[2]))
        ],
        result=_first, old_method="alltoall_base",
    ),
    Collective(
        "all_to_all", "alltoall", dist.AllToAllOptions, 2,
        lambda arguments, k: [(list(arguments[1]), list(arguments[0]))],
    ),
    Collective(
        "barrier", "barrier", dist.BarrierOptions, 0, lambda arguments, k: [([], [])],
        result=lambda arguments: None,
    ),
)  # fmt: skip


MONITORED_BARRIER = replace(COLLECTIVES[-1], variant="monitored")
"""A barrier in which ranks that call ``barrier`` do not take part, as with gloo."""


def check_tensors(name: str, puts: Tensors, gets: Tensors, k: int, peer_is_self: bool) -> None:
    """Check that an operation of `k` ranks has the tensors that its kind needs, in the right sizes.

    `peer_is_self`: whether this rank is the root, or the other side of its own message.

    Raises:
        ValueError: it does not; the message says what is wrong.

    """
    if peer_is_self and name in ("send", "recv"):
        raise ValueError(
            f"{name} needs another rank: within a rank, copy the tensor with y.copy_(x)"
        )
    if len({t.dtype for t in (*puts, *gets)}) > 1:
        raise ValueError(f"all tensors of one {name} must have the same dtype")
    if len({t.is_meta for t in (*puts, *gets)}) > 1:
        raise ValueError(f"some tensors of one {name} are on the device meta and have no values")
    sent, received = [t.numel() for t in puts], [t.numel() for t in gets]
    if not KINDS[name].fits(sent, received, k, peer_is_self):
        needs = KINDS[name].needs.format(k=k)
        raise ValueError(
            f"{name} on {counted(k, 'rank')} needs {needs}; on this rank the input tensors have "
            f"{sent} elements and the output tensors {received}"
        )


def is_uneven(kind: str) -> bool:
    """Return whether pieces of an operation may differ in size: whether it is an all-to-all."""
    return kind in KINDS and KINDS[kind].uneven


def splits_of(members: Sequence[int], puts: Tensors, gets: Tensors) -> Splits:
    """Return what a rank of an all-to-all sends to and expects from each member, in elements."""
    return (
        {to: piece.numel() for to, piece in zip(members, puts, strict=True)},
        {source: piece.numel() for source, piece in zip(members, gets, strict=True)},
    )


def sent_to_others(kind: str, puts: Sequence[torch.Tensor], me: int) -> int | None:
    """Return the bytes for other ranks if pieces may differ in size (all-to-all), else ``None``.

    `me`: the rank's position in the group.
    """
    if not is_uneven(kind):
        return None
    return sum(piece.nbytes for to, piece in enumerate(puts) if to != me)


def pieces(tensor: torch.Tensor, count: int, splits: Sequence[int] | None = None) -> Tensors:
    """Return views of `tensor`, one per rank: of equal size, or with the rows that `splits` gives.

    Raises:
        ValueError: the tensor cannot be cut in this way.

    """
    if not splits and not tensor.is_contiguous():  # only its rows are views of it
        splits = [tensor.size(0) // count] * count
    if splits:
        if len(splits) != count or sum(splits) != tensor.size(0):
            raise ValueError(
                f"split sizes {list(splits)} must be {count} numbers, one for each rank, and add "
                f"up to the {tensor.size(0)} rows of the tensor"
            )
        return list(torch.split(tensor, list(splits)))
    if tensor.numel() % count:
        raise ValueError(
            f"a tensor of {counted(tensor.numel(), 'element')} cannot be divided equally among "
            f"{count} ranks"
        )
    # An empty tensor would give no pieces at all.
    return [tensor.view(count, -1)[i] for i in range(count)] if tensor.numel() else [tensor] * count


def reduction_of(op: Any) -> str:
    """Return the name of a ``ReduceOp``, for example ``sum``."""
    name = str(getattr(op, "op", op)).rpartition(".")[2].partition(":")[0]
    return name.lower().strip("<> ")


def signature_of(
    kind: str, reduction: str, root: int | None, tensors: Sequence[torch.Tensor]
) -> str:
    """Return, in words, what must be the same on every rank that takes part in a collective.

    `tensors`: what this rank puts in; for a scatter, what it gets.
    """
    properties = [kind]
    if reduction:
        properties.append(reduction)
    if root is not None:
        properties.append(f"root={root}")
    if tensors:
        properties.append(str(tensors[0].dtype).removeprefix("torch."))
        if any(tensor.is_meta for tensor in tensors):
            properties.append("without values (device meta)")
        if not KINDS[kind].uneven:
            properties.append(counted(sum(tensor.numel() for tensor in tensors), "element"))
    return " ".join(properties)
