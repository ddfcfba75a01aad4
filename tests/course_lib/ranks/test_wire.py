"""Plain values survive the wire; everything else is refused, by name on the way out."""

import contextlib
import json
import math
import os
import random
import socket
import struct
import threading
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course_lib.checking.on_ranks.leaves import leaves, without_numbers
from course_lib.ranks import wire
from course_lib.ranks.wire import NotPlainError, Reader, WireError, decode, encode, receive, send

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
]


def same(a: Any, b: Any) -> bool:
    """Equal types all the way down, and equal bits: NaN equals NaN, 0.0 differs from -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def tensor_of(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    """Return random bits seen as ``dtype``: NaN payloads, infinities and denormals included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator, dtype=torch.uint8).bool()
    size = math.prod(shape) * dtype.itemsize
    raw = torch.randint(256, (size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


tensors = st.builds(
    tensor_of,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=4),
    st.integers(0, 2**31),
)
scalars = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)),
    *(st.binary(max_size=9), tensors),
)
plain = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=8), inner, max_size=4),
    ),
    max_leaves=12,
)


@given(plain)
def test_a_plain_value_comes_back_bit_for_bit(value: Any) -> None:
    assert same(decode(encode(value)), value)


def test_layout_and_history_of_a_tensor_do_not_matter() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    leaf = base.clone().requires_grad_()
    weird = {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": base[:1].expand(5, 6),
        "leaf": leaf,
        "grown": leaf * 2,
        "parameter": torch.nn.Parameter(base),
        "conjugate": torch.complex(base, -base).conj(),
        "negative": torch._neg_view(base),
        "a stride of zero": torch.ones(()).as_strided((1, 1), (0, 0)),  # a result of NumPy's
        "no element": torch.ones(()).as_strided((0, 2), (0, 0)),
    }
    back = decode(encode(weird))
    for name, tensor in weird.items():
        got = back[name]
        assert type(got) is torch.Tensor and not got.requires_grad, name
        assert torch.equal(got, tensor.detach()), name


class Lying(torch.Tensor):
    """Answers whatever it is asked with ones."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("detach", "cpu", "contiguous", "numpy", "as_subclass"):
            return torch.ones(3)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_tensor_subclass_is_sent_as_its_data() -> None:
    back = decode(encode(torch.tensor([1.0, 2.0, 3.0]).as_subclass(Lying)))
    assert type(back) is torch.Tensor
    assert torch.equal(back, torch.tensor([1.0, 2.0, 3.0]))


def test_a_decoded_tensor_owns_its_memory() -> None:
    data = bytearray(encode([torch.zeros(3), torch.zeros(3)]))
    first, second = decode(data)
    first.add_(1)
    data[-12:] = b"\xff" * 12
    assert torch.equal(first, torch.ones(3)) and torch.equal(second, torch.zeros(3))


def test_subclasses_of_containers_become_plain_containers() -> None:
    point = namedtuple("point", "x y")
    value = [point(1, 2), OrderedDict(a=1), torch.Size([2, 3])]
    assert same(decode(encode(value)), [(1, 2), {"a": 1}, (2, 3)])


class Sly(float):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = float.__hash__


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((0, {"loss": object()}), r"result\[1\]\['loss'\] is of type .*object; return tensors"),
        ([Sly(1.0)], r"result\[0\] is of type .*Sly;"),
        (np.float64(2.0), r"result is of type numpy.float64;.*\.item\(\)"),
        ([np.ones(2)], r"result\[0\] is of type numpy.ndarray;.*as_tensor"),
        ({1: 2}, r"result has a key of type int;"),
        ({"a": print}, r"result\['a'\] is of type"),
        (1j, "complex"),
        (["\ud800"], r"result\[0\] is text with half of a surrogate"),
        ({"\udfff": 1}, "result has a key"),
        (10**5000, "result is an integer of more than 1024 bits"),
        ({"w": torch.eye(2).to_sparse()}, r"result\['w'\] is not a dense tensor"),
        (torch.empty(3, device="meta"), "whose data cannot be read"),
        (torch.ones(2).to(torch.float8_e5m2), "float8_e5m2; return one of"),
        ([0] * 2**20, "too many separate values"),
        (ITSELF, "nested deeper"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_not_plain_is_refused_by_name(value: object, message: str) -> None:
    with pytest.raises(NotPlainError, match=message):
        encode(value)


def header(skeleton: int, blobs: int = 0) -> bytes:
    return struct.pack("<4sIQ", b"DDPv", skeleton, blobs)


def message(skeleton: bytes, blobs: bytes = b"") -> bytes:
    return header(len(skeleton), len(blobs)) + skeleton + blobs


def test_the_handmade_messages_below_differ_from_a_good_one_only_in_their_fault() -> None:
    good = message(b'{"tensor":["float32",[2]]}', torch.tensor([1.0, 2.0]).numpy().tobytes())
    assert same(decode(good), torch.tensor([1.0, 2.0]))
    assert same(decode(message(b'{"dict":[["a",{"tuple":[1]}]]}')), {"a": (1,)})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"XXXX" + message(b"1")[4:],
        message(b""),
        message(b"{"),
        message(b"1", b"\0"),
        header(2**32 - 1) + b"1",
        header(1, 2**63) + b"1",
        message(b'{"bytes":3}', b"ab"),
        message(b'{"bytes":-1}'),
        message(b"1" * 10**6),
        message(b"[" * 100_000),
        message(b"[" * 100 + b"]" * 100),
        message(b'"\\ud800"'),
        message(b'{"dict":[["a",1],["a",2]]}'),
        message(b'{"dict":[[1,2]]}'),
        message(b'{"tuple":[],"dict":[]}'),
        message(b'{"__class__":"os.system"}'),
        message(b'{"tensor":["float32",[2]]}', b"\0" * 7),
        message(b'{"tensor":["float32",[2]]}', b"\0" * 9),
        message(b'{"tensor":["float31",[2]]}', b"\0" * 8),
        message(b'{"tensor":["float32",[-2,-1]]}', b"\0" * 8),
        message(b'{"tensor":["float32",[true,2]]}', b"\0" * 8),
        message(b'{"tensor":["float32",[1000000000000]]}', b"\0" * 8),
        message(b'{"tensor":["float32",[0,4611686018427387905]]}'),
        message(b'{"tensor":["float32",[%s0]]}' % (b"1," * 64)),
        message(b'{"tensor":["bool",[2]]}', b"\1\2"),
        message(b'[{"tensor":["uint8",[2]]},{"tensor":["uint8",[2]]}]', b"abc"),
    ],
    ids=lambda data: repr(data[16:60]),
)
def test_malformed_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


def test_a_value_larger_than_the_cap_is_refused() -> None:
    data = encode(torch.zeros(100))
    decode(data, max_bytes=len(data))
    with pytest.raises(WireError, match=f"limit is {len(data) - 1}"):
        decode(data, max_bytes=len(data) - 1)


def wire_error_or_value(data: bytes | bytearray) -> None:
    with contextlib.suppress(WireError):
        decode(data, max_bytes=2**16)


nodes = st.recursive(
    st.one_of(scalars.filter(lambda v: not isinstance(v, torch.Tensor | bytes)), st.integers(0, 9)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.builds(lambda k, v: {k: v}, st.sampled_from(["tuple", "dict", "tensor", "x"]), inner),
        st.builds(
            lambda dtype, shape: {"tensor": [dtype, shape]},
            st.sampled_from(["bool", "float32", "complex64", "?"]),
            st.lists(st.integers(-1, 3), max_size=3),
        ),
    ),
    max_leaves=8,
)


@given(nodes, st.binary(max_size=40))
def test_well_formed_json_that_is_no_value_only_raises_wire_error(node: Any, blobs: bytes) -> None:
    wire_error_or_value(message(json.dumps(node).encode(), blobs))


def test_truncations_and_bit_flips_only_ever_raise_wire_error() -> None:
    rng = random.Random(1)
    value = {"w": torch.arange(6.0).reshape(2, 3), "t": (1, -2.5, "é", None, [True]), "e": []}
    data = encode(value)
    for end in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:end])
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        wire_error_or_value(flipped)
    for _ in range(2000):
        broken = bytearray(data)
        for _ in range(rng.randint(2, 6)):
            broken[rng.randrange(len(data))] = rng.randrange(256)
        wire_error_or_value(broken)


# On a stream ----------------------------------------------------------------------------------


@given(st.lists(plain, max_size=4), st.data())
def test_a_reader_finds_the_same_values_however_the_stream_is_cut(values, data):
    stream, reader, received = b"".join(map(encode, values)), Reader(), list[Any]()
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        received += reader.feed(stream[:size])
        stream = stream[size:]
    assert same(received, values) and not reader.held


@pytest.mark.parametrize("start", [header(1, 99), header(2**24), b"DDPx" + bytes(12)])
def test_what_is_too_large_is_refused_before_it_arrives_and_a_reader_stays_broken(start):
    reader = Reader(max_bytes=100)
    for data in (start, encode(1)):
        with pytest.raises(WireError):
            list(reader.feed(data))
    assert not reader.held


def test_a_message_arrives_whole_with_its_descriptors_and_its_end_is_told() -> None:
    receiver, sender = socket.socketpair()
    value = {"large": torch.arange(10**6), "bytes": bytes(10)}
    with receiver, sender, open(__file__) as file:
        writer = threading.Thread(target=send, args=(sender, value))
        writer.start()
        assert same(receive(receiver), value)
        writer.join()
        send(sender, 1, [file.fileno()])
        data, (got,), _, _ = socket.recv_fds(receiver, 1000, 4)
        assert list(Reader().feed(data)) == [1] and os.fstat(got) == os.fstat(file.fileno())
        os.close(got)
        sender.sendall(encode(value)[:40])
        sender.close()
        with pytest.raises(EOFError):
            receive(receiver)


def test_the_largest_skeleton_is_read_in_seconds() -> None:
    inner = (wire.MAX_SKELETON - 3) // 3
    decode(message(b"[" + b"[]," * inner + b"1]"))


def test_a_list_that_is_none_is_named_without_the_numbers_of_its_items() -> None:
    pulled = {"weights of pull {}, parameter {}": [[1.0], print], "gradient of parameter {}": print}
    places = [without_numbers(place) for place, leaf in leaves(pulled) if leaf is print]
    assert places == ["weights of pull 1", "gradient of parameter"]
    assert without_numbers("weights of pull 0, parameter 0") == "weights of pull 0, parameter 0"


def test_the_names_of_many_places_stay_short() -> None:
    value: Any = [1] * 100_000
    for _ in range(60):
        value = {"k" * wire.MAX_KEY: value}
    assert all(len(name) < 2 * wire.MAX_NAME for name, _ in leaves(decode(encode(value))))
    with pytest.raises(NotPlainError, match="a key of 201 characters"):
        encode({"k" * (wire.MAX_KEY + 1): 1})
