"""The frame that posts an operation: the one that carries most and must be checked most."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from course_lib.ranks.fabric.operation import Operation, check_tensors
from course_lib.ranks.fabric_socket.frames import (
    MAX_MEMBERS,
    MAX_TEXT,
    FrameError,
    Type,
    frame,
    from_bytes,
    read_seconds,
    to_bytes,
    unpack,
)

KINDS = [
    *["send", "recv", "barrier", "broadcast", "reduce", "all_reduce", "gather", "scatter"],
    *["all_gather", "reduce_scatter", "all_to_all"],
]
OPS = ["", "sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
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
_META, _UNEVEN = 1, 2

_POST = struct.Struct("<QBBBBiqIdHHH")
_MAX_NUMEL = 1 << 48


def post(number: int, operation: Operation, group_number: int, advance: float) -> bytes:
    """Return the frame that posts an operation, `advance` seconds of computation after the last."""
    tensors = [*operation.inputs, *operation.outputs]
    meta = any(tensor.is_meta for tensor in tensors)
    dtype = tensors[0].dtype if tensors else torch.uint8
    if dtype not in DTYPES:
        raise NotImplementedError(f"{dtype} does not travel to the fabric")
    where = operation.where.encode()[-MAX_TEXT:]
    fields = _POST.pack(
        number,
        KINDS.index(operation.kind),
        OPS.index(operation.op),
        DTYPES.index(dtype),
        _META * meta + _UNEVEN * operation.uneven,
        -1 if operation.peer is None else operation.peer,
        operation.tag,
        group_number,
        advance,
        len(operation.inputs),
        len(operation.outputs),
        len(where),
    )
    sizes = struct.pack(f"<{len(tensors)}Q", *(tensor.numel() for tensor in tensors))
    data = [] if meta else [to_bytes(tensor) for tensor in operation.inputs]
    return frame(Type.POST, fields, sizes, where, *data)


@dataclass
class Post:
    """A post as it was read."""

    number: int
    advance: float
    operation: Operation


def read_post(
    body: bytearray, rank: int, groups: dict[int, tuple[str, tuple[int, ...]]], limit: int
) -> Post:
    """Return the operation that `rank` posts, with tensors over the body's own bytes."""
    fields = unpack(_POST, body, exact=False)
    number, kind, op, dtype, flags, peer, tag, group_number, advance, n_in, n_out, text = fields
    if kind >= len(KINDS) or op >= len(OPS) or dtype >= len(DTYPES) or flags > _META + _UNEVEN:
        raise FrameError("an operation that does not exist")
    if group_number not in groups:
        raise FrameError("a group that was never introduced")
    name, members = groups[group_number]
    start = _POST.size + 8 * (n_in + n_out)
    if n_in > MAX_MEMBERS or n_out > MAX_MEMBERS or text > MAX_TEXT or len(body) < start + text:
        raise FrameError("an operation whose sizes do not add up")
    sizes = struct.unpack_from(f"<{n_in + n_out}Q", body, _POST.size)
    item, meta = DTYPES[dtype].itemsize, bool(flags & _META)
    if any(size > _MAX_NUMEL for size in sizes):
        raise FrameError("a tensor larger than anything")
    expected = 0 if meta else sum(sizes[:n_in]) * item
    if len(body) != start + text + expected:
        raise FrameError("an operation whose sizes do not add up")
    if not meta and sum(sizes[n_in:]) * item > limit:
        raise FrameError(f"a result of more than {limit} bytes")
    if rank not in members or (peer != -1 and (peer not in members)):
        raise FrameError("an operation with a rank outside its group")
    rooted = KINDS[kind] in ("send", "broadcast", "reduce", "gather", "scatter")
    reduces = KINDS[kind] in ("all_reduce", "reduce", "reduce_scatter")
    alone = KINDS[kind] in ("send", "recv") and peer == rank
    exact = DTYPES[dtype].is_floating_point or DTYPES[dtype].is_complex
    if (
        alone
        or (rooted and peer == -1)
        or reduces != bool(op)
        or (exact and OPS[op] in ("band", "bor", "bxor"))
        or (not exact and OPS[op] == "avg")
        or (DTYPES[dtype].is_complex and OPS[op] in ("min", "max"))
        or (bool(flags & _UNEVEN) != (KINDS[kind] == "all_to_all"))
    ):
        raise FrameError("an operation that makes no sense")
    where = bytes(body[start : start + text]).decode("utf-8", "replace")
    tensors: list[torch.Tensor] = []
    at = start + text
    for i, size in enumerate(sizes):
        if meta:
            tensors.append(torch.empty(size, dtype=DTYPES[dtype], device="meta"))
        elif i < n_in:
            tensors.append(from_bytes(memoryview(body)[at : at + size * item], DTYPES[dtype]))
            at += size * item
        else:
            tensors.append(torch.empty(size, dtype=DTYPES[dtype]))
    inputs, outputs = tensors[:n_in], tensors[n_in:]
    if KINDS[kind] in ("all_reduce", "broadcast", "reduce"):
        if sizes[:n_in] != sizes[n_in:]:
            raise FrameError("an operation whose sizes do not add up")
        outputs = inputs
    operation = Operation(
        rank,
        KINDS[kind],
        name,
        members,
        inputs,
        outputs,
        peer=None if peer == -1 else peer,
        op=OPS[op],
        tag=tag,
        where="".join(c if c.isprintable() else "�" for c in where),
        uneven=bool(flags & _UNEVEN),
    )
    try:
        check_tensors(operation)
    except ValueError as error:
        raise FrameError(str(error)) from None
    return Post(number, read_seconds(advance), operation)
