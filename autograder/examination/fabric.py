"""The examiner's fabric, which carries out the requests of the ranks in a sandbox.

A rank is a process that is not trusted. It asks in plain values, which are checked here before
anything is done:

    rank → examiner   post, new_group, wait, test, compute, ask
    examiner → rank   done, later, answer

A rank that breaks the protocol or exceeds a limit counts as ended. Ranks that wait for it wait
until the case is ended, and all others go on. A rank's computation counts as virtual time only if
its program declares it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch

from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import RankError, RanksError, RankState
from course_lib.ranks.for_graders import (
    NEW_GROUP,
    Fabric,
    Operation,
    Phase,
    check_operation,
    explain_failure,
    explain_leftovers,
    fabric_states,
)
from course_lib.ranks.trace.event import group_called
from course_lib.ranks.wire import dtypes

Answers = Callable[[int, Any], tuple[Any, float]]
"""A rank and its question → the answer and its virtual seconds. ValueError: there is no answer."""

_ENDED = (Phase.FINISHED, Phase.RAISED)
_MAX_TENSORS = 1024
_MAX_LINES = 20
_MAX_TEXT = 256
"""Characters of a name and of a line of code; of a longer one, the end is kept."""
_OVERHEAD = 512
"""Bytes that an operation takes besides its tensors."""


class ProtocolError(Exception):
    """A rank asks for something that cannot be, or for too much; the message says what."""


@dataclass(frozen=True)
class Bounds:
    """The limits of a case, which its ranks share equally.

    They are far above what the course's own solutions need; the largest need of a solution is in
    brackets.

    Attributes:
        message: bytes of one message (1 MB).
        held: bytes of unfinished operations, and of messages that are not completely received or
            sent (8.3 MB).
        open: operations that a rank has posted and whose end it has not seen yet (28).
        operations: operations in the whole case (601 of one rank).
        requests: messages that the ranks send (1,212 of one rank).

    """

    message: int = 128 * 2**20
    held: int = 256 * 2**20
    open: int = 4096
    operations: int = 20_000
    requests: int = 100_000

    def shared_by(self, world_size: int) -> Bounds:
        """Return the limits of each rank when `world_size` ranks share these."""
        return Bounds(*(max(1, limit // world_size) for limit in astuple(self)))

    def expect(self, limit_name: str, number: int, excess: str) -> None:
        """Raise `ProtocolError` if `number` is above a limit; `excess` says in words what it is."""
        limit: int = getattr(self, limit_name)
        if number > limit:
            raise ProtocolError(f"{excess.format(number)}; the limit for a rank is {limit:,}")


@dataclass
class _Asking:
    """The requests of one rank so far."""

    open: dict[int, tuple[Operation, int]] = field(default_factory=dict)
    """Its number of an operation → the operation, and the bytes that it holds here."""
    waits_for: tuple[str, int] | None = None
    """``wait`` or ``test``, and the number of the operation."""
    operations: int = 0
    requests: int = 0

    @property
    def held(self) -> int:
        return sum(size for _, size in self.open.values())


class ExaminersFabric:
    """One run of ranks that are not trusted, on a fabric of this process.

    Args:
        world_size: number of ranks.
        network: what messages cost.
        send: ``send(rank, kind, value)`` sends a message to a rank.
        computes: for each rank, seconds → how often it may report a computation of that length.
            Other reports are not counted.
        answers: answers the ranks' questions; ``None``: ranks must not ask.

    Attributes:
        fabric: the fabric, with its clocks and events.
        bounds: how much each rank may ask for.
        failures: rank → why it ended badly.

    """

    def __init__(
        self,
        world_size: int,
        network: Network,
        send: Callable[[int, str, Any], None],
        computes: Sequence[Mapping[float, int]] = (),
        answers: Answers | None = None,
    ) -> None:
        self.fabric = Fabric(world_size, network)
        self.bounds = Bounds().shared_by(world_size)
        self.failures: dict[int, str] = {}
        self._send = send
        self._computes = [Counter(rank_computes) for rank_computes in computes or [{}] * world_size]
        self._answers = answers
        self._asking = [_Asking() for _ in range(world_size)]

    # Requests of a rank -------------------------------------------------------------------------

    def handle(self, rank: int, kind: str, value: Any) -> None:
        """Do what a message of a rank asks for.

        Raises:
            ProtocolError: the rank may not ask for this now.

        """
        asking = self._asking[rank]
        asking.requests += 1
        excess = "with its next request it would have sent {:,} requests to the network"
        self.bounds.expect("requests", asking.requests, excess)
        if asking.waits_for is not None or self.fabric.phase[rank] is not Phase.RUNNING:
            raise ProtocolError("it sent a message while it waited, or after its end")
        match kind, value:
            case ("post", {"number": int(number), **described}):
                self._post(rank, asking, number, described)
            case ("new_group", {"made": str(made), **described}):
                self._new_group(rank, asking, made, described)
            case ("wait" | "test", int(number)):
                self._wait(rank, asking, kind, number)
            case ("compute", float() | int()):
                self._compute(rank, float(value))
            case ("ask", _) if self._answers is not None:
                self._answer_question(rank, asking, self._answers, value)
            case _:
                raise ProtocolError("these bytes are not a message of the protocol")

    def held(self, rank: int) -> int:
        """Return the bytes of a rank's operations that are not over."""
        return self._asking[rank].held

    def _count(self, asking: _Asking) -> None:
        asking.operations += 1
        excess = "with its next operation it would have started {:,} operations"
        self.bounds.expect("operations", asking.operations, excess)

    def _post(self, rank: int, asking: _Asking, number: int, described: dict[Any, Any]) -> None:
        self._count(asking)
        excess = "with its next operation it would have {:,} operations that it has not waited for"
        self.bounds.expect("open", 1 + len(asking.open), excess)
        if number in asking.open:
            raise ProtocolError("it gave the number of an unfinished operation to a new one")
        operation = self._operation(rank, described)
        try:
            check_operation(operation)
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        tensors = {id(t): t.nbytes for t in (*operation.inputs, *operation.outputs)}
        asking.open[number] = operation, _OVERHEAD + sum(tensors.values())
        self.fabric.post(operation)

    def _new_group(self, rank: int, asking: _Asking, name: str, described: dict[Any, Any]) -> None:
        self._count(asking)
        operation = self._operation(rank, {**described, "kind": NEW_GROUP})
        if rank not in operation.members or operation.inputs or operation.outputs:
            raise ProtocolError("it described a process group that cannot exist")
        operation.made = self._text(name)
        self.fabric.post(operation)

    def _operation(self, rank: int, described: dict[Any, Any]) -> Operation:
        """Return the operation that a rank describes; its results are zeros until it happens.

        Memory that is not initialised must never reach a rank: it may hold another student's work.
        """
        match described:
            case {
                "kind": str(kind),
                "group": str(group),
                "members": [*members],
                "peer": (int() | None) as peer,
                "op": str(op),
                "tag": int(tag),
                "where": str(where),
                "lines": [*lines],
                "inputs": [*inputs],
                "outputs": (list() | None) as sizes,
                "dtype": str(dtype),
            } if dtype in dtypes() and max(len(inputs), len(sizes or ())) <= _MAX_TENSORS:
                pass
            case _:
                raise ProtocolError("it described an operation that cannot be read")
        if len(lines) > _MAX_LINES or not all(map(_is_line, lines)):
            raise ProtocolError("it described lines that cannot be read")
        world = range(self.fabric.world_size)
        if not _are_sizes(members) or not {*members} <= {*world} or len({*members}) < len(members):
            raise ProtocolError("a group contains ranks that do not exist, or a rank twice")
        if not all(isinstance(tensor, torch.Tensor) for tensor in inputs):
            raise ProtocolError("an operation has inputs that are no tensors")
        outputs = inputs = [tensor.reshape(-1) for tensor in inputs]
        if sizes is not None:
            item, limit = dtypes()[dtype].itemsize, self.bounds.message
            if not _are_sizes(sizes) or sum(sizes) * item > limit:
                raise ProtocolError(f"the result of an operation has more than {limit:,} bytes")
            outputs = [torch.zeros(size, dtype=dtypes()[dtype]) for size in sizes]
        name = self._text(group)
        return Operation(
            rank,
            kind,
            name,
            tuple(members),
            inputs,
            outputs,
            peer=peer,
            op=self._text(op),
            tag=tag,
            where=self._text(where),
            lines=tuple((self._text(function), line) for function, line in lines),
            group_name=group_called(name),
        )

    def _text(self, text: str) -> str:
        return "".join(c if c.isprintable() else "�" for c in text[-_MAX_TEXT:])

    def _wait(self, rank: int, asking: _Asking, kind: str, number: int) -> None:
        if number not in asking.open:
            raise ProtocolError("it waited for an operation that it never started, or that is over")
        asking.waits_for = kind, number
        if kind == "wait" and not self.fabric.wait(asking.open[number][0]):
            self._answer(rank)

    def _compute(self, rank: int, seconds: float) -> None:
        # A free choice of seconds could pass a message to everyone who sees this rank's clock.
        left = self._computes[rank]
        length = next((span for span in left if math.isclose(span, seconds, rel_tol=1e-8)), None)
        if length is not None and left[length]:
            left[length] -= 1
            self.fabric.advance(rank, length)

    def _answer_question(self, rank: int, asking: _Asking, answers: Answers, question: Any) -> None:
        self._count(asking)
        try:
            answer, seconds = answers(rank, question)
        except ValueError as error:
            raise ProtocolError(f"its question has no answer: {error}") from None
        self.fabric.advance(rank, seconds)
        self._send(rank, "answer", answer)

    def _answer(self, rank: int) -> None:
        """Answer a rank: to ``wait``, that the operation is over; to ``test``, whether it is."""
        asking = self._asking[rank]
        assert asking.waits_for is not None
        kind, number = asking.waits_for
        operation, _ = asking.open[number]
        asking.waits_for = None
        # No clock is told: it would reveal when other ranks have sent.
        if kind == "test" and not self.fabric.is_done(operation):
            return self._send(rank, "later", number)
        del asking.open[number]
        outputs = [tensor.detach() for tensor in operation.outputs]
        self._send(rank, "done", {"number": number, "peer": operation.peer, "outputs": outputs})

    # What happens -------------------------------------------------------------------------------

    def settle(self) -> None:
        """Carry out what is possible, and answer the ranks that can go on.

        Raises:
            RanksError: no rank can go on, or operations do not fit together.

        """
        while True:
            running = [
                (self.fabric.clock[rank], rank)
                for rank, phase in enumerate(self.fabric.phase)
                if phase is Phase.RUNNING
            ]
            first = min(running, default=(math.inf, -1))
            rank = self.fabric.next_rank(first[0])
            if rank is None:
                # The answer to ``test`` must include everything before the rank's clock. So only
                # the rank with the earliest clock may be answered.
                if not running or self._asking[first[1]].waits_for is None:
                    break
                rank = first[1]
            self._answer(rank)
        stuck = not running and any(phase is Phase.BLOCKED for phase in self.fabric.phase)
        if self.fabric.failure is not None or stuck:
            error = explain_failure(self.fabric)
            raise self._failed(error.states) or error

    def end(self, rank: int, reason: str = "") -> None:
        """Mark a rank as ended; `reason` says why it failed, and is empty if it did not."""
        if self.fabric.phase[rank] not in _ENDED:
            self.fabric.finish(rank, raised=bool(reason))
            if reason:
                self.failures[rank] = reason

    def states(self) -> list[RankState]:
        """Return what every rank does."""
        return fabric_states(self.fabric)

    def outcome(self) -> RanksError | None:
        """Return the error of a run that is over: a failed rank, or communication left behind."""
        return self._failed(self.states()) or explain_leftovers(self.fabric)

    def _failed(self, states: Sequence[RankState]) -> RankError | None:
        if not self.failures:
            return None
        first = next(iter(self.failures))
        rows = [
            RankState(row.rank, self.failures.get(row.rank, row.doing), row.where) for row in states
        ]
        return RankError(f"Rank {first} ended: {self.failures[first]}.", rows, rank=first)


def _is_line(value: Any) -> bool:
    match value:
        case [str(), int() as line]:
            return type(line) is int and 0 < line <= 1 << 20
    return False


def _are_sizes(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value <= 1 << 48 for value in values)
