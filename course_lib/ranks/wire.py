"""Plain values as bytes on a socket: the format between processes that do not trust each other.

Reading these bytes never runs code, as reading a pickle would. A message is a value: a JSON
skeleton, followed by the bytes of the tensors and of byte strings. In the skeleton, a tensor is
written as its dtype and shape; the bytes have the same order. There are no offsets, so nothing can
point outside the message or overlap::

    magic | skeleton length, 4 bytes | length of the rest, 8 bytes | skeleton, JSON | the rest

``encode`` may run in the process of student code and explains what it cannot send. ``decode`` and
`Reader` may run in the process that decides a grade and trust nothing. For any bytes, they return
plain values or raise ``WireError``. They check all lengths before they hold anything, and build
nothing larger than a small multiple of what they were given.

Who uses it: the fork server, and the examiner with the processes of a sandbox. Between a notebook
and its own ranks, which trust each other, `processes.object_pipe` carries any object.

PyTorch is imported only with the first tensor: the fork server must start before it.
"""

from __future__ import annotations

import functools
import json
import math
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

Plain: TypeAlias = (
    "bool | int | float | str | bytes | torch.Tensor"
    " | list[Plain] | tuple[Plain, ...] | dict[str, Plain] | None"
)

MAX_BYTES = 256 * 2**20  # of one message, if the reader gives no other limit
MAX_SKELETON = 2**20  # bytes of JSON: an object costs about 30 times its JSON in memory
MAX_DEPTH = 64
MAX_KEY = 200  # characters of a key of a dict
MAX_NAME = 400  # characters of the name of a place in an error: a value has many places
MAX_INT_BITS = 1024  # the range of a float; prevents slow parsing of a million digits
MAX_DIMS = 64
MAX_EXTENT = 2**62  # product of the non-zero sizes: strides must fit 64 bits, even if empty

_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"DDPv"
PIECE = 1 << 18
"""How many bytes are read at once."""


@functools.cache
def dtypes() -> dict[str, torch.dtype]:
    """Return name → dtype, of all tensors that can be sent."""
    import torch

    kinds = (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex64, torch.complex128),
    )
    return {str(dtype).removeprefix("torch."): dtype for dtype in kinds}


class NotPlainError(TypeError):
    """A value cannot be sent; the message names its position and what to return instead."""


class WireError(ValueError):
    """Received bytes are not what ``encode`` would have sent."""


def encode(value: object, name: str = "result") -> bytes:
    """Return ``value`` as bytes.

    Tensors may have any shape, strides, device and subclass, and may require grad: their data is
    copied. Subclasses of list, tuple and dict are sent as list, tuple and dict.

    Raises:
        NotPlainError: ``value`` holds something else. The message uses ``name`` for the value.
    """
    blobs: list[bytes] = []
    skeleton = json.dumps(
        _to_skeleton(value, name, 0, blobs), separators=(",", ":"), ensure_ascii=False
    ).encode()
    if len(skeleton) > MAX_SKELETON:
        raise NotPlainError(f"{name} holds too many separate values; return them as one tensor")
    size = sum(map(len, blobs))
    return b"".join([_HEADER.pack(_MAGIC, len(skeleton), size), skeleton, *blobs])


def _to_skeleton(value: object, path: str, depth: int, blobs: list[bytes]) -> Any:
    if depth > MAX_DEPTH:
        raise NotPlainError(
            f"{path[:200]} is nested deeper than {MAX_DEPTH} levels; return a flatter list"
        )
    # Compare exact types: numpy.float64 is a subclass of float, and a subclass may behave falsely.
    if value is None or type(value) in (bool, float):
        return value
    if type(value) is int:
        if value.bit_length() > MAX_INT_BITS:
            raise NotPlainError(
                f"{path} is an integer of more than {MAX_INT_BITS} bits; return a smaller number"
            )
        return value
    if type(value) is str:
        if not _is_unicode(value):
            raise NotPlainError(
                f"{path} is text with half of a surrogate pair in it; return valid Unicode text"
            )
        return value
    if type(value) is bytes:
        blobs.append(value)
        return {"bytes": len(value)}
    if isinstance(value, list | tuple):
        items = [_to_skeleton(v, f"{path}[{i}]", depth + 1, blobs) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str or not _is_unicode(key):
                raise NotPlainError(
                    f"{path} has a key of type {_type(key)}; the keys of a dict must be text"
                )
            if len(key) > MAX_KEY:
                raise NotPlainError(
                    f"{path[:MAX_NAME]} has a key of {len(key)} characters; at most {MAX_KEY} can "
                    "be sent"
                )
        return {
            "dict": [
                [k, _to_skeleton(v, f"{path[-MAX_NAME:]}[{k!r}]", depth + 1, blobs)]
                for k, v in value.items()
            ]
        }
    import torch

    if isinstance(value, torch.Tensor):
        blobs.append(_tensor_bytes(value, path))
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    hint = ""
    if type(value).__module__ == "numpy":
        hint = "; convert it with torch.as_tensor(...) to a tensor, or with .item() to a number"
    raise NotPlainError(
        f"{path} is of type {_type(value)}; return tensors, numbers, text, lists, tuples or dicts "
        f"of them{hint}"
    )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _tensor_bytes(tensor: torch.Tensor, path: str) -> bytes:
    import torch

    from course_lib.ranks._torch.this_thread import without_overrides

    if tensor.layout != torch.strided or tensor.is_nested:
        raise NotPlainError(f"{path} is not a dense tensor; return its .to_dense()")
    if tensor.dtype not in dtypes().values():
        raise NotPlainError(f"{path} is a tensor of {tensor.dtype}; return one of {[*dtypes()]}")
    if tensor.dim() > MAX_DIMS:
        raise NotPlainError(
            f"{path} is a tensor of {tensor.dim()} dimensions: at most {MAX_DIMS} can be sent"
        )
    if math.prod(max(n, 1) for n in tensor.shape) > MAX_EXTENT:
        raise NotPlainError(f"{path} is a tensor of shape {tuple(tensor.shape)}: too large to send")
    try:
        # A subclass may override any operation: take the data without calling its overrides.
        with without_overrides():
            plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().cpu()
            # A tensor of one element may have the stride 0 and still counts as contiguous.
            flat = plain.contiguous().as_strided((plain.numel(),), (1,))
            # NumPy has no bfloat16, so every dtype is sent as bytes.
            return bytes(flat.view(torch.uint8).numpy().data)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise NotPlainError(
            f"{path} is of type {_type(tensor)}, whose data cannot be read: {reason}"
        ) from error


def decode(data: bytes | bytearray | memoryview, max_bytes: int = MAX_BYTES) -> Plain:
    """Return the value that ``encode`` turned into ``data``.

    Tensors are on the CPU and own their data.

    Raises:
        WireError: ``data`` is longer than ``max_bytes`` or is not the bytes of a value.
    """
    view = memoryview(data).cast("B")
    text, size = _lengths(view, max_bytes)
    if len(view) != size:
        raise WireError(f"a value of {size} bytes does not fit into {len(view)} bytes")
    try:
        skeleton = json.loads(
            str(view[_HEADER.size : _HEADER.size + text], "utf-8"), parse_int=_parse_int
        )
    except RecursionError:
        raise WireError("nested too deeply") from None
    except ValueError as error:
        raise WireError(f"the skeleton is not JSON: {error}") from None
    blobs = _Blobs(view[_HEADER.size + text :])
    value = _from_skeleton(skeleton, 0, blobs)
    if len(blobs.rest):
        raise WireError(f"{len(blobs.rest)} bytes belong to no tensor")
    return value


def _lengths(start: bytes | bytearray | memoryview, max_bytes: int) -> tuple[int, int]:
    """Return the length of the skeleton and of the whole message that begins like this."""
    if len(start) < _HEADER.size:
        raise WireError(f"a message of {len(start)} bytes is too short for its header")
    magic, text, blobs = _HEADER.unpack_from(start)
    if magic != _MAGIC:
        raise WireError("the bytes do not begin with the header of a message")
    size = _HEADER.size + text + blobs
    if size > max_bytes:
        raise WireError(f"a message of {size:,} bytes is too large; the limit is {max_bytes:,}")
    if text > MAX_SKELETON:
        raise WireError(f"a skeleton of {text:,} bytes is too large; the limit is {MAX_SKELETON:,}")
    return text, size


class Reader:
    """Reads the messages of a stream that arrives in pieces.

    A reader never holds more than one message of `max_bytes` and the last piece. After a
    ``WireError`` the stream has no meaning any more, and every further `feed` raises the error
    again.

    Attributes:
        held: bytes of the message that has begun and not ended.

    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._error: WireError | None = None

    @property
    def held(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Any]:
        """Add the next piece of the stream; yield the values that are complete now.

        Raises:
            WireError: after the last value, what arrived is no message, or a too large one.
        """
        if self._error is not None:
            raise self._error
        self._buffer += data
        try:
            while len(self._buffer) >= _HEADER.size:
                _, size = _lengths(self._buffer, self._max_bytes)
                if len(self._buffer) < size:
                    break
                message = self._buffer[:size]
                del self._buffer[:size]
                yield decode(message, self._max_bytes)
        except WireError as error:
            self._error = error
            self._buffer.clear()
            raise


def send(sock: socket.socket, value: object, fds: Sequence[int] = ()) -> None:
    """Write one message to a blocking stream socket, with copies of these descriptors."""
    data = encode(value)
    if fds:
        data = data[socket.send_fds(sock, [data], list(fds)) :]
    sock.sendall(data)


def receive(sock: socket.socket) -> Any:
    """Read one message from a blocking stream socket, and nothing after it.

    Raises:
        EOFError: the other end closed the stream.
        WireError: what arrived is no message, or a too large one.
    """
    header = receive_exactly(sock, _HEADER.size)
    _, size = _lengths(header, MAX_BYTES)
    return decode(header + receive_exactly(sock, size - _HEADER.size))


def receive_exactly(sock: socket.socket, size: int) -> bytearray:
    """Wait until `size` bytes have arrived and return them.

    Raises:
        EOFError: the other end has closed the connection.

    """
    data, filled = bytearray(size), 0
    while filled < size:
        try:
            count = sock.recv_into(memoryview(data)[filled:])
        except ConnectionError:
            count = 0
        if not count:
            raise EOFError("the other end is gone")
        filled += count
    return data


def _parse_int(digits: str) -> int:
    if len(digits) > 1 + math.ceil(MAX_INT_BITS * math.log10(2)):
        raise WireError("an integer with too many digits")
    return int(digits)


def _from_skeleton(node: Any, depth: int, blobs: _Blobs) -> Plain:
    if depth > MAX_DEPTH:
        raise WireError("nested too deeply")
    if isinstance(node, str) and not _is_unicode(node):
        raise WireError("text with half of a surrogate pair")
    if isinstance(node, list):
        return [_from_skeleton(item, depth + 1, blobs) for item in node]
    if not isinstance(node, dict):
        plain: bool | int | float | str | None = node
        return plain
    match node:
        case {"tuple": [*items], **rest} if not rest:
            return tuple(_from_skeleton(item, depth + 1, blobs) for item in items)
        case {"dict": [*pairs], **rest} if not rest:
            entries: dict[str, Plain] = {}
            for pair in pairs:
                match pair:
                    case [str(key), item] if (
                        len(key) <= MAX_KEY and key not in entries and _is_unicode(key)
                    ):
                        entries[key] = _from_skeleton(item, depth + 1, blobs)
                    case _:
                        raise WireError("a dict with a bad, long or repeated key")
            return entries
        case {"tensor": [str(dtype), [*shape]], **rest} if not rest:
            return blobs.tensor(dtype, shape)
        case {"bytes": int(size), **rest} if not rest and size >= 0:
            return bytes(blobs.take(size))
    keys = [key[:20] for key in node][:5]
    raise WireError(f"an object with the keys {keys} is not of this format")


class _Blobs:
    """The bytes of all tensors and byte strings; each takes the next of them."""

    def __init__(self, data: memoryview) -> None:
        self.rest = data

    def take(self, size: int) -> memoryview:
        if size > len(self.rest):
            raise WireError(f"a tensor needs {size} bytes, {len(self.rest)} are left")
        part, self.rest = self.rest[:size], self.rest[size:]
        return part

    def tensor(self, name: str, shape: list[Any]) -> torch.Tensor:
        import torch

        dtype = dtypes().get(name)
        if dtype is None:
            raise WireError(f"a tensor of unknown dtype {name[:40]!r}")
        if len(shape) > MAX_DIMS or not all(type(n) is int and n >= 0 for n in shape):
            raise WireError("a tensor's shape is not a list of sizes")
        if math.prod(max(n, 1) for n in shape) > MAX_EXTENT:
            raise WireError("a tensor's shape is too large")
        data = bytearray(self.take(math.prod(shape) * dtype.itemsize))
        if not data:
            return torch.empty(shape, dtype=dtype)
        if dtype is torch.bool and data.strip(b"\0\1"):
            raise WireError("a bool that is neither 0 nor 1")
        return torch.frombuffer(data, dtype=dtype).reshape(shape)


def _type(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else str(kind)[8:-2]
