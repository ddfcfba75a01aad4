"""What ranks in other processes and a fabric say to each other: frames of a fixed header and bytes.

A frame is 16 bytes of header (magic, type, zero, length of the body) and a body of fixed fields
followed by raw tensor bytes. Nothing is unpickled. Whoever reads checks every number before use;
`FrameError` says what was wrong.

    rank → fabric   HELLO, GROUP, POST, WAIT, TEST, COMPUTE, FINISH
    fabric → rank   DONE, LATER, STOP
"""

from __future__ import annotations

import math
import struct
from enum import IntEnum

import torch

from course_lib.ranks.fabric.operation import Operation
from course_lib.ranks.fabric_socket.bounds import OverBoundError

HEADER = struct.Struct("<4sHHQ")
_MAGIC = b"FAB1"
MAX_MEMBERS = 1024
MAX_TEXT = 4096


class FrameError(Exception):
    """A frame that nobody who follows the protocol would send."""


class Type(IntEnum):
    """What a frame says."""

    HELLO = 1
    GROUP = 2
    POST = 3
    WAIT = 4
    TEST = 5
    FINISH = 6
    DONE = 7
    LATER = 8
    STOP = 9
    COMPUTE = 10


_HELLO = struct.Struct("<I16s")
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
        raise FrameError("this is not a frame")
    if length > limit:
        raise OverBoundError(f"its next message has {length:,} bytes; here one may have {limit:,}")
    return Type(kind), length


def unpack(fields: struct.Struct, body: bytes | bytearray, exact: bool = True) -> tuple[int, ...]:
    if len(body) < fields.size or (exact and len(body) != fields.size):
        raise FrameError(f"a body of {len(body)} bytes where {fields.size} are due")
    return fields.unpack_from(body)


def read_seconds(value: float) -> float:
    if not (math.isfinite(value) and 0 <= value <= 1e9):
        raise FrameError(f"{value} is no time to compute")
    return value


def hello(rank: int, secret: bytes) -> bytes:
    """Return the first frame of a rank: who it is, and what only it was told."""
    return frame(Type.HELLO, _HELLO.pack(rank, secret))


def read_hello(body: bytes | bytearray) -> tuple[int, bytes]:
    """Return rank and secret."""
    rank, secret = unpack(_HELLO, body)
    return rank, bytes(secret)


def group(number: int, name: str, members: tuple[int, ...]) -> bytes:
    """Return the frame that introduces a process group under a number of the rank's choice."""
    text = name.encode()[:MAX_TEXT]
    ranks = struct.pack(f"<{len(members)}H", *members)
    return frame(Type.GROUP, _GROUP.pack(number, len(text), len(members)), text, ranks)


def read_group(body: bytes | bytearray, world_size: int) -> tuple[int, str, tuple[int, ...]]:
    """Return number, name and members."""
    number, length, count = unpack(_GROUP, body, exact=False)
    if length > MAX_TEXT or len(body) != _GROUP.size + length + 2 * count:
        raise FrameError("a group whose sizes do not add up")
    name = bytes(body[_GROUP.size : _GROUP.size + length]).decode("utf-8", "replace")
    members = struct.unpack_from(f"<{count}H", body, _GROUP.size + length)
    if len(set(members)) != count or any(m >= world_size for m in members):
        raise FrameError("a group of ranks that do not exist")
    return number, name, members


def wait(kind: Type, number: int) -> bytes:
    """Return the frame that waits for (WAIT) or asks about (TEST) an operation."""
    return frame(kind, _WAIT.pack(number))


def read_wait(body: bytes | bytearray) -> int:
    """Return the operation's number."""
    return unpack(_WAIT, body)[0]


def compute(seconds: float) -> bytes:
    """Return the frame that says for how long a rank computes."""
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
    data = [to_bytes(tensor) for tensor in outputs if not tensor.is_meta]
    source = -1 if operation is None or operation.peer is None else operation.peer
    return frame(kind, _DONE.pack(number, clock, source), *data)


def read_done(body: bytes | bytearray) -> tuple[int, float, int, memoryview]:
    """Return number, clock, the other rank, and the bytes of the results."""
    number, clock, source = unpack(_DONE, body, exact=False)
    return number, clock, source, memoryview(body)[_DONE.size :]


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements as raw bytes."""
    # Of one element the stride may be anything, and counts as contiguous all the same.
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def from_bytes(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor over raw bytes, without a copy where they are aligned."""
    if not len(data):
        return torch.empty(0, dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8)
    return flat.clone().view(dtype) if flat.data_ptr() % dtype.itemsize else flat.view(dtype)
