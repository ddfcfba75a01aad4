"""The frame that posts an operation: the one that carries most and must be checked most."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch

from course_lib.ranks._torch.collective_table import KINDS
from course_lib.ranks.fabric.operation import Operation, check_tensors
from course_lib.ranks.fabric.values import REDUCTIONS, why_not
from course_lib.ranks.fabric_socket.frames import (
    MAX_MEMBERS,
    MAX_TEXT,
    FrameError,
    Type,
    frame,
    from_bytes,
    to_bytes,
    unpack,
)
from course_lib.ranks.trace.event import group_called

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
_META = 1
"""Flag: the tensors have no values."""

_POST = struct.Struct("<QBBBBiqIHHH")
_MAX_NUMEL = 1 << 48


class _Fields(NamedTuple):
    """The fixed fields of a post, in their order."""

    number: int
    kind: int
    op: int
    dtype: int
    flags: int
    peer: int
    tag: int
    group: int
    inputs: int
    outputs: int
    where: int


@dataclass
class Post:
    """A post as it was read."""

    number: int
    operation: Operation


def post(number: int, operation: Operation, group_number: int) -> bytes:
    """Return the frame that posts an operation."""
    tensors = [*operation.inputs, *operation.outputs]
    meta = any(tensor.is_meta for tensor in tensors)
    dtype = tensors[0].dtype if tensors else torch.uint8
    if dtype not in DTYPES:
        raise NotImplementedError(f"{dtype} does not travel to the fabric")
    where = operation.where.encode()[-MAX_TEXT:]
    fields = _Fields(
        number=number,
        kind=_NAMES.index(operation.kind),
        op=OPS.index(operation.op),
        dtype=DTYPES.index(dtype),
        flags=_META * meta,
        peer=-1 if operation.peer is None else operation.peer,
        tag=operation.tag,
        group=group_number,
        inputs=len(operation.inputs),
        outputs=len(operation.outputs),
        where=len(where),
    )
    sizes = struct.pack(f"<{len(tensors)}Q", *(tensor.numel() for tensor in tensors))
    data = [] if meta else [to_bytes(tensor) for tensor in operation.inputs]
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
        body: of the frame.
        rank: whose it is.
        groups: what the rank has introduced: number → name and members.
        limit: bytes of the largest result.
        max_text: characters that are kept of the line of code: the last ones.

    Raises:
        FrameError: nobody who follows the protocol would post this; says why.

    """
    fields = _Fields(*unpack(_POST, body, exact=False))
    if fields.group not in groups:
        raise FrameError("a group that was never introduced")
    name, members = groups[fields.group]
    _check_sense(fields, rank, members)
    sizes, where, data = _cut(fields, body, limit, max_text)
    tensors = _read_tensors(fields, sizes, data)
    inputs, outputs = tensors[: fields.inputs], tensors[fields.inputs :]
    if KINDS[_NAMES[fields.kind]].in_place:
        if sizes[: fields.inputs] != sizes[fields.inputs :]:
            raise FrameError("an operation whose sizes do not add up")
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
    """Check that there is such an operation, and that this rank may ask for it."""
    if (
        fields.kind >= len(_NAMES)
        or fields.op >= len(OPS)
        or fields.dtype >= len(DTYPES)
        or fields.flags > _META
    ):
        raise FrameError("an operation that does not exist")
    if rank not in members or (fields.peer != -1 and fields.peer not in members):
        raise FrameError("an operation with a rank outside its group")
    kind, dtype = KINDS[_NAMES[fields.kind]], DTYPES[fields.dtype]
    if (
        (kind.name in ("send", "recv") and fields.peer == rank)
        or (kind.to_one and fields.peer == -1)
        or kind.reduces != bool(fields.op)
        or (kind.reduces and why_not(OPS[fields.op], dtype))
    ):
        raise FrameError("an operation that makes no sense")


def _cut(
    fields: _Fields, body: bytearray, limit: int, max_text: int
) -> tuple[tuple[int, ...], str, memoryview]:
    """Return the tensors' numbers of elements, the line of code, and the bytes of the inputs."""
    count = fields.inputs + fields.outputs
    start = _POST.size + 8 * count
    end = start + fields.where
    if max(fields.inputs, fields.outputs) > MAX_MEMBERS or fields.where > MAX_TEXT:
        raise FrameError("an operation whose sizes do not add up")
    if len(body) < end:
        raise FrameError("an operation whose sizes do not add up")
    sizes = struct.unpack_from(f"<{count}Q", body, _POST.size)
    if any(size > _MAX_NUMEL for size in sizes):
        raise FrameError("a tensor larger than anything")
    item = 0 if fields.flags & _META else DTYPES[fields.dtype].itemsize
    if len(body) != end + sum(sizes[: fields.inputs]) * item:
        raise FrameError("an operation whose sizes do not add up")
    if sum(sizes[fields.inputs :]) * item > limit:
        raise FrameError(f"a result of more than {limit} bytes")
    text = bytes(body[start:end]).decode("utf-8", "replace")[-max_text:]
    return sizes, "".join(c if c.isprintable() else "�" for c in text), memoryview(body)[end:]


def _read_tensors(fields: _Fields, sizes: tuple[int, ...], data: memoryview) -> list[torch.Tensor]:
    """Return the inputs, over their bytes in `data`, and empty outputs."""
    dtype = DTYPES[fields.dtype]
    tensors: list[torch.Tensor] = []
    at = 0
    for i, size in enumerate(sizes):
        if fields.flags & _META:
            tensors.append(torch.empty(size, dtype=dtype, device="meta"))
        elif i < fields.inputs:
            tensors.append(from_bytes(data[at : at + size * dtype.itemsize], dtype))
            at += size * dtype.itemsize
        else:
            tensors.append(torch.empty(size, dtype=dtype))
    return tensors
