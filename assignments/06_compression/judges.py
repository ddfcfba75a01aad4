"""Inputs, programs and judges of compressed tensors: answers are exact, judges read the bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from course_lib.checking import Case, Given, Wrong, equals
from course_lib.checking.answers import ANYTHING, describe, sees
from course_lib.checking.judges import Oracle
from course_lib.checking.shared.sums import EXACT, in_calls, numel
from course_lib.ranks.explain.words import counted

# Bytes on the wire --------------------------------------------------------------------------------

# The judges first count the bytes, and name the mistake that gives a wrong number of them. Then
# they read the bytes as a receiver would read them.


def expect_wire(value: Any, nbytes: int, formula: str, what: str, known: Mapping[int, str]) -> None:
    """Raise `Wrong` unless `value` is a vector of `nbytes` bytes, uint8.

    Args:
        value: the value that a rank returned, which may be anything.
        nbytes: the number of bytes that it must have.
        formula: how this number is computed, in words.
        what: the value's name, such as ``rank 0: wire``.
        known: number of bytes → the mistake that gives it.

    """
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.dim() != 1:
        said = describe(value)
        if isinstance(value, Tensor):
            said = f"a {value.dtype} tensor of shape {list(value.shape)} ({value.nbytes} bytes)"
        raise Wrong(
            f"{what} is {said}, expected a vector of {nbytes} bytes (uint8)",
            "Return one vector of bytes: x.view(torch.uint8) gives the bytes of a vector, and "
            "torch.cat joins vectors.",
        )
    if value.numel() != nbytes:
        raise Wrong(
            f"{what} has {counted(value.numel(), 'byte')}, expected {nbytes}: {formula}",
            known.get(value.numel(), ""),
        )


# A byte for each number ---------------------------------------------------------------------------


def quantized_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw ``x``, up to 127 times a power of two, and ``ticks`` of 2⁻²⁴, int64.

    x/s + u is 2⁻¹³ away from a multiple of 1/8. float32 can tell on which side, but no smaller
    dtype can. x has 20 significant bits, of which bfloat16 and float16 round some. In a case with
    bfloat16, x has eight.

    Parameters: ``shape``; ``exponent`` of the power; ``sign`` of the largest, 0 for all zeros. Or
    the numbers themselves, ``x`` and ``u``.
    """
    if "x" in case.parameters:
        x, u = (torch.tensor(case.parameters[name]).double() for name in ("x", "u"))
        return [{"x": x, "ticks": (u * 2**24).long()}]
    shape, sign = tuple(case.parameters["shape"]), case.parameters["sign"]
    drawn = []
    for _ in range(case.world_size):
        eighths = torch.randint(-1016, 1017, shape, generator=generator).flatten().double()
        most = 4.0 * int(torch.randint(200, 255, (), generator=generator))
        if case.form.dtype == "bfloat16":
            for above in (256, 512):
                step = above // 128
                eighths = torch.where(
                    eighths.abs() < above, eighths, (eighths / step).floor() * step
                )
        else:
            eighths += torch.randint(1, 1024, eighths.shape, generator=generator) / 1024
            most += int(torch.randint(1, 1024, (), generator=generator)) / 1024
        eighths = eighths.clamp(-most, most)
        at = int(torch.randint(max(eighths.numel(), 1), (), generator=generator))
        eighths[at : at + 1] = most
        side = torch.randint(2, eighths.shape, generator=generator) * 2 - 1
        between = torch.randint(8, eighths.shape, generator=generator) / 8 + side * 2.0**-13
        ticks = ((between - sign * 127 * eighths / most) % 1 * 2**24).long()
        if sign > 0:
            ticks[at : at + 1] = 2**24 - 1  # 127 + u is 128 in float32
        elif sign == 0:
            ticks[at : at + 1] = 0  # 0 + u is a whole number
        x = eighths * (sign * 2.0 ** (case.parameters["exponent"] - 3))
        drawn.append({"x": x.view(shape), "ticks": ticks.view(shape)})
    return drawn


def uniform(ticks: Tensor) -> Tensor:
    """Return ``u``, numbers in [0, 1), as float32, or as float64 if their number is even."""
    dtype = torch.float32 if ticks.numel() % 2 else torch.float64
    return ticks.to(dtype) * 2.0**-24


def codes_of(own: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scale s = max|x|/127, and x/s and u, in double precision."""
    x, u = own["x"].double().flatten(), uniform(own["ticks"]).double().flatten()
    scale = x.abs().max() / 127 if x.numel() else x.sum()
    return scale, x / torch.where(scale == 0, 1, scale), u


@sees(lambda case, inputs, rank: {"wire": ANYTHING, "u": uniform(inputs[rank]["ticks"])})
def reads_codes(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge ``wire`` (four bytes of scale, a code for each number), and that ``u`` is unchanged."""
    read = []
    for rank, (own, value) in enumerate(zip(inputs, values, strict=True)):
        n, wire = own["x"].numel(), value["wire"]
        known = {
            n: "Where is the scale? The receiver needs it.",
            n + 8: "The scale must be float32, 4 bytes.",
            4 * n + 4: "A code must be one byte (int8), not four bytes.",
        }
        expect_wire(wire, n + 4, "4 for the scale, 1 for each number", f"rank {rank}: wire", known)
        if not torch.equal(value["u"], uniform(own["ticks"])):
            raise Wrong(
                f"rank {rank}: the function changes u. It must leave u as it is: work on u.clone()"
            )
        scale, codes = wire[:4].clone().view(torch.float32), wire[4:].view(torch.int8)
        read.append({"scale": scale, "codes": codes.double()})
    _codes(case, inputs, read)


def _with(rounding: Callable[[Tensor, Tensor], Tensor]) -> Oracle:
    def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
        _, scaled, u = codes_of(inputs[me])
        return {"codes": rounding(scaled, u)}

    return oracle


def _right(case: Case, inputs: Sequence[Any], me: int) -> Any:
    scale, scaled, u = codes_of(inputs[me])
    codes = (scaled + u).floor().clamp(max=127)
    return {"scale": scale.float().view(1), "codes": codes}


_codes = equals(
    _right,
    {
        "x/s rounded to the nearest integer: let u decide between up and down": _with(
            lambda x, u: x.round()
        ),
        "⌊x/s⌋, which rounds every number down: add u before you round": _with(
            lambda x, u: x.floor()
        ),
        "the right codes, except that 128 became -128: cut codes off at 127": _with(
            lambda x, u: torch.where((x + u).float() == 128, -128, (x + u).floor())
        ),
    },
    tolerance=dict.fromkeys(EXACT, 1e-6),  # of the scale: max|x| by 127, or times 1/127
    absolute=EXACT,
)


# The largest numbers, and where they are ----------------------------------------------------------


def distinct_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw ``x`` of the case's ``shape``, with absolute values that all differ; one is 0."""
    n = numel(case)
    order = torch.randperm(n, generator=generator)
    # bfloat16 represents 8 significant bits exactly. With more, hardly two numbers would differ.
    if case.form.dtype == "bfloat16":
        sizes = (128 + order % 128) / 256 * 2.0 ** (order // 128)
    else:
        sizes = (1 + order * 2.0**-20) * 2.0 ** (order % 3)
    sizes = torch.where(order == 0, 0, sizes * 2.0 ** case.parameters.get("exponent", 0))
    if case.parameters.get("infinite"):
        sizes = torch.where(order == n - 1, torch.inf, sizes)
    signs = torch.randint(2, (n,), generator=generator) * 2 - 1
    return [{"x": (sizes * signs).view(tuple(case.parameters["shape"]))}]


@sees({"wire": ANYTHING})
def reads_top_k(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge ``wire``: the ``k`` largest values, and their places."""
    x, k, wire = inputs[0]["x"], case.parameters["k"], values[0]["wire"]
    n, bitmap = x.numel(), -(-x.numel() // 8)
    known = {
        4 * k + 8 * bitmap: "A bool takes a whole byte: pack eight bits into one byte.",
        12 * k: "PyTorch's indices are int64, 8 bytes each: send the places as int32.",
        8 * k: "Here the bitmap, one bit for each number, is smaller than the list of places.",
        4 * k + bitmap: "Here the list, k places of 4 bytes, is smaller than the bitmap.",
    }
    formula = f"4 k + min(4 k, ceil(n/8)) with k = {k}, n = {n}"
    expect_wire(wire, 4 * k + min(4 * k, bitmap), formula, "rank 0: wire", known)
    right = largest_values(x, k)
    got, reverse = read_top_k(wire, n, k), read_top_k(wire, n, k, highest_first=True)
    is_right, is_reversed = (x is not None and torch.equal(x, right) for x in (got, reverse))
    bits = (wire[4 * k :, None] >> torch.arange(8)).bitwise_and(1).flatten()[:n]
    if bitmap == 4 * k > 0 and torch.equal(bits, (right != 0).to(torch.uint8)):
        raise Wrong(
            "rank 0: wire: the places are a bitmap, expected a list",
            f"{n} bits take {bitmap} whole bytes, like the list. In this case, send the list.",
        )
    if is_reversed and not is_right:
        raise Wrong(
            "rank 0: wire: the first element has the highest bit of its byte, expected the lowest",
            "Element i is bit i mod 8 of byte i // 8: bits[0] + 2 bits[1] + 4 bits[2] + …",
        )
    if got is None:
        raise Wrong(
            f"rank 0: wire: the places are not {k} different numbers from 0 to {n - 1}",
            "Count the places in the flattened x, and fill the last byte of a bitmap up with "
            "zeros.",
        )
    same_values = torch.equal(got.sort().values, right.sort().values)
    if torch.equal(got != 0, right != 0) and same_values and not torch.equal(got, right):
        raise Wrong("rank 0: wire: values and places are right, but not in the same order")
    _largest(case, inputs, [{"decoded": got}])
    if not torch.equal(places_in(wire, k), places_in(wire, k).sort().values):
        raise Wrong("rank 0: wire: the places are right, but not in the order of x")


def largest_values(x: Tensor, k: int) -> Tensor:
    """Return the flattened x, float32, with zeros for all but its k largest |x_i|."""
    return _chosen(x, lambda flat: flat.abs().argsort(descending=True)[:k])


def read_top_k(wire: Tensor, n: int, k: int, highest_first: bool = False) -> Tensor | None:
    """Return the float32 vector that a wire of values and places encodes; None if it is no wire.

    `highest_first` means to read a bitmap as if the first element had the highest bit of its byte.
    """
    values, places = wire[: 4 * k].clone().view(torch.float32), places_in(wire, k, highest_first)
    if (
        len(set(places.tolist())) != k
        or len(places) != k
        or (k and not 0 <= int(places.min()) <= int(places.max()) < n)
    ):
        return None
    return torch.zeros(n).index_put((places,), values)


def places_in(wire: Tensor, k: int, highest_first: bool = False) -> Tensor:
    """Return the places after the k values of a wire, in their order; see `read_top_k`."""
    rest = wire[4 * k :].clone()
    if len(rest) == 4 * k:
        return rest.view(torch.int32).long()
    bits = torch.arange(7, -1, -1) if highest_first else torch.arange(8)
    return ((rest[:, None] >> bits) & 1).flatten().nonzero().flatten()


def _chosen(x: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
    flat = x.float().flatten()
    places = choose(flat)
    return torch.zeros_like(flat).index_put((places,), flat[places])


def _kept(values: Callable[[Tensor, int], Tensor]) -> Oracle:
    return lambda case, inputs, me: {"decoded": values(inputs[me]["x"], case.parameters["k"])}


_largest = equals(
    _kept(largest_values),
    {
        "the k largest numbers: keep the k largest absolute values": _kept(
            lambda x, k: _chosen(x, lambda flat: flat.argsort(descending=True)[:k])
        ),
        "the k smallest absolute values: keep the largest": _kept(
            lambda x, k: _chosen(x, lambda flat: flat.abs().argsort()[:k])
        ),
        "the absolute values, without signs": _kept(lambda x, k: largest_values(x, k).abs()),
    },
    tolerance=EXACT,
)


# Codecs that a check passes to a student's function -----------------------------------------------

# Every result is exact. All scales are 257 times a power of two. With multiples of a power of two
# (`exact_numbers`), float32 rounds nothing except what a codec rounds, and a sum of decoded tensors
# is the same in every order. But bfloat16 rounds the scale itself.

Rounding = Callable[[Tensor], Tensor]


def _vector(x: Tensor) -> Tensor:
    if x.dim() != 1 or x.dtype != torch.float32:
        raise TypeError(f"encode takes a float32 vector, not {x.dtype} of shape {list(x.shape)}")
    return x.detach()


def _with_scale(exponent: Tensor, codes: Tensor) -> Tensor:
    # A vector: older versions of PyTorch take a scalar to the default dtype.
    unit = torch.full((1,), 257.0, dtype=torch.float32, device=codes.device)
    return torch.cat([torch.ldexp(unit, exponent).view(torch.uint8), codes])


def _scale(wire: Tensor) -> Tensor:
    return wire[:4].clone().view(torch.float32)


def encode_bytes(x: Tensor, rounded: Rounding = torch.round) -> Tensor:
    """Return n + 4 bytes: a scale, and each number divided by the scale and `rounded`."""
    x = _vector(x)
    largest = x.abs().max() if x.numel() else x.sum()
    exponent = torch.frexp(largest / (127 * 257)).exponent
    codes = rounded(torch.ldexp(x, -exponent) / 257).to(torch.int8)
    return _with_scale(exponent, codes.view(torch.uint8))


def decode_bytes(wire: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the tensor that `encode_bytes` has compressed."""
    return (wire[4:].clone().view(torch.int8) * _scale(wire)).view(shape).to(dtype)


def encode_signs(x: Tensor, rounded: Rounding = torch.round) -> Tensor:
    """Return 4 + ceil(n / 8) bytes: a scale, and a bit for each number, 1 if it is below zero."""
    x = _vector(x)
    largest = x.abs().max() if x.numel() else x.sum()
    exponent = torch.frexp(largest).exponent - 8  # scale above the largest: encoding twice shows
    bits = torch.nn.functional.pad((x < 0).to(torch.uint8), (0, -x.numel() % 8)).view(-1, 8)
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
    return _with_scale(exponent, (bits * powers).sum(1).to(torch.uint8))


def decode_signs(wire: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the tensor that `encode_signs` has compressed."""
    n = torch.Size(shape).numel()
    bits = (wire[4:, None] >> torch.arange(8, device=wire.device)) & 1
    signs = 1 - 2 * bits.reshape(-1)[:n].float()
    return (signs * _scale(wire)).view(shape).to(dtype)


FEW = 3

Codec = tuple[Callable[..., Tensor], Callable[..., Tensor]]
CODECS: Mapping[str, Codec] = {
    "8 bits": (encode_bytes, decode_bytes),
    "1 bit": (encode_signs, decode_signs),
}


def handed_out(name: str) -> Codec:
    """Return a codec for a student's function that rounds a repeated vector in a different way.

    A codec that rounds at random does this too, and then not all ranks have the same sum. Two
    shards of few numbers may be equal by chance, so they are rounded in the same way.
    """
    encode, decode = CODECS[name]
    seen: set[bytes] = set()

    def encode_once(x: Tensor) -> Tensor:
        numbers = _vector(x).cpu().numpy().tobytes()
        rounded = torch.floor if x.numel() > FEW and numbers in seen else torch.round
        seen.add(numbers)
        return encode(x, rounded)

    encode_once.__qualname__ = encode.__qualname__  # says which codec it is
    return encode_once, decode


def round_trip(codec: Codec, x: Tensor) -> Tensor:
    """Return C(x) of a float32 vector."""
    encode, decode = codec
    return decode(encode(x), x.shape, torch.float32)


# Sums of compressed tensors, shard by shard -------------------------------------------------------

Compress = Callable[[Codec, Tensor], Tensor]


def _exactly(codec: Codec, x: Tensor) -> Tensor:
    return x


def compressed_sum(
    parts: Compress = round_trip,
    sums: Compress = round_trip,
) -> Oracle:
    """Return an oracle of C(Σ C(tensor)) for the case's ``codec``, shard by shard.

    `parts` compresses the tensors that the ranks send first, and `sums` compresses the sums.
    """

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> dict[str, Tensor]:
        codec, count = CODECS[case.parameters["codec"]], len(inputs)

        def total(ins: Sequence[Any], me: int) -> Tensor:
            cut = [each["tensor"].float().flatten().tensor_split(count) for each in ins]
            totals = []
            for same in zip(*cut, strict=True):
                sent = torch.stack([parts(codec, each) for each in same])
                totals.append(sums(codec, sent.sum(0)))
            like = ins[0]["tensor"]
            return torch.cat(totals).view(like.shape).to(like.dtype)

        return in_calls("tensor", total)(case, inputs, me)

    return oracle


equals_compressed_sum = equals(
    compressed_sum(),
    {
        "Σ C(x): compress the sums, too, before you send them": compressed_sum(sums=_exactly),
        "C(Σ x): compress the shards, too, before you send them": compressed_sum(parts=_exactly),
        "the tensor as it was before the call: write the result into it": in_calls(
            "tensor", lambda inputs, me: inputs[me]["tensor"]
        ),
    },
    tolerance=EXACT,
)
"""Compare ``tensor`` with C(Σ C(tensor)) over the group."""


# Error feedback: two senders with a memory for each key -------------------------------------------


def only_largest(p: Tensor) -> Tensor:
    """Return p with zeros for all numbers except one of the largest."""
    place = p.abs().argmax()
    return torch.zeros_like(p).flatten().index_fill(0, place, 1).view(p.shape) * p


def signs(p: Tensor) -> Tensor:
    """Return one power of two with the signs of p."""
    return torch.copysign(torch.exp2(torch.frexp(p.abs().max()).exponent - 1.0), p)


SHAPES = (4, 3), (4, 3), (2, 4, 2), (11,)
"""Shapes of the keys, in a cycle. Two are equal. Smaller tensors might repeat by chance."""


def rounded(p: Tensor) -> Tensor:
    """Return p in multiples of 1/256, with more bits than bfloat16 has; leave vectors unchanged.

    PowerSGD leaves vectors unchanged, too. The multiples are one too large. Otherwise all numbers
    except small ones would equal x, which bfloat16 can represent.
    """
    return (torch.round(p * 256) + 1) / 256 if p.dim() > 1 else p.clone()


COMPRESS = {"only_largest": only_largest, "signs": signs, "rounded": rounded}


def _once(compress: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `compress`, changed to refuse a repeated tensor."""
    seen: set[bytes] = set()

    def compress_once(p: Tensor) -> Tensor:
        if p.dtype != torch.float32:
            raise TypeError(f"compress takes a float32 tensor, not {p.dtype}")
        numbers = p.detach().double().cpu().contiguous().numpy().tobytes()
        if numbers in seen:
            raise RuntimeError(
                "compress is called twice for the same tensor. Call it once: it may round at "
                "random, and then the second result is not the one that you returned"
            )
        seen.add(numbers)
        return compress(p)

    compress_once.__qualname__ = compress.__qualname__  # says which function it is
    return compress_once


def in_turn(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw a tensor for each step and key; every second step is small compared with the residual.

    The keys have the shapes of `SHAPES`. The numbers have 13 significant bits, more than bfloat16
    and float16 can represent. In a case with bfloat16, they have five. ``exponent`` makes them
    larger by a power of two.
    """
    drawn, most = [], 8 if case.form.dtype == "bfloat16" else 2**11
    size = 2.0 ** case.parameters.get("exponent", 0)
    for _ in range(case.world_size):
        own: dict[str, Any] = {
            "compress": case.parameters["compress"],
            "keys": list(case.parameters["keys"]),
        }
        for i in range(case.parameters["steps"]):
            unit = 2.0 ** (-9 if i % 2 else -1) * 8 / most * size
            own[f"step {i}"] = [
                (torch.randint(-most, most, shape, generator=generator) * 2 + 1) * unit
                for _, shape in zip(own["keys"], cycle(SHAPES), strict=False)
            ]
        drawn.append(own)
    return drawn


def _anew(key: Any, number: type) -> Any:
    """Return an equal key that is a new object, because a caller may make its keys in each call."""
    if isinstance(key, tuple):
        return tuple([_anew(each, number) for each in key])
    return "".join(list(key)) if isinstance(key, str) else number(str(key))


def run_feedback(
    with_feedback: Callable[..., Any], mine: dict[str, Any], given: Given
) -> dict[str, Tensor]:
    """Run two senders with one `compress` in turn; overwrite their inputs and answers."""
    compress = _once(COMPRESS[mine["compress"]])
    senders = {name: with_feedback(compress) for name in ("first", "second")}
    for send in senders.values():
        if not callable(send):
            kind = type(send).__name__
            raise TypeError(f"with_feedback returns {kind}, expected a function")
    found, kept = {}, []  # `kept` keeps all keys alive, so that no two have the same address
    steps = [name for name in mine if name.startswith("step")]
    for step, number in zip(steps, cycle((int, float)), strict=False):
        for x, given_key in zip(mine[step], mine["keys"], strict=True):
            key = _anew(given_key, number)
            kept.append(key)
            for name, send in senders.items():
                gradient = x.clone() if name == "first" else 4 * x
                before = gradient.clone()
                sent = send(gradient, key)
                if not isinstance(sent, Tensor):
                    raise TypeError(f"send returns {type(sent).__name__}, expected a tensor")
                what = f"{name} sender, {step}, key {given_key!r}"
                found[what], found[f"{what}: change of x"] = sent.clone(), gradient - before
                gradient.fill_(7), sent.fill_(9)
    return found


Keep = Callable[[Tensor, Tensor, Tensor], Tensor]


def _left(x: Tensor, e: Tensor, c: Tensor) -> Tensor:
    return x + e - c


def replayed(
    keep: Keep = _left,
    one_for_all_keys: bool = False,
    weight: float = 1,
) -> Oracle:
    """Return an oracle of senders that add `weight` times the residual that they `keep`.

    With `one_for_all_keys` a sender has only one residual.
    """

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> dict[str, Tensor]:
        own, found = inputs[me], {}
        residuals: dict[Hashable, Tensor] = {}
        for step in [name for name in own if name.startswith("step")]:
            for x, key in zip(own[step], own["keys"], strict=True):
                for sender, g in (("first", x), ("second", 4 * x)):
                    place = f"{sender} sender, {step}, key {key!r}"
                    name = sender if one_for_all_keys else (sender, key)
                    e = residuals.get(name, torch.zeros(()))
                    if e.shape != x.shape:  # the residual of a different key cannot be added
                        e = torch.zeros(x.shape)
                    p = g.float() + weight * e
                    sent = COMPRESS[own["compress"]](p)
                    kept = keep(g.float(), e, sent)
                    residuals[name] = kept
                    found[place], found[f"{place}: change of x"] = sent.to(x.dtype), 0 * x
        return found

    return oracle


equals_feedback = equals(
    replayed(),
    {
        "C(x), without the residual: add what the last call with an equal key left out (equal keys "
        "may be different objects)": replayed(weight=0),
        "the result if all keys share one residual: each key needs its own": replayed(
            one_for_all_keys=True
        ),
        "the result if you keep x - C(x + e): keep x + e - C(x + e)": replayed(
            lambda x, e, c: x - c
        ),
    },
    tolerance=EXACT,
)
"""Judge the values that both senders return in each step for each key, and that x is unchanged."""
