"""The process group of a simulated rank: ``torch.distributed`` on one side, a fabric on the other.

It turns every call into an `Operation` with flat lists of tensors and posts it. Whether the fabric
is in this process or at the other end of a socket is the endpoint's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks.fabric.operation import Endpoint, Operation, check_tensors
from course_lib.ranks.fabric.values import why_not
from course_lib.ranks.fabric.work import SimulatedWork, WorkQueue
from course_lib.ranks.metered.collective_table import KINDS, Collective, reduction_of
from course_lib.ranks.metered.python_group import PythonGroup


class SimulatedProcessGroup(PythonGroup):
    """One group of one rank.

    Args:
        rank: of the whole.
        members: the group's ranks, in order, as ranks of the whole.
        name: the same on all members.
        endpoint: the rank's side of the fabric.
        queue: the rank's operations that someone may wait for in C++.
        locate: returns the line of user code that is running.

    """

    backend = "simulated"

    def __init__(
        self,
        rank: int,
        members: tuple[int, ...],
        name: str,
        endpoint: Endpoint,
        queue: WorkQueue,
        locate: Callable[[], str],
    ) -> None:
        super().__init__(rank, members, name)
        self._me = rank
        self._endpoint = endpoint
        self._queue = queue
        self._locate = locate

    def _collective(
        self, collective: Collective, arguments: tuple[Any, ...], options: Any
    ) -> dist.Work:
        kind = KINDS[collective.kind]
        root = self._members[options.rootRank] if kind.to_one else None
        result = collective.result(arguments)
        works = []
        for puts, gets in collective.operations(arguments, self.size()):
            reduction = _reduction(options.reduceOp, [*puts, *gets]) if kind.reduces else ""
            works.append(self._post(kind.name, puts, gets, result, peer=root, op=reduction))
        return self._queue.last(works)

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
        operation = Operation(
            self._me,
            kind,
            self._name,
            self._members,
            list(inputs),
            list(outputs),
            peer=peer,
            op=op,
            tag=tag,
            where=self._locate(),
            group_name=self.label,
        )
        check_tensors(operation)
        self._endpoint.post(operation)
        return SimulatedWork(operation, self._endpoint, self._queue, result)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"process groups of simulated ranks have no {name!r}")


def _reduction(op: Any, tensors: Sequence[torch.Tensor]) -> str:
    """Return the name of a reduction that these tensors allow."""
    name = reduction_of(op)
    for tensor in tensors:
        if tensor.is_sparse:
            raise NotImplementedError("sparse tensors are not simulated; use to_dense()")
        if reason := why_not(name, tensor.dtype):
            raise ValueError(reason)
    return name
