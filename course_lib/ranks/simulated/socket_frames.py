"""Frames between a fabric and ranks in other processes: a fixed header, then bytes.

A frame is 16 bytes of header (magic, type, zero, length of the body) and a body of fixed fields
followed by raw tensor bytes. Nothing is unpickled. The reader checks every number before use;
`FrameError` says what was wrong.

    rank → fabric   GROUP, POST, WAIT, TEST, COMPUTE, ASK, FINISH
    fabric → rank   DONE, LATER, ANSWER, STOP
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch

from course_lib.ranks._torch.collective_table import KINDS, REDUCTIONS, why_not
from course_lib.ranks.simulated.operation import Operation, check_tensors
from course_lib.ranks.trace.event import group_called

HEADER = struct.Struct("<4sHHQ")
_MAGIC = b"FAB1"
MAX_MEMBERS = 1024
MAX_TEXT = 4096


class FrameError(Exception):
    """A frame breaks the protocol."""


class Type(IntEnum):
    """The type of a frame."""

    GROUP = 2
    POST = 3
    WAIT = 4
    TEST = 5
    FINISH = 6
    DONE = 7
    LATER = 8
    STOP = 9
    COMPUTE = 10
    ASK = 11
    ANSWER = 12


_GROUP = struct.Struct("<IHH")
_WAIT = struct.Struct("<Q")
_DONE = struct.Struct("<Qdi")
_COMPUTE = struct.Struct("<d")
_FINISH = struct.Struct("<B")


def frame(kind: Type, *parts: bytes) -> bytes:
    """Return a frame."""
    return b"".join([HEADER.pack(_MAGIC, kind, 0, sum(map(len, parts))), *parts])


def read_header(header: bytes, limit: int) -> tuple[Type, int]:
    """Return the type and the length of the body that follows."""
    magic, kind, zero, length = HEADER.unpack(header)
    if magic != _MAGIC or zero or kind not in list(Type):
        raise FrameError("these bytes are not a message of the protocol")
    if length > limit:
        raise OverBoundError(
            f"its next message has {length:,} bytes; the limit for a message is {limit:,}"
        )
    return Type(kind), length


def unpack(fields: struct.Struct, body: bytes | bytearray, exact: bool = True) -> tuple[int, ...]:
    if len(body) < fields.size or (exact and len(body) != fields.size):
        raise FrameError(f"a message has {len(body)} bytes, expected {fields.size}")
    return fields.unpack_from(body)


def read_seconds(value: float) -> float:
    if not (math.isfinite(value) and 0 <= value <= 1e9):
        raise FrameError(f"{value} is not a valid number of seconds for compute")
    return value


def group(number: int, name: str, members: tuple[int, ...]) -> bytes:
    """Return the frame that introduces a process group under a number of the rank's choice."""
    text = name.encode()[:MAX_TEXT]
    ranks = struct.pack(f"<{len(members)}H", *members)
    return frame(Type.GROUP, _GROUP.pack(number, len(text), len(members)), text, ranks)


def read_group(body: bytes | bytearray, world_size: int) -> tuple[int, str, tuple[int, ...]]:
    """Return number, name and members."""
    number, length, count = unpack(_GROUP, body, exact=False)
    if length > MAX_TEXT or len(body) != _GROUP.size + length + 2 * count:
        raise FrameError("the sizes of a group contradict each other")
    name = bytes(body[_GROUP.size : _GROUP.size + length]).decode("utf-8", "replace")
    members = struct.unpack_from(f"<{count}H", body, _GROUP.size + length)
    if len(set(members)) != count or any(m >= world_size for m in members):
        raise FrameError("a group contains ranks that do not exist, or a rank twice")
    return number, name, members


def wait(kind: Type, number: int) -> bytes:
    """Return the frame that waits for (WAIT) or asks about (TEST) an operation."""
    return frame(kind, _WAIT.pack(number))


def read_wait(body: bytes | bytearray) -> int:
    """Return the operation's number."""
    return unpack(_WAIT, body)[0]


def compute(seconds: float) -> bytes:
    """Return the frame that reports for how many seconds a rank computes."""
    return frame(Type.COMPUTE, _COMPUTE.pack(seconds))


def read_compute(body: bytes | bytearray) -> float:
    """Return the seconds."""
    return read_seconds(unpack(_COMPUTE, body)[0])


def finish(raised: bool) -> bytes:
    """Return the last frame of a rank."""
    return frame(Type.FINISH, _FINISH.pack(raised))


def read_finish(body: bytes | bytearray) -> bool:
    """Return whether the rank raised."""
    return bool(unpack(_FINISH, body)[0])


def done(kind: Type, number: int, clock: float, operation: Operation | None = None) -> bytes:
    """Return the answer to WAIT or TEST: the rank's clock, and the results if it is over."""
    outputs = [] if operation is None else operation.outputs
    data = [to_bytes(tensor) for tensor in outputs]
    source = -1 if operation is None or operation.peer is None else operation.peer
    return frame(kind, _DONE.pack(number, clock, source), *data)


def read_done(body: bytes | bytearray) -> tuple[int, float, int, memoryview]:
    """Return number, clock, the other rank, and the bytes of the results."""
    number, clock, source = unpack(_DONE, body, exact=False)
    return number, clock, source, memoryview(body)[_DONE.size :]


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements as raw bytes."""
    # A tensor of one element counts as contiguous, whatever its stride is.
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def from_bytes(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor over raw bytes, without a copy if they are aligned."""
    if not len(data):
        return torch.empty(0, dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8)
    return flat.clone().view(dtype) if flat.data_ptr() % dtype.itemsize else flat.view(dtype)


# How much a fabric carries ---------------------------------------------------------------------


class OverBoundError(Exception):
    """A rank exceeds a limit of a fabric; the message says which limit, and how high it is."""


@dataclass(frozen=True)
class Bounds:
    """Limits of one run. All except `frame` and `text` are shared equally by the ranks.

    Attributes:
        frame: bytes of one frame.
        held: bytes of unfinished operations, and of frames that are not completely received or
            sent.
        open: operations that a rank has posted and whose end it has not seen yet.
        operations: operations in the whole run.
        frames: frames that the ranks send.
        groups: process groups that the ranks introduce; each rank introduces its own.
        text: characters of a group's name and of a line of code; of a longer line of code, the end
            is kept.

    """

    frame: int = 1 << 28
    held: int = 1 << 34
    open: int = 160_000
    operations: int = 100_000_000
    frames: int = 200_000_000
    groups: int = 16_384
    text: int = 4096

    def shared_by(self, world_size: int) -> Bounds:
        """Return the limits of each rank when `world_size` ranks share these."""
        shares = {name: max(1, getattr(self, name) // world_size) for name in _SENTENCES}
        return Bounds(frame=self.frame, text=self.text, **shares)

    def expect(self, what: str, number: int) -> None:
        """Raise `OverBoundError` if `number` is above the limit named `what`."""
        most: int = getattr(self, what)
        if number > most:
            raise OverBoundError(
                f"{_SENTENCES[what].format(number)}; the limit for a rank is {most:,}"
            )


LOOSE = Bounds()
"""Limits for ranks that are run for their own user."""

_SENTENCES = {
    "held": "with its next message it would have {:,} bytes under way at once",
    "open": "with its next operation it would have {:,} operations that it has not waited for",
    "operations": "with its next operation it would have started {:,} operations",
    "frames": "with its next request it would have sent {:,} requests to the network",
    "groups": "with its next process group it would have {:,} process groups",
}


# The frame that posts an operation -------------------------------------------------------------

_NAMES = list(KINDS)
OPS = ["", *REDUCTIONS]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
_POST = struct.Struct("<QBBBiqIHHH")
_MAX_NUMEL = 1 << 48


class _Fields(NamedTuple):
    """The fixed fields of a post, in their order."""

    number: int
    kind: int
    op: int
    dtype: int
    peer: int
    tag: int
    group: int
    inputs: int
    outputs: int
    where: int


@dataclass
class Post:
    """A received post: an operation, and the rank's number for it."""

    number: int
    operation: Operation


def post(number: int, operation: Operation, group_number: int) -> bytes:
    """Return the frame that posts an operation."""
    tensors = [*operation.inputs, *operation.outputs]
    if any(tensor.is_meta for tensor in tensors):
        raise NotImplementedError(
            f"{operation.kind}: a tensor on the device meta has no values to send here"
        )
    dtype = tensors[0].dtype if tensors else torch.uint8
    if dtype not in DTYPES:
        raise NotImplementedError(f"{dtype} tensors cannot be sent over the simulated network")
    where = operation.where.encode()[-MAX_TEXT:]
    fields = _Fields(
        number=number,
        kind=_NAMES.index(operation.kind),
        op=OPS.index(operation.op),
        dtype=DTYPES.index(dtype),
        peer=-1 if operation.peer is None else operation.peer,
        tag=operation.tag,
        group=group_number,
        inputs=len(operation.inputs),
        outputs=len(operation.outputs),
        where=len(where),
    )
    sizes = struct.pack(f"<{len(tensors)}Q", *(tensor.numel() for tensor in tensors))
    data = [to_bytes(tensor) for tensor in operation.inputs]
    return frame(Type.POST, _POST.pack(*fields), sizes, where, *data)


def read_post(
    body: bytearray,
    rank: int,
    groups: dict[int, tuple[str, tuple[int, ...]]],
    limit: int,
    max_text: int = MAX_TEXT,
) -> Post:
    """Return the operation that `rank` posts, with tensors over the body's own bytes.

    Args:
        body: the body of the frame.
        rank: the rank that sent it.
        groups: the groups that the rank has introduced: number → name and members.
        limit: bytes of the largest allowed result.
        max_text: how many of the last characters of the line of code are kept.

    Raises:
        FrameError: the post breaks the protocol; the message says how.

    """
    fields = _Fields(*unpack(_POST, body, exact=False))
    if fields.group not in groups:
        raise FrameError("an operation uses an unknown process group")
    name, members = groups[fields.group]
    _check_sense(fields, rank, members)
    sizes, where, data = _cut(fields, body, limit, max_text)
    tensors = _read_tensors(fields, sizes, data)
    inputs, outputs = tensors[: fields.inputs], tensors[fields.inputs :]
    if KINDS[_NAMES[fields.kind]].in_place:
        if sizes[: fields.inputs] != sizes[fields.inputs :]:
            raise FrameError("the sizes of an operation contradict each other")
        outputs = inputs
    operation = Operation(
        rank,
        _NAMES[fields.kind],
        name,
        members,
        inputs,
        outputs,
        peer=None if fields.peer == -1 else fields.peer,
        op=OPS[fields.op],
        tag=fields.tag,
        where=where,
        group_name=group_called(name),
    )
    try:
        check_tensors(operation)
    except ValueError as error:
        raise FrameError(str(error)) from None
    return Post(fields.number, operation)


def _check_sense(fields: _Fields, rank: int, members: tuple[int, ...]) -> None:
    """Check that such an operation exists, and that this rank may post it."""
    if fields.kind >= len(_NAMES) or fields.op >= len(OPS) or fields.dtype >= len(DTYPES):
        raise FrameError("there is no such operation")
    if rank not in members or (fields.peer != -1 and fields.peer not in members):
        raise FrameError("an operation names a rank outside its group")
    kind, dtype = KINDS[_NAMES[fields.kind]], DTYPES[fields.dtype]
    if (
        (kind.name in ("send", "recv") and fields.peer == rank)
        or (kind.to_one and fields.peer == -1)
        or kind.reduces != bool(fields.op)
        or (kind.reduces and why_not(OPS[fields.op], dtype))
    ):
        raise FrameError("the arguments of an operation do not fit together")


def _cut(
    fields: _Fields, body: bytearray, limit: int, max_text: int
) -> tuple[tuple[int, ...], str, memoryview]:
    """Return the tensors' numbers of elements, the line of code, and the bytes of the inputs."""
    count = fields.inputs + fields.outputs
    start = _POST.size + 8 * count
    end = start + fields.where
    if max(fields.inputs, fields.outputs) > MAX_MEMBERS or fields.where > MAX_TEXT:
        raise FrameError("an operation has too many tensors, or its text is too long")
    if len(body) < end:
        raise FrameError("the sizes of an operation contradict each other")
    sizes = struct.unpack_from(f"<{count}Q", body, _POST.size)
    if any(size > _MAX_NUMEL for size in sizes):
        raise FrameError("a tensor has an impossible size")
    item = DTYPES[fields.dtype].itemsize
    if len(body) != end + sum(sizes[: fields.inputs]) * item:
        raise FrameError("the sizes of an operation contradict each other")
    if sum(sizes[fields.inputs :]) * item > limit:
        raise FrameError(f"the result of an operation has more than {limit} bytes")
    text = bytes(body[start:end]).decode("utf-8", "replace")[-max_text:]
    return sizes, "".join(c if c.isprintable() else "�" for c in text), memoryview(body)[end:]


def _read_tensors(fields: _Fields, sizes: tuple[int, ...], data: memoryview) -> list[torch.Tensor]:
    """Return the inputs, over their bytes in `data`, and outputs of zeros.

    Memory that is not initialised must never reach a rank: it may hold another student's work.
    """
    dtype = DTYPES[fields.dtype]
    tensors: list[torch.Tensor] = []
    at = 0
    for i, size in enumerate(sizes):
        if i < fields.inputs:
            tensors.append(from_bytes(data[at : at + size * dtype.itemsize], dtype))
            at += size * dtype.itemsize
        else:
            tensors.append(torch.zeros(size, dtype=dtype))
    return tensors
