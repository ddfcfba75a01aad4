"""Encode plain values as bytes; student code can send nothing else to the examiner.

This does not use pickle, because reading bytes must never run code. A value becomes a JSON
skeleton, followed by the bytes of the tensors. In the skeleton, each tensor is written as its dtype
and shape; the bytes have the same order. There are no offsets, so nothing can point outside the
message or overlap::

    magic | skeleton length, 4 bytes | skeleton, JSON in UTF-8 | tensor bytes, little-endian

``encode`` runs in the process of student code and explains what it cannot send. ``decode`` runs in
the process that decides a grade and trusts nothing. For any bytes, it returns plain values or
raises ``WireError``, and builds nothing larger than a small multiple of what it was given.
"""

import json
import math
import struct
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

Plain: TypeAlias = (
    "bool | int | float | str | torch.Tensor"
    " | list[Plain] | tuple[Plain, ...] | dict[str, Plain] | None"
)

ARRAY = "a NumPy array"
"""Key of the dict that stands for an array; its value is a tensor with the array's numbers."""
MAX_BYTES = 256 * 2**20  # of one message or frame, if the reader gives no other limit
MAX_SKELETON = 2**20  # bytes of JSON: an object costs about 30 times its JSON in memory
MAX_DEPTH = 64
MAX_KEY = 200  # characters of a key of a dict
MAX_NAME = 400  # characters of the name of a place: a value has many places, each with a name
MAX_INT_BITS = 1024  # the range of a float; prevents slow parsing of a million digits
MAX_DIMS = 64
MAX_EXTENT = 2**62  # product of the non-zero sizes: strides must fit 64 bits, even if empty

_VALUE = struct.Struct("<4sI")
_VALUE_MAGIC = b"DDPv"

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex64, torch.complex128),
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class NotPlainError(TypeError):
    """A value cannot be sent; the message names its position and what to return instead."""


class WireError(ValueError):
    """Received bytes are not what ``encode`` or ``send_frame`` would have sent."""


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
    return b"".join([_VALUE.pack(_VALUE_MAGIC, len(skeleton)), skeleton, *blobs])


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
    if isinstance(value, torch.Tensor):
        blobs.append(_tensor_bytes(value, path))
        return {"tensor": [_NAMES[value.dtype], list(value.shape)]}
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
    if tensor.layout != torch.strided or tensor.is_nested:
        raise NotPlainError(f"{path} is not a dense tensor; return its .to_dense()")
    if tensor.dtype not in _NAMES:
        raise NotPlainError(f"{path} is a tensor of {tensor.dtype}; return one of {[*_DTYPES]}")
    if tensor.dim() > MAX_DIMS:
        raise NotPlainError(
            f"{path} is a tensor of {tensor.dim()} dimensions: at most {MAX_DIMS} can be sent"
        )
    if math.prod(max(n, 1) for n in tensor.shape) > MAX_EXTENT:
        raise NotPlainError(f"{path} is a tensor of shape {tuple(tensor.shape)}: too large to send")
    try:
        # A subclass may override any operation: take the data without calling its overrides.
        with torch._C.DisableTorchFunctionSubclass():
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
    if len(view) > max_bytes:
        raise WireError(
            f"a value of {len(view)} bytes is too large: at most {max_bytes} are accepted"
        )
    if len(view) < _VALUE.size:
        raise WireError(f"a value of {len(view)} bytes is too short for its header")
    magic, length = _VALUE.unpack_from(view)
    if magic != _VALUE_MAGIC:
        raise WireError("the bytes do not begin with the header of a value")
    if length > min(MAX_SKELETON, len(view) - _VALUE.size):
        raise WireError(f"a skeleton of {length} bytes does not fit")
    body = view[_VALUE.size :]
    try:
        skeleton = json.loads(str(body[:length], "utf-8"), parse_int=_parse_int)
    except RecursionError:
        raise WireError("nested too deeply") from None
    except ValueError as error:
        raise WireError(f"the skeleton is not JSON: {error}") from None
    blobs = _Blobs(body[length:])
    value = _from_skeleton(skeleton, 0, blobs)
    if len(blobs.rest):
        raise WireError(f"{len(blobs.rest)} bytes belong to no tensor")
    return value


def _parse_int(digits: str) -> int:
    if len(digits) > 1 + math.ceil(MAX_INT_BITS * math.log10(2)):
        raise WireError("an integer with too many digits")
    return int(digits)


def _from_skeleton(node: Any, depth: int, blobs: "_Blobs") -> Plain:
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
            return blobs.take(dtype, shape)
    keys = [key[:20] for key in node][:5]
    raise WireError(f"an object with the keys {keys} is not of this format")


class _Blobs:
    """The bytes of all tensors; each tensor takes the next of them."""

    def __init__(self, rest: memoryview) -> None:
        self.rest = rest

    def take(self, name: str, shape: list[Any]) -> torch.Tensor:
        dtype = _DTYPES.get(name)
        if dtype is None:
            raise WireError(f"a tensor of unknown dtype {name[:40]!r}")
        if len(shape) > MAX_DIMS or not all(type(n) is int and n >= 0 for n in shape):
            raise WireError("a tensor's shape is not a list of sizes")
        if math.prod(max(n, 1) for n in shape) > MAX_EXTENT:
            raise WireError("a tensor's shape is too large")
        size = math.prod(shape) * dtype.itemsize
        if size > len(self.rest):
            raise WireError(f"a tensor needs {size} bytes, {len(self.rest)} are left")
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        chunk, self.rest = bytearray(self.rest[:size]), self.rest[size:]
        if dtype is torch.bool and chunk.strip(b"\0\1"):
            raise WireError("a bool that is neither 0 nor 1")
        return torch.frombuffer(chunk, dtype=dtype).reshape(shape)


def leaves(value: Any, name: str = "", like: Any = None) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, numbers, texts and Nones of a plain value, each with a name for its place.

    If `like` has a leaf at a place, the value there is yielded as a whole, even if it is a list.
    Of a name, only the first `MAX_NAME` characters are kept; no check asks for a longer one.
    """
    name = name[:MAX_NAME]
    if like is not None and not isinstance(like, dict | list | tuple):
        yield name, value
    elif isinstance(value, dict):
        below = like if isinstance(like, dict) else {}
        for key, item in value.items():
            yield from leaves(item, f"{name} {key}".strip(), below.get(key))
    elif isinstance(value, list | tuple):
        rows = like if isinstance(like, list | tuple) else ()
        for i, item in enumerate(value):
            place = name.replace("{}", str(i), 1) if "{}" in name else f"{name}[{i}]"
            yield from leaves(item, place, rows[i] if i < len(rows) else None)
    else:
        yield name, value


def without_numbers(place: str) -> str:
    """Return the name, without ``{}``, of a value that should be a list and is not.

    Such a value has no items that could be numbered. For example, `leaves` gives the name
    ``weights of pull 0, parameter {}`` to the value of a pull that is not a list.
    """
    before, braces, _ = place.partition("{}")
    return (before.rpartition(", ")[0] or before.strip()) if braces else place


def _type(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else str(kind)[8:-2]
