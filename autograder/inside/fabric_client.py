"""A rank's side of the examiner's fabric, and the channel on which a rank talks to the examiner."""

from __future__ import annotations

import operator
import socket
from collections import Counter
from typing import Any

from course_lib.ranks.for_graders import NEW_GROUP, Operation
from course_lib.ranks.wire import WireError, dtypes, receive, send


class FabricStopped(BaseException):
    """The examiner has closed the connection, because the case is over.

    Not an `Exception`: code that catches every `Exception` must not go on without its fabric.
    """


class FabricClient:
    """The endpoint of one rank: posts operations, waits for answers.

    Args:
        channel: the rank's connection to the examiner.

    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._clock = 0.0
        self._numbers: dict[int, int] = {}
        self._posted = 0
        self._entered: Counter[str] = Counter()

    def post(self, operation: Operation) -> None:
        """Post an operation and send its inputs at once.

        Raises:
            NotImplementedError: tensors that cannot be sent.

        """
        described = _described(operation)
        if operation.kind == NEW_GROUP:  # nobody waits for it
            operation.end = self._clock
            return self._send("new_group", {"made": operation.made, **described})
        if operation.kind not in ("send", "recv"):  # count as the fabric does, for our messages
            self._entered[operation.group] += 1
            operation.seq = self._entered[operation.group]
        self._posted += 1
        self._numbers[id(operation)] = self._posted
        self._send("post", {"number": self._posted, **described})

    def wait(self, operation: Operation) -> None:
        """Return when the operation is over and its outputs are written."""
        if operation.end is None:
            self._ask_about(operation, "wait")

    def is_done(self, operation: Operation) -> bool:
        """Return whether the operation is over, at the rank's clock."""
        if operation.end is None:
            self._ask_about(operation, "test")
        return operation.end is not None

    def now(self) -> float:
        """Return the virtual seconds that this rank has computed; the rest is not told here."""
        return self._clock

    def spend(self, seconds: float) -> None:
        """Compute for `seconds` of virtual time."""
        if seconds:
            self._send("compute", seconds)
            self._clock += seconds

    def ask(self, question: Any) -> Any:
        """Ask the examiner; its answer takes virtual time."""
        self._send("ask", question)
        return self._receive()[1]

    def _ask_about(self, operation: Operation, kind: str) -> None:
        self._send(kind, self._numbers[id(operation)])
        kind, answer = self._receive()
        if kind == "done":
            del self._numbers[id(operation)]
            operation.end = self._clock
            operation.peer = answer["peer"]
            operation.write(answer["outputs"])

    def _send(self, kind: str, value: Any) -> None:
        try:
            send(self._channel, (kind, value))
        except OSError:
            raise FabricStopped from None

    def _receive(self) -> Any:
        try:
            return receive(self._channel)
        except (EOFError, OSError, WireError):
            raise FabricStopped from None


def _described(operation: Operation) -> dict[str, Any]:
    """Return an operation as a plain value; the outputs are sizes, or None if they are the inputs.

    Raises:
        NotImplementedError: tensors that cannot be sent.

    """
    inputs, outputs = operation.inputs, operation.outputs
    if any(tensor.is_meta for tensor in (*inputs, *outputs)):
        raise NotImplementedError(
            f"{operation.kind}: a tensor on the device meta has no values to send here"
        )
    dtype = str(next((tensor.dtype for tensor in (*inputs, *outputs)), "torch.uint8"))
    name = dtype.removeprefix("torch.")
    if name not in dtypes():
        raise NotImplementedError(f"{dtype} tensors cannot be sent over the simulated network")
    in_place = len(inputs) == len(outputs) and all(map(operator.is_, inputs, outputs))
    return {
        **{name: getattr(operation, name) for name in ("kind", "group", "peer", "op", "tag")},
        "members": list(operation.members),
        "where": operation.where[-4096:].encode(errors="replace").decode(),
        "lines": [[name[-200:], line] for name, line in operation.lines],
        "inputs": list(inputs),
        "outputs": None if in_place and inputs else [tensor.numel() for tensor in outputs],
        "dtype": name,
    }
