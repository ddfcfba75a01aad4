"""The process group of a simulated rank: ``torch.distributed`` on one side, a fabric on the other.

It turns every call into an `Operation` with flat lists of tensors and posts it. Whether the fabric
is in this process or at the other end of a socket is the endpoint's affair.
"""

# PyTorch declares two overloads of every operation; its Python callers use the one with options.
# mypy: disable-error-code="override,assignment"
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from course_lib.ranks.fabric.operation import Operation, check_tensors
from course_lib.ranks.fabric.values import REDUCTIONS
from course_lib.ranks.fabric.work import SimulatedWork, WorkQueue


class Endpoint(Protocol):
    """A rank's side of a fabric."""

    def post(self, operation: Operation) -> None:
        """Post an operation."""

    def wait(self, operation: Operation) -> None:
        """Return when the operation is over and its outputs are written."""

    def is_done(self, operation: Operation) -> bool:
        """Return whether the operation is over, at the rank's clock."""


class SimulatedProcessGroup(dist.ProcessGroup):
    """One group of one rank.

    Args:
        rank: of the whole.
        members: the group's ranks, in order, as ranks of the whole.
        name: the same on all members.
        endpoint: the rank's side of the fabric.
        queue: the rank's operations that someone may wait for in C++.
        locate: returns the line of user code that is running.

    """

    def __init__(
        self,
        rank: int,
        members: tuple[int, ...],
        name: str,
        endpoint: Endpoint,
        queue: WorkQueue,
        locate: Callable[[], str],
    ) -> None:
        super().__init__(members.index(rank), len(members))  # type: ignore[call-arg]
        self._me = rank
        self._members = members
        self._name = name
        self._endpoint = endpoint
        self._queue = queue
        self._locate = locate

    # PyTorch asks a process group for these by name; without them it is "not set".
    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:
        return "simulated"

    # Releases after 2.13 ask, of a Python group too, what its backend can do.
    supports_coalescing = supports_splitting = False

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _post(
        self,
        kind: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        result: Any,
        *,
        root: int | None = None,
        op: Any = None,
        peer: int | None = None,
        tag: int = 0,
        uneven: bool = False,
    ) -> SimulatedWork:
        operation = Operation(
            self._me,
            kind,
            self._name,
            self._members,
            list(inputs),
            list(outputs),
            peer=peer if root is None else self._members[root],
            op="" if op is None else _op_name(op, [*inputs, *outputs]),
            tag=tag,
            where=self._locate(),
            uneven=uneven,
        )
        check_tensors(operation)
        self._endpoint.post(operation)
        return SimulatedWork(operation, self._endpoint, self._queue, result)

    # Collectives: PyTorch's names, in the order of its documentation ------------------------

    def broadcast(self, tensors: Any, opts: Any) -> SimulatedWork:
        return self._post("broadcast", tensors, tensors, tensors, root=opts.rootRank)

    def allreduce(self, tensors: Any, opts: Any = None) -> SimulatedWork:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._post("all_reduce", tensors, tensors, tensors, op=op)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> SimulatedWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> SimulatedWork:
        return self._post("reduce", tensors, tensors, tensors, root=opts.rootRank, op=opts.reduceOp)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        _only_one(inputs, "all_gather")
        return self._post("all_gather", inputs, outputs[0], outputs)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> SimulatedWork:
        return self._post("all_gather", [input], _pieces(output, self.size()), [output])

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        return self._queue.last(
            [
                self._post("all_gather", [tensor], [output[i] for output in outputs], outputs)
                for i, tensor in enumerate(inputs)
            ]
        )

    def all_gather_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> SimulatedWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._queue.last([self.all_gather_single(output, part) for output, part in pairs])

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> SimulatedWork:
        targets = outputs[0] if outputs else []
        return self._post("gather", inputs, targets, outputs, root=opts.rootRank)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> SimulatedWork:
        sources = inputs[0] if inputs else []
        return self._post("scatter", sources, outputs, outputs, root=opts.rootRank)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._post("reduce_scatter", inputs[0], outputs, outputs, op=op)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> SimulatedWork:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._post("reduce_scatter", _pieces(input, self.size()), [output], [output], op=op)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> SimulatedWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._queue.last(
            [self.reduce_scatter_single(output, part, opts) for output, part in pairs]
        )

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        return self._post("all_to_all", inputs, outputs, outputs, uneven=True)

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> SimulatedWork:
        return self._post(
            "all_to_all",
            _pieces(input, self.size(), input_splits),
            _pieces(output, self.size(), output_splits),
            [output],
            uneven=True,
        )

    def barrier(self, opts: Any = None) -> SimulatedWork:
        return self._post("barrier", [], [], None)

    # Names of PyTorch's releases before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Point to point ------------------------------------------------------------------------

    def send(self, tensors: Any, peer: int, tag: int = 0) -> SimulatedWork:
        to = self._peer("send to", peer)
        return self._post("send", tensors, [], tensors, peer=to, tag=tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> SimulatedWork:
        source = self._peer("recv from", peer)
        return self._post("recv", [], tensors, tensors, peer=source, tag=tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> SimulatedWork:
        return self._post("recv", [], tensors, tensors, tag=tag)

    def _peer(self, what: str, peer: int) -> int:
        if not 0 <= peer < len(self._members):
            raise ValueError(
                f"{what} rank {peer}: this group has the ranks "
                f"{', '.join(map(str, self._members))} (0 to {len(self._members) - 1} in it)"
            )
        return self._members[peer]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"process groups of simulated ranks have no {name!r}")


def _only_one(tensors: Sequence[Any], kind: str) -> None:
    if len(tensors) != 1:
        raise NotImplementedError(f"{kind} with several tensors per rank is not simulated")


def _op_name(op: Any, tensors: Sequence[torch.Tensor]) -> str:
    name = str(getattr(op, "op", op)).rpartition(".")[2].partition(":")[0].lower().strip("<> ")
    if name not in REDUCTIONS:
        raise NotImplementedError(f"ReduceOp.{name.upper()} is not simulated")
    for tensor in tensors:
        exact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        if name == "avg" and not exact:
            raise ValueError(f"ReduceOp.AVG needs a floating-point dtype, got {tensor.dtype}")
        if name in ("band", "bor", "bxor") and exact:
            raise ValueError(f"ReduceOp.{name.upper()} needs integers, got {tensor.dtype}")
        if name in ("min", "max") and tensor.dtype.is_complex:
            raise ValueError(f"ReduceOp.{name.upper()} needs an order, and {tensor.dtype} has none")
        if tensor.is_sparse:
            raise NotImplementedError("sparse tensors are not simulated; use to_dense()")
    return name


def _pieces(
    tensor: torch.Tensor, count: int, splits: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """Return views of `tensor`, one per rank: equal ones, or `splits` rows each.

    Raises:
        ValueError: the tensor cannot be cut so.

    """
    if splits:
        if len(splits) != count or sum(splits) != tensor.size(0):
            raise ValueError(
                f"split sizes {list(splits)} do not cut {tensor.size(0)} rows among {count} ranks"
            )
        return list(torch.split(tensor, list(splits)))
    if tensor.numel() % count:
        raise ValueError(f"a tensor of {tensor.numel()} elements does not divide by {count} ranks")
    # An empty tensor would give no pieces at all.
    return [tensor.view(count, -1)[i] for i in range(count)] if tensor.numel() else [tensor] * count
