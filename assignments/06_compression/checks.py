"""The checks of this assignment. They are handed out: read them if a message is not enough.

A check has a reference in `course_lib`, a program that calls a function on a rank, and a draw that
makes a case from a seed. `judges.py` reads the bytes on a wire, and `codecs.py` has what the checks
pass to your functions. Nothing is rounded except where a task asks for it, so every answer must be
exact. A program gets only its rank's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from course_lib.checking import (
    Allowed,
    Case,
    Draw,
    Expectation,
    Given,
    Observed,
    Variety,
    by_reference,
)
from course_lib.checking.communication import expect_bytes, operations
from course_lib.checking.defence import defence, drawn_network, one_of
from course_lib.checking.on_ranks.given import expect_function
from course_lib.ranks import Trace
from course_lib.ranks.explain.words import counted

from .codecs import CODECS, COMPRESS, Codec
from .judges import as_wire, reads_codes, reads_top_k, uniform

DTYPES = ("float32", "float64", "bfloat16")
ALONE = Variety(ranks=(1,), dtypes=DTYPES, groups=False)


def draw_shape(d: Draw, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Draw one of these shapes; in some cases, that of a single number or of none."""
    if d.maybe("no numbers", one_in=6):
        return d.one_of((0,), (0, 3))
    if d.maybe("a single number", one_in=6):
        return d.one_of((), (1,))
    shape = d.one_of(*shapes)
    d.say(f"{prod(shape)} numbers")
    return shape


# Task 1: a byte for each number -------------------------------------------------------------------


def run_quantize(quantize: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``quantize(x, u)``; return the wire, which the judge reads, and ``u``."""
    x, u = inputs["x"], uniform(inputs["ticks"])
    # If the function reuses a result of this call, the next result shows it.
    quantize(-3 * x, u.flip(0) if u.dim() else u)
    return {"wire": as_wire(quantize(x, u)), "u": u}


def draw_quantize(d: Draw) -> list[Any]:
    """Draw ``x``, up to 127 times a power of two, and ``ticks`` of 2⁻²⁴, int64.

    x/s + u is 2⁻¹³ away from a multiple of 1/8. float32 can tell on which side, but no smaller
    dtype can. x has 20 significant bits, of which bfloat16 and float16 round some. In a case with
    bfloat16, x has eight.
    """
    shape = draw_shape(d, (3, 5), (11,), (5, 7), (2, 3, 4), (8, 8), (2, 2))
    power = d.maybe("tiny numbers", -d.one_of(30, 100))
    power = power or d.maybe("large numbers", d.one_of(20, 100), one_in=4)
    power = power or d.one_of(-4, -3, 0, 2)
    sign, zeros, n = d.one_of(1, -1), d.maybe("only zeros", one_in=5), prod(shape)
    eighths, largest = d.whole(2033, n).double() - 1016, 4.0 * (200 + int(d.whole(55)))
    if d.form.dtype == "bfloat16":
        steps = torch.exp2((torch.frexp(eighths).exponent - 8.0).clamp(min=0))
        eighths = (eighths / steps).floor() * steps
    else:
        eighths += (1 + d.whole(1023, n)) / 1024
        largest += (1 + int(d.whole(1023))) / 1024
    eighths = eighths.clamp(-largest, largest)
    place = int(d.whole(max(n, 1)))
    eighths[place : place + 1] = largest
    side = d.whole(2, n) * 2 - 1
    between = d.whole(8, n) / 8 + side * 2.0**-13
    ticks = ((between - sign * (not zeros) * 127 * eighths / largest) % 1 * 2**24).long()
    if zeros:
        ticks[place : place + 1] = 0  # 0 + u is a whole number
    elif sign > 0:
        ticks[place : place + 1] = 2**24 - 1  # 127 + u is 128 in float32
    x = eighths * (not zeros) * sign * 2.0**power
    return [{"x": x.view(shape), "ticks": ticks.view(shape)}]


# Task 2: and back again ---------------------------------------------------------------------------


def run_dequantize(dequantize: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``dequantize(wire, shape, dtype)``; return the numbers, of which every bit counts.

    Before, it is called with another wire: if it reuses that result, the next one shows it.
    """
    shape, dtype = torch.Size(inputs["shape"]), getattr(torch, inputs["dtype"])
    wire = inputs["bytes"][inputs["offset"] :]
    scale = 3 * wire[:4].clone().view(torch.float32)
    dequantize(torch.cat([scale.view(torch.uint8), wire[4:].flip(0)]), shape, dtype)
    return {"numbers": dequantize(wire, shape if shape.numel() > 5 else list(shape), dtype)}


def draw_wire(d: Draw) -> list[Any]:
    """Draw a wire that follows `offset` other bytes, because it may begin anywhere in memory.

    The scale has 17 significant bits: float32 can represent its product with a code, and no smaller
    dtype can.
    """
    shape = draw_shape(d, (3, 2), (5,), (4, 3), (2, 2, 2), (3, 7))
    offset = d.maybe("behind other bytes", d.one_of(1, 2, 3, 5, 16), 0, one_in=2)
    power, zeros, n = d.one_of(-16, -20, -28), d.maybe("only zeros", one_in=5), prod(shape)
    if d.form.dtype != "float32":
        d.say(d.form.dtype)
    codes = (d.whole(255, n) - 127) * (not zeros)
    scale = (2**16 + 1 + 2 * d.whole(2**15, 1)) * (not zeros) * 2.0**power
    parts = (torch.zeros(offset, dtype=torch.uint8), scale.float(), codes.to(torch.int8))
    layout = {"offset": offset, "shape": list(shape), "dtype": d.form.dtype}
    return [{"bytes": torch.cat([part.view(torch.uint8) for part in parts]), **layout}]


def read_as(number: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """Return the mistake that makes `number(codes, scale)` of bytes."""

    def mistake(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
        wire, right = inputs[0]["bytes"][inputs[0]["offset"] :], expected[0]["numbers"]
        numbers = number(wire[4:], wire[:4].clone().view(torch.float32))
        return {"numbers": numbers.view(right.shape).to(right.dtype)}

    return mistake


# Task 3: the largest, and where they are ----------------------------------------------------------


def run_top_k(encode_top_k: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``encode_top_k(x, k)`` twice; return the second wire, which the judge reads."""
    encode_top_k(inputs["x"].flatten().flip(0).view(inputs["x"].shape), inputs["k"])
    return {"wire": as_wire(encode_top_k(inputs["x"], inputs["k"]))}


def draw_top_k(d: Draw) -> list[Any]:
    """Draw ``x`` with absolute values that all differ; one is 0."""
    k = d.one_of(1, 2, 3, 5)
    limit = 32 * k  # n from limit - 7 to limit: a bitmap has as many bytes as a list
    shape = d.one_of((20, 30), (100,), (7, 11), (4, 6), *(limit - n for n in range(-2, 9)))
    shape = (shape,) if isinstance(shape, int) else shape
    shape = d.maybe("a single number", (), shape, one_in=8)
    shape = d.maybe("no numbers", (0,), shape, one_in=8)
    n = prod(shape)
    k = min(k, n)
    if d.maybe("none is kept", one_in=8):
        k = 0
    elif d.maybe("many are kept", one_in=4):
        k = d.one_of(n // 4, n)
    size = d.maybe("tiny numbers", 2.0**-80, one_in=6)
    size = size or d.maybe("large numbers", d.one_of(2.0**8, 2.0**70), one_in=4) or 1.0
    infinite = d.maybe("one number is infinite", one_in=6)
    d.say(f"{k} of {n}")
    order = d.whole(2**53, n).argsort()
    # bfloat16 represents 8 significant bits exactly. With more, hardly two numbers would differ.
    if d.form.dtype == "bfloat16":
        sizes = (128 + order % 128) / 256 * 2.0 ** (order // 128)
    else:
        sizes = (1 + order * 2.0**-20) * 2.0 ** (order % 3)
    sizes = torch.where(order == 0, 0, sizes * size)
    if infinite:
        sizes = torch.where(order == n - 1, torch.inf, sizes)
    signs = d.whole(2, n) * 2 - 1
    return [{"x": (sizes * signs).double().view(shape), "k": k}]


# Task 4: error feedback, two senders with a memory for each key -----------------------------------

SHAPES = (4, 3), (4, 3), (2, 4, 2), (11,)
"""Shapes of the keys, in a cycle. Two are equal. Smaller tensors might repeat by chance."""
MANY_KEYS = (
    *(-1, -2),
    *(key for n in range(1000, 1034) for key in (n, n + 2**20, str(n), ("layer", n))),
)
"""The first two have the same hash; later, two of four have the same shape and last 20 bits."""


def once(compress: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `compress`, changed to refuse a repeated tensor."""
    known_numbers: set[bytes] = set()

    def compress_once(p: Tensor) -> Tensor:
        if p.dtype != torch.float32:
            raise TypeError(f"compress takes a float32 tensor, not {p.dtype}")
        numbers = p.detach().double().cpu().contiguous().numpy().tobytes()
        if numbers in known_numbers:
            raise RuntimeError(
                "compress is called twice for the same tensor. Call it once: it may round at "
                "random, and then the second result is not the one that you returned"
            )
        known_numbers.add(numbers)
        return compress(p)

    compress_once.__qualname__ = compress.__qualname__  # says which function it is
    return compress_once


def run_feedback(with_feedback: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Run two senders in turn; overwrite their inputs and answers."""
    compress = {name: once(COMPRESS[name]) for name in inputs["compress"].values()}
    senders = {
        key: expect_function(with_feedback(compress[name]), "what with_feedback returns")
        for key, name in inputs["compress"].items()
    }
    values, keys = {}, []  # all keys stay alive, so that no two have the same address
    for place, sender, key, x in turns(inputs):
        keys.append(key)
        sent = senders[sender](x, key)
        if not isinstance(sent, Tensor):
            raise TypeError(f"send returns {type(sent).__name__}, expected a tensor")
        values[place], values[f"{place}: x after the call"] = sent.clone(), x.clone()
        x.fill_(7), sent.fill_(9)
    return values


def turns(inputs: Any) -> Iterator[tuple[str, str, Any, Tensor]]:
    """Yield each call of a sender: its name, the sender, the key and x."""
    for i, step in enumerate(inputs["steps"]):
        for name, key, x in zip(inputs["names"], step["keys"], step["tensors"], strict=True):
            new = equal_key(key, float if i % 2 else int)
            for sender, size in (("first", 1), ("second", 4)):
                yield f"{sender} sender, step {i}, key {name}", sender, new, size * x


def equal_key(key: Any, number: type) -> Any:
    """Return an equal key that is a new object, because a caller may make its keys in each call."""
    if isinstance(key, tuple):
        return tuple([equal_key(part, number) for part in key])
    return "".join(list(key)) if isinstance(key, str) else number(str(key))


def draw_turns(d: Draw) -> list[Any]:
    """Draw a tensor for each step and key; every second step is small compared with the residual.

    The keys have the shapes of `SHAPES`. The numbers have 13 significant bits, more than bfloat16
    and float16 can represent. In a case with bfloat16, they have five.
    """
    key_sets = (("weight",), ("weight", "bias"), (0, "0"), ("a", "b", "c", "d"))
    keys = d.one_of(*key_sets, (("a", 1000), ("a", 1001), "c"))
    first = d.one_of(*COMPRESS, "rounded")
    other_names = [name for name in COMPRESS if name != first]
    second = d.maybe("two compressions", d.one_of(*other_names), first)
    overflow = first == second == "rounded" and d.maybe("an inf or a NaN in step 1", one_in=2)
    large = d.maybe("large numbers", 2.0**7, 1.0)
    keys = d.maybe("many keys", MANY_KEYS, keys, one_in=5)
    steps = 3 if keys is MANY_KEYS else d.one_of(4, 5, 7)
    d.say(f"{counted(len(keys), 'key')}, {counted(steps, 'step')}, {first}")
    limit = 8 if d.form.dtype == "bfloat16" else 2**11

    def tensor(i: int, n: int) -> Tensor:
        unit = 2.0 ** (-9 if i % 2 else -1) * 8 / limit * large
        odd = (d.whole(2 * limit, *SHAPES[n % len(SHAPES)]) - limit) * 2 + 1
        x = odd.double() * unit
        return d.not_finite(x) if overflow and (i, n) == (1, 0) else x

    return [
        {
            "compress": {"first": first, "second": second},
            "names": [repr(key) for key in keys],
            "steps": [
                {"keys": list(keys), "tensors": [tensor(i, n) for n in range(len(keys))]}
                for i in range(steps)
            ],
        }
        for _ in d.ranks
    ]


def feedback(residual: Callable[..., Tensor], one_for_all: bool = False) -> Callable[..., Any]:
    """Return the mistake that keeps ``residual(x, e, sent)`` for a key, or one for all keys."""

    def mistake(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
        values, left = {}, {}
        for place, sender, key, x in turns(inputs[me]):
            label = (sender, x.shape) if one_for_all else (sender, key)
            e = left.get(label, torch.zeros_like(x, dtype=torch.float32))
            sent = COMPRESS[inputs[me]["compress"][sender]](x.float() + e)
            values[place], left[label] = sent.to(x.dtype), residual(x.float(), e, sent)
        return values

    return mistake


FEEDBACK_MISTAKES = {
    "C(x), without the residual: add what the last call with an equal key left out (equal keys may "
    "be different objects)": feedback(lambda x, e, sent: torch.zeros_like(x)),
    "a residual of x - C(x + e): keep x + e - C(x + e)": feedback(lambda x, e, sent: x - sent),
    "the result if all keys share one residual: each key needs its own": feedback(
        lambda x, e, sent: x + e - sent, one_for_all=True
    ),
}


# Task 5: the sum of compressed tensors ------------------------------------------------------------

KINDS = (
    *("all_to_all", "all_gather", "gather", "scatter", "broadcast", "send", "recv"),
    *("reduce", "all_reduce", "reduce_scatter", "barrier"),
)
TWO_ROUNDS = (
    "Send each rank one compressed shard, and later the compressed sum of your own shard. Then the "
    "bytes do not grow with K."
)


FEW = 3


def handed_out(name: str) -> Codec:
    """Return a codec for a student's function that rounds a repeated vector in a different way.

    A codec that rounds at random does this too, and then not all ranks have the same sum. Two
    shards of few numbers may be equal by chance, so they are rounded in the same way.
    """
    encode, decode = CODECS[name]
    known_numbers: set[bytes] = set()

    def encode_once(x: Tensor) -> Tensor:
        if x.dim() != 1 or x.dtype != torch.float32:
            shape = list(x.shape)
            raise TypeError(f"encode takes a float32 vector, not {x.dtype} of shape {shape}")
        numbers = x.detach().cpu().numpy().tobytes()
        again = x.numel() > FEW and numbers in known_numbers
        known_numbers.add(numbers)
        return encode(x.detach(), torch.floor if again else torch.round)

    encode_once.__qualname__ = encode.__qualname__  # says which codec it is
    return encode_once, decode


def run_in_place(function: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call it for one tensor, or two; return what is then in their memory."""
    codec = handed_out(inputs["codec"]) if "codec" in inputs else ()
    memory = {name: x.detach() for name, x in inputs["tensors"].items()}
    for x in inputs["tensors"].values():
        function(x, *codec, group=case.group)
    return memory


def draw_sums(d: Draw) -> list[Any]:
    """Draw a tensor for every rank, and one more in a case with two calls."""
    shapes = (4, 3), (3,), (7,), (5, 6), (5, 19), (4, 25), (64,), (7, 29)
    shape = draw_shape(d, *shapes)
    codec, zeros = d.one_of(*CODECS), d.rank("only zeros on rank {}")
    d.say(codec)
    again = d.maybe("called twice", d.one_of(shape, shape, *shapes), None)

    def tensors_of(rank: int) -> dict[str, Tensor]:
        first = {"tensor": d.exact(*shape) * (rank != zeros)}
        return first if again is None else first | {"tensor of the second call": d.exact(*again)}

    return [
        {"tensors": tensors_of(rank), "codec": codec, "members": d.members(rank)}
        for rank in d.ranks
    ]


def compressed_sum(*, shards: bool, sums: bool) -> Callable[..., Any]:
    """Return the mistake that compresses only the shards, or only their sums."""

    def mistake(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
        encode, decode = CODECS[inputs[me]["codec"]]

        def sent(x: Tensor, compressed: bool) -> Tensor:
            return decode(encode(x), x.shape, torch.float32) if compressed else x

        values = {}
        for name, x in inputs[me]["tensors"].items():
            flat = [member["tensors"][name].float().flatten() for member in inputs]
            parts = zip(*(vector.tensor_split(len(flat)) for vector in flat), strict=True)
            totals = [torch.stack([sent(part, shards) for part in row]).sum(0) for row in parts]
            total = torch.cat([sent(total, sums) for total in totals])
            values[name] = total.view(x.shape).to(x.dtype)
        return values

    return mistake


UNCHANGED = {
    "the tensor as it was before the call: write the result into it": (
        lambda inputs, me, expected: inputs[me]["tensors"]
    )
}
SUM_MISTAKES = {
    "Σ C(x): compress the sums, too": compressed_sum(shards=True, sums=False),
    "C(Σ x): compress the shards, too": compressed_sum(shards=False, sums=True),
    **UNCHANGED,
}


def two_rounds(wire: Callable[[Any, Tensor], int], hint: str) -> Callable[..., None]:
    """Expect a rank to send, and to receive, at most two wires of a longest shard per member.

    ``wire(its input, a longest shard)`` is the number of bytes of such a wire.
    """

    def expect(case: Case, observed: Observed, trace: Trace) -> None:
        for rank, member in enumerate(shown["own"] for shown in observed.inputs):
            k = len(member["members"])
            longest = [torch.zeros(-(-x.numel() // k)) for x in member["tensors"].values()]
            limit = sum(2 * k * wire(member, shard) for shard in longest)
            for verb in ("sends", "receives"):
                expect_bytes(rank, operations(trace, rank), limit, hint, verb)

    return expect


def encoded(member: Any, shard: Tensor) -> int:
    encode, _ = CODECS[member["codec"]]
    return encode(shard).numel()


# Task 6: a mean that is rounded once --------------------------------------------------------------

BF16_TRAVELS = (
    "Send each rank its shard in bfloat16, and later the mean of your own shard in bfloat16: two "
    "bytes for each number, as in a ring."
)


def draw_means(d: Draw) -> list[Any]:
    """Draw whole numbers of eight bits, times 2⁰ to 2⁸: float32 holds their sums, bfloat16 cannot.

    Only the sum of two numbers has one rounding in any order, and so a ring is right for K = 2.
    """
    shape = draw_shape(d, (4, 3), (3,), (7,), (5, 6), (5, 19), (64,), (7, 29))
    zeros, overflow = d.rank("only zeros on rank {}"), d.rank("rank {} has an inf or a NaN", 4)
    again = d.maybe("called twice", d.one_of(shape, (5, 6)), None)

    def numbers(rank: int, shape: tuple[int, ...]) -> Tensor:
        x = (d.whole(511, *shape) - 255) * 2.0 ** d.whole(9, *shape) * (rank != zeros)
        return d.not_finite(x) if rank == overflow else x

    def tensors_of(rank: int) -> dict[str, Tensor]:
        first = {"tensor": numbers(rank, shape)}
        second = "tensor of the second call"
        return first if again is None else first | {second: numbers(rank, again)}

    return [{"tensors": tensors_of(rank), "members": d.members(rank)} for rank in d.ranks]


def rounded(total: Callable[[Sequence[Tensor]], Tensor]) -> Callable[..., Any]:
    """Return the mistake that rounds ``total(tensors of all ranks)`` by K to bfloat16."""

    def mistake(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
        return {
            name: (total([m["tensors"][name] for m in inputs]).float() / len(inputs)).bfloat16()
            for name in expected[me]
        }

    return mistake


def in_a_ring(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum in bfloat16 of a ring: shard i begins at rank i + 1, and ends at rank i."""
    shards = zip(*(x.flatten().tensor_split(len(tensors)) for x in tensors), strict=True)
    totals = [sum(row[i + 1 :] + row[: i + 1]) for i, row in enumerate(shards)]
    return torch.cat(totals).view(tensors[0].shape)


def in_float32(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([x.float() for x in tensors]).sum(0)


MEAN_MISTAKES = {
    "the mean of a sum in bfloat16, which is rounded at every rank: add in float32": rounded(sum),
    "the mean of a ring's sum in bfloat16, rounded at every rank: add in float32": rounded(
        in_a_ring
    ),
    "the mean of a float32 sum that was rounded to bfloat16: divide before you round": rounded(
        lambda tensors: in_float32(tensors).bfloat16()
    ),
    "the sum of numbers that were divided by K in bfloat16: divide the sum": rounded(
        lambda tensors: len(tensors) * in_float32([x / len(tensors) for x in tensors])
    ),
    "the sum: divide it by K": rounded(lambda tensors: len(tensors) * in_float32(tensors)),
    **UNCHANGED,
}


# The checks ---------------------------------------------------------------------------------------


def drawn_codec(generator: torch.Generator) -> tuple[Case, list[Any]]:
    """Draw a case of task 5 for one student: ranks, numbers, a codec and a network."""
    k, n = one_of(generator, 2, 3, 4), one_of(generator, *range(301, 2000))
    codec = one_of(generator, "8 bits", "1 bit")
    network, sentence = drawn_network(generator)
    name = (
        f"{k} ranks, {n} numbers of 4 bytes on each, {codec} per number. The function is called "
        f"twice.\n{sentence}; an all_to_all sends its pieces one after the other, an all_gather is "
        "a ring."
    )
    names = ("tensor", "tensor of the second call")
    inputs = [
        {
            "tensors": {name: torch.randn(n, generator=generator) for name in names},
            "codec": codec,
            "members": tuple(range(k)),
        }
        for _ in range(k)
    ]
    return Case(name, k, network=network), inputs


CHECKS = {
    "quantize": by_reference(
        "quantize",
        seeds=(2, 5, 20, 24, 28, 29, 30, 42, 45, 49, 54),
        reference="course_lib.compression.uniform_8bit:quantize",
        program=run_quantize,
        draw=draw_quantize,
        variety=ALONE,
        judge=reads_codes,
    ),
    "dequantize": by_reference(
        "dequantize",
        seeds=(3, 11, 18, 24, 29, 31, 34),
        reference="course_lib.compression.uniform_8bit:dequantize",
        program=run_dequantize,
        draw=draw_wire,
        variety=Variety(ranks=(1,), dtypes=DTYPES, layouts=(), groups=False),
        mistakes={
            "the numbers if the codes are read as 0 to 255: read them as int8, -127 to 127": (
                read_as(lambda codes, scale: codes * scale)
            ),
            "the codes without the scale: multiply each code by s": (
                read_as(lambda codes, scale: codes.view(torch.int8))
            ),
        },
        exact=True,
    ),
    "encode_top_k": by_reference(
        "encode_top_k",
        seeds=(2, 4, 6, 13, 29, 33, 40, 41, 43, 46, 51),
        reference="course_lib.compression.top_k:encode_top_k",
        program=run_top_k,
        draw=draw_top_k,
        variety=ALONE,
        judge=reads_top_k,
    ),
    "with_feedback": by_reference(
        "with_feedback",
        seeds=(1, 4, 5, 7, 9, 11, 12, 13, 20),
        reference="course_lib.compression.error_feedback:with_feedback",
        program=run_feedback,
        draw=draw_turns,
        variety=Variety(ranks=(1, 1, 2, 3), dtypes=(*DTYPES, "bfloat16"), groups=False),
        mistakes=FEEDBACK_MISTAKES,
        exact=True,
    ),
    "compressed_all_reduce": by_reference(
        "compressed_all_reduce",
        seeds=(2, 3, 8, 10, 11, 12, 24, 26, 29, 31, 33),
        reference="course_lib.compression.all_reduce:sum_by_codec",
        program=run_in_place,
        draw=draw_sums,
        variety=Variety(ranks=(2, 3, 4, 3, 5, 1, 6, 7), dtypes=DTYPES),
        mistakes=SUM_MISTAKES,
        may_change=["tensors"],
        exact=True,
        allowed=Allowed(kinds=KINDS, calls=None, slack=None),
        expects=[Expectation(two_rounds(encoded, TWO_ROUNDS))],
        worth={"values": 3, "communication": 1},
    ),
    "mean_rounded_once": by_reference(
        "mean_rounded_once",
        seeds=(10, 13, 17, 18, 20, 30, 44, 53),
        reference="course_lib.collectives:mean_rounded_once",
        program=run_in_place,
        draw=draw_means,
        variety=Variety(ranks=(3, 4, 2, 3, 5, 1, 6, 7), dtypes=("bfloat16",)),
        mistakes=MEAN_MISTAKES,
        may_change=["tensors"],
        exact=True,
        allowed=Allowed(kinds=KINDS, calls=None, slack=None),
        expects=[Expectation(two_rounds(lambda member, shard: 2 * len(shard), BF16_TRAVELS))],
        worth={"values": 2, "communication": 1},
    ),
    "defend_compressed_all_reduce": defence("compressed_all_reduce", drawn_codec),
}
