"""Collectives: who has entered, whether they agree, and what happens when the last one is there."""

from __future__ import annotations

from collections.abc import Callable

from course_lib.ranks.costs.collective_time import collective_ends
from course_lib.ranks.costs.links import Links
from course_lib.ranks.costs.network import Network
from course_lib.ranks.fabric.operation import Mismatch, Operation
from course_lib.ranks.fabric.values import apply_collective


class Collectives:
    """The collectives of a fabric that not all ranks have entered yet.

    Args:
        network: says which algorithms they take.
        links: carry their messages.
        end: called with each operation and its end, in virtual seconds.

    """

    def __init__(
        self, network: Network, links: Links, end: Callable[[Operation, float], None]
    ) -> None:
        self._network = network
        self._links = links
        self._end = end
        self._open: dict[tuple[str, int], dict[int, Operation]] = {}
        self._stream: dict[tuple[str, int], float] = {}

    def enter(self, operation: Operation) -> None:
        """Let one rank enter; when it is the last, carry the collective out.

        Raises:
            Mismatch: the ranks do not call the same.

        """
        key = (operation.group, operation.seq)
        entered = self._open.setdefault(key, {})
        entered[operation.rank] = operation
        first = next(iter(entered.values()))
        if operation.signature() != first.signature():
            raise Mismatch(list(entered.values()))
        if len(entered) < len(operation.members):
            return
        del self._open[key]
        parts = [entered[member] for member in operation.members]
        if operation.kind == "all_to_all":
            _check_splits(parts)
        root = 0 if operation.peer is None else operation.members.index(operation.peer)
        ready = [max(part.posted, self._stream.get((part.group, part.rank), 0.0)) for part in parts]
        sizes = [[t.numel() * t.element_size() for t in part.inputs] for part in parts]
        ends = collective_ends(
            operation.kind,
            self._network,
            self._links,
            operation.members,
            ready,
            sizes,
            root,
            operation.nbytes // operation.numel if operation.numel else 1,
        )
        apply_collective(
            operation.kind,
            operation.op,
            root,
            [part.inputs for part in parts],
            [part.outputs for part in parts],
        )
        for part, end in zip(parts, ends, strict=True):
            # A group's collectives follow one another on each rank, as on a stream of NCCL.
            self._stream[part.group, part.rank] = end
            self._end(part, end)

    def unserved(self) -> list[Operation]:
        """Return the operations whose collective is not complete."""
        return [operation for entered in self._open.values() for operation in entered.values()]


def _check_splits(parts: list[Operation]) -> None:
    for i, sender in enumerate(parts):
        for j, receiver in enumerate(parts):
            sent, got = sender.inputs[j].numel(), receiver.outputs[i].numel()
            if sent != got:
                raise Mismatch(
                    parts,
                    f"In all_to_all, rank {sender.rank} sends {sent} elements to rank "
                    f"{receiver.rank}, which expects {got}.",
                )
