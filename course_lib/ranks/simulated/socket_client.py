"""A rank's side of a fabric that is in another process."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from course_lib.ranks._torch.this_thread import unseen
from course_lib.ranks._torch.thread_worlds import join_world, leave_world, thread_worlds
from course_lib.ranks.costs.computation import enter_rank
from course_lib.ranks.explain.lines import locator
from course_lib.ranks.simulated import socket_frames
from course_lib.ranks.simulated.operation import NEW_GROUP, Operation
from course_lib.ranks.simulated.simulated_group import SimulatedRank
from course_lib.ranks.simulated.socket_frames import FrameError, Type, post
from course_lib.ranks.sockets import receive_exactly


class FabricStopped(BaseException):
    """The fabric has ended the run: another rank failed, or no rank could go on.

    Not an `Exception`: code that catches every `Exception` must not go on without its fabric.
    """


_CLOSED = "the simulated network closed the connection"


class FabricClient:
    """The endpoint of one rank: posts operations, waits for answers.

    Args:
        server: the connection that the server knows as this rank's.
        rank: which rank this is.

    Attributes:
        clock: the rank's virtual time, in seconds, as far as the server reveals it.
        context: everything that belongs to the rank; ``None`` before it has joined the world. Its
            `handles` know what the rank misused.

    """

    def __init__(self, server: socket.socket, rank: int) -> None:
        self.rank = rank
        self.clock = 0.0
        self.context: SimulatedRank | None = None
        self._channel = server
        self._numbers: dict[int, int] = {}
        self._groups: dict[str, int] = {}
        self._posted = 0
        self._entered: Counter[str] = Counter()

    def post(self, operation: Operation) -> None:
        """Post an operation and send its inputs at once.

        Raises:
            ValueError: a message to or from the rank itself.

        """
        if operation.kind in ("send", "recv") and operation.peer == self.rank:
            raise ValueError(
                f"{operation.kind}: rank {self.rank} cannot send to itself or receive from itself"
            )
        if operation.kind == NEW_GROUP:  # the group's first operation sends its members
            operation.end = self.clock
            return
        number = self._groups.get(operation.group)
        if number is None:
            number = self._groups[operation.group] = len(self._groups)
            self._send(socket_frames.group(number, operation.group, operation.members))
        if operation.kind not in ("send", "recv"):  # count as the fabric does, for our messages
            self._entered[operation.group] += 1
            operation.seq = self._entered[operation.group]
        self._posted += 1
        self._numbers[id(operation)] = self._posted
        self._send(post(self._posted, operation, number))

    def wait(self, operation: Operation) -> None:
        """Return when the operation is over and its outputs are written."""
        if operation.end is None:
            self._ask(Type.WAIT, operation)

    def is_done(self, operation: Operation) -> bool:
        """Return whether the operation is over, at the rank's clock."""
        if operation.end is None:
            self._ask(Type.TEST, operation)
        return operation.end is not None

    def now(self) -> float:
        """Return the rank's clock, in virtual seconds."""
        return self.clock

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.spend(seconds)

    def spend(self, seconds: float) -> None:
        """Compute for `seconds` of virtual time."""
        if seconds:
            self._send(socket_frames.compute(seconds))
            self.clock += seconds

    def ask(self, question: bytes) -> bytes:
        """Ask the examiner; its answer takes virtual time. See `FabricServer`."""
        self._send(socket_frames.frame(Type.ASK, question))
        kind, body = self._receive()
        if kind is Type.STOP:
            raise FabricStopped(bytes(body).decode("utf-8", "replace"))
        return bytes(body)

    def finish(self, raised: bool) -> None:
        """Tell the server that the rank has ended, and close the connection."""
        try:
            self._channel.sendall(socket_frames.finish(raised))
        except OSError:
            pass  # the server has ended the run already
        finally:
            self._channel.close()

    def _ask(self, kind: Type, operation: Operation) -> None:
        number = self._numbers[id(operation)]
        self._send(socket_frames.wait(kind, number))
        answer, body = self._receive()
        if answer is Type.STOP:
            raise FabricStopped(bytes(body).decode("utf-8", "replace"))
        got, self.clock, source, data = socket_frames.read_done(body)
        if got != number:
            raise FrameError(
                "the simulated network answered a question that this rank did not ask: please "
                "report this error"
            )
        if answer is Type.DONE:
            del self._numbers[id(operation)]
            operation.end = self.clock
            operation.peer = None if source == -1 else source
            self._write(operation, data)

    def _write(self, operation: Operation, data: memoryview) -> None:
        at = 0
        for target in operation.outputs:
            size = target.numel() * target.element_size()
            value = socket_frames.from_bytes(data[at : at + size], target.dtype)
            with torch.no_grad(), unseen():  # the network writes here, not the rank
                target.detach().copy_(value.reshape(target.shape))
            at += size

    def _send(self, data: bytes) -> None:
        try:
            self._channel.sendall(data)
        except OSError:
            # Perhaps the server sent a reason before it closed the connection.
            kind, body = self._receive()
            text = bytes(body).decode("utf-8", "replace") if kind is Type.STOP else _CLOSED
            raise FabricStopped(text) from None

    def _receive(self) -> tuple[Type, bytearray]:
        kind, length = socket_frames.read_header(
            bytes(self._exactly(socket_frames.HEADER.size)), 1 << 40
        )
        return kind, self._exactly(length)

    def _exactly(self, size: int) -> bytearray:
        try:
            return receive_exactly(self._channel, size)
        except (EOFError, OSError):
            raise FabricStopped(_CLOSED) from None


@contextmanager
def fabric_rank(
    server: socket.socket,
    rank: int,
    world_size: int,
    labels: Mapping[str, str] | None = None,
) -> Iterator[FabricClient]:
    """Act as rank `rank` of a fabric: inside the block, ``torch.distributed`` works.

    Args:
        server: the connection that the server knows as this rank's.
        rank: which rank this is.
        world_size: K.
        labels: file name → its name in messages for people; the mapping may grow later.

    """
    client = FabricClient(server, rank)
    locate = locator({} if labels is None else labels)
    context = client.context = SimulatedRank(rank, world_size, client, locate)

    def spend(seconds: float, flops: float) -> None:
        if flops:
            raise ValueError(
                "compute(flops=…) does not work here, because the speed of the device is not "
                "known: use compute(seconds=…)"
            )
        client.spend(seconds)

    raised = True
    with thread_worlds():
        try:
            join_world(context)
            enter_rank(spend, lambda: client.clock, client.ask)
            yield client
            raised = False
        finally:
            leave_world()
            client.finish(raised)
