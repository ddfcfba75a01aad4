"""The checks of this assignment. They are handed out: read them if a message is not enough.

`judges.py` reads the bytes on a wire, and has the codecs that two of the checks pass to your
function. Nothing is rounded except where a task asks for it, so every answer must be exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checking import (
    Case,
    Wrong,
    calls_at_most,
    equals,
    expect_equal,
    expect_tensor,
    in_many_forms,
    only_calls,
    receives_at_most,
    same_on_all_ranks,
    sends_at_most,
    task,
)
from course_lib.checking.answers import ANYTHING, sees
from course_lib.checking.defence import defence, drawn_network, one_of
from course_lib.checking.judges import TOLERANCE
from course_lib.checking.shared.chance import ENOUGH, equally_likely
from course_lib.checking.shared.sums import (
    EXACT,
    called,
    calls_of,
    exact_numbers,
    in_place,
    numel,
    tensor_inputs,
)
from course_lib.ranks.explain.words import counted

from .judges import (
    CODECS,
    decode_bytes,
    distinct_inputs,
    encode_bytes,
    equals_compressed_sum,
    equals_feedback,
    handed_out,
    in_turn,
    quantized_inputs,
    reads_codes,
    reads_top_k,
    run_feedback,
    uniform,
)

# --- tasks 1 and 2: a byte for each number, and back ----------------------------------------------


def run_quantize(quantize, mine, given):
    u = uniform(mine["ticks"])
    quantize(
        -3 * mine["x"], u.flip(0) if u.dim() else u
    )  # if the function reuses a result of this call, the next result shows it
    return {"wire": quantize(mine["x"], u), "u": u}


def received(case, generator):
    """Draw bytes that follow `offset` other bytes, because a wire may begin anywhere in memory."""
    before = torch.zeros(case.parameters["offset"], dtype=torch.uint8)
    wires = [encode_bytes(x["tensor"].float().flatten()) for x in tensor_inputs(case, generator)]
    known = {"shape": list(case.parameters["shape"]), "dtype": case.form.dtype}
    return [{"bytes": torch.cat([before, wire]), **known} for wire in wires]


def run_dequantize(dequantize, mine, given):
    shape, dtype = torch.Size(mine["shape"]), getattr(torch, mine["dtype"])
    wire = mine["bytes"][-4 - shape.numel() :]
    scale = 3 * wire[:4].clone().view(torch.float32)
    dequantize(torch.cat([scale.view(torch.uint8), wire[4:].flip(0)]), shape, dtype)
    return {"numbers": dequantize(wire, shape if shape.numel() > 5 else list(shape), dtype)}


def from_wire(decode):
    def oracle(case, inputs, me):
        wire = inputs[me]["bytes"][case.parameters["offset"] :]
        numbers = decode(wire, case.parameters["shape"], torch.float32)
        return {"numbers": numbers.to(getattr(torch, case.form.dtype))}

    return oracle


def as_unsigned(wire, shape, dtype):
    return (wire[4:] * wire[:4].clone().view(torch.float32)).view(shape)


def without_scale(wire, shape, dtype):
    return wire[4:].view(torch.int8).to(dtype).view(shape)


# --- task 3: the largest --------------------------------------------------------------------------


def run_top_k(encode_top_k, mine, given):
    encode_top_k(mine["x"].flatten().flip(0).view(mine["x"].shape), mine["k"])
    return {"wire": encode_top_k(mine["x"], mine["k"])}


def with_k(case, generator):
    return [{**own, "k": case.parameters["k"]} for own in distinct_inputs(case, generator)]


# --- tasks 4 and 5: sums --------------------------------------------------------------------------


def with_codec(case, generator):
    made = [{**own, "codec": case.parameters["codec"]} for own in tensor_inputs(case, generator)]
    for rank in case.parameters.get("zeros", ()):
        made[rank]["tensor"].zero_()
    return made


def run_all_reduce(compressed_all_reduce, mine, given):
    encode, decode = handed_out(mine["codec"])
    call = in_place(lambda x: compressed_all_reduce(x, encode, decode, group=given.group))
    return called("tensor", mine, call)


def two_rounds(case, rank):
    """Return the bytes of each call: twice the wire of a longest shard for each member."""
    k = len(case.members(rank))
    encode, _ = CODECS[case.parameters["codec"]]
    return calls_of(case) * 2 * k * encode(torch.zeros(-(-numel(case) // k))).numel()


def run_random_k(random_k_mean, mine, given):
    x, k, seeds = mine["x"], mine["k"], mine["seeds"]
    random_k_mean(torch.cat([x, x]) if x.dim() else x, k, seeds[0], group=given.group)
    return {"results": [random_k_mean(x, k, seed, group=given.group) for seed in seeds]}


def one_each(case, rank):
    return 1 + len(case.parameters["seeds"])


def k_numbers(case, rank):
    return one_each(case, rank) * case.parameters["k"] * case.itemsize


# Places drawn at random ---------------------------------------------------------------------------

# The places are the same on all ranks, and different for a different seed. All sets of k places are
# equally likely.

LIKELY = 10**9
"""If there are this many possible draws, no two are equal by chance."""


def inputs_above_zero(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw ``x`` above zero, so that no sum is zero; add the case's ``k`` and ``seeds``.

    The sums are exact in the case's dtype, but in no smaller dtype. The ranks ``zeros`` have zeros,
    and the first number of the ranks ``infinite`` is infinite.
    """
    shape, world_size = tuple(case.parameters["shape"]), case.world_size
    drawn = [exact_numbers(case, generator, shape) for _ in range(world_size)]
    drawn = [torch.where(x == 0, 1, x).abs() for x in drawn]
    for rank in case.parameters.get("zeros", ()):
        drawn[rank].zero_()
    for rank in case.parameters.get("infinite", ()):
        drawn[rank].view(-1)[0] = torch.inf
    known = {"k": case.parameters["k"], "seeds": list(case.parameters["seeds"])}
    return [{"x": x, **known} for x in drawn]


def _one_for_each_seed(case: Case, inputs: Sequence[Any], rank: int) -> Any:
    return {"results": [ANYTHING] * len(case.parameters["seeds"])}


@sees(_one_for_each_seed)
def draws_places(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge the places where ``results``, one for each seed, are not zero.

    `has_values` then judges the values.
    """
    k, seeds, n = case.parameters["k"], case.parameters["seeds"], numel(case)
    for members in case.groups:
        first = _places(values[members[0]], inputs[members[0]], members[0])
        for rank in members:
            found = _places(values[rank], inputs[rank], rank)
            for seed, count in zip(seeds, found.sum(1).tolist(), strict=True):
                if count != k:
                    raise Wrong(
                        f"rank {rank}: the result for seed {seed} has {counted(count, 'number')} "
                        f"that {'is' if count == 1 else 'are'} not zero, expected k = {k}",
                        _HINTS.get((count > k), ""),
                    )
            if not torch.equal(found, first):
                raise Wrong(
                    f"rank {rank} draws other places than rank {members[0]}",
                    "All ranks must draw from the same seed, so that they add the values of the "
                    "same places.",
                )
        for seed, places in zip(seeds, first, strict=True):
            if not torch.equal(places, first[seeds.index(seed)]):
                raise Wrong(f"seed {seed} draws other places in the second call than in the first")
        if math.comb(n, k) > LIKELY:
            _drawn_anew(seeds, first)
        if len(seeds) >= ENOUGH * math.comb(n, k) > ENOUGH:
            _equally_likely(first, k)


_HINTS = {
    True: "Keep only the k places that were drawn.",
    False: "Draw k different places: draw without replacement.",
}


def _drawn_anew(seeds: Sequence[int], places: Tensor) -> None:
    for i, seed in enumerate(seeds):
        for j in range(i):
            if seeds[j] != seed and torch.equal(places[i], places[j]):
                raise Wrong(
                    f"seeds {seeds[j]} and {seed} draw the same places",
                    "A different seed must give a different draw: use the whole seed, unchanged.",
                )


def _equally_likely(places: Tensor, k: int) -> None:
    """Judge whether each set of k places is drawn equally often."""
    draws, n = places.shape
    kinds, counts = places.unique(dim=0, return_counts=True)
    if equally_likely(counts.tolist(), math.comb(n, k)):
        return
    most = int(counts.argmax())
    raise Wrong(
        f"the set of places {kinds[most].nonzero().flatten().tolist()} is drawn for "
        f"{counts[most] / draws:.0%} of {draws} seeds, expected {1 / math.comb(n, k):.0%}",
        "All sets of k places must be equally likely: only then is the result right on average. "
        "Take the first k numbers of torch.randperm, or use random.sample.",
    )


def _places(value: Any, own: Any, rank: int) -> Tensor:
    what = f"rank {rank}: the result"
    return torch.stack([expect_tensor(x, own["x"], what).flatten() != 0 for x in value["results"]])


@sees(_one_for_each_seed)
def has_values(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge that every drawn place has n/k times the mean over the group."""
    k, n = case.parameters["k"], numel(case)
    rtol = TOLERANCE[case.form.dtype]
    for members in case.groups:
        theirs = [inputs[rank]["x"].double() for rank in members]
        total, size = torch.stack(theirs).sum(0), len(members)
        mean = total / size
        for rank in members:
            x = inputs[rank]["x"]
            known = {
                "the mean over the ranks: multiply it by n/k, so that it is right on average": mean,
                "n/k times the sum over the ranks: the task asks for the mean": total * n / k,
                "the sum over the ranks: divide it by K, and multiply it by n/k": total,
            }
            for seed, got in zip(case.parameters["seeds"], values[rank]["results"], strict=True):
                drawn = got != 0
                right = torch.where(drawn, mean * n / k, 0).to(x.dtype)
                lookalikes = [
                    (name, torch.where(drawn, each, 0).to(x.dtype)) for name, each in known.items()
                ]
                what = f"rank {rank}: the result for seed {seed}"
                expect_equal(got, right, what, rtol=rtol, atol=rtol / 10, lookalikes=lookalikes)


K_VALUES = "In each call of your function, call all_reduce once, with k numbers in the dtype of x."
TWO_ROUNDS = (
    "Send each rank one compressed shard, and later the compressed sum of your own shard. Then the "
    "bytes do not grow with K."
)


MANY_KEYS = [-1, -2] + [
    key for n in range(1000, 1066) for key in (n, n + 2**20, str(n), ("layer", n))
]
"""The first two have the same hash; later, two of four have the same shape and last 20 bits."""


def turns(steps, compress, *keys):
    return {"steps": steps, "compress": compress, "keys": keys}


def drawn(k, shape, *seeds):
    return {"shape": shape, "k": k, "seeds": seeds}


def drawn_codec(generator: torch.Generator) -> Case:
    """Draw a case of task 5 for one student: ranks, numbers, a codec and a network."""
    k, n = one_of(generator, 2, 3, 4), one_of(generator, *range(301, 2000))
    codec = one_of(generator, "8 bits", "1 bit")
    network, words = drawn_network(generator)
    name = (
        f"{k} ranks, {n} numbers of 4 bytes on each, {codec} per number. The function is called "
        f"twice.\n{words}; an all_to_all sends its pieces one after the other, an all_gather is a "
        "ring."
    )
    return Case(name, k, {"shape": (n,), "codec": codec, "calls": 2}, network=network)


CHECKS = {
    "quantize": task(
        "quantize",
        inputs=quantized_inputs,
        program=run_quantize,
        judges=[reads_codes],
        cases=in_many_forms(
            Case("15 numbers", 1, {"shape": (3, 5), "exponent": 0, "sign": 1}),
            Case("11 numbers, tiny ones", 1, {"shape": (11,), "exponent": -100, "sign": -1}),
            Case("35 numbers", 1, {"shape": (5, 7), "exponent": 3, "sign": -1}),
            Case("24 numbers", 1, {"shape": (2, 3, 4), "exponent": -1, "sign": 1}),
            Case("one number", 1, {"shape": (), "exponent": 2, "sign": -1}),
            Case("zeros only", 1, {"shape": (2, 2), "exponent": 0, "sign": 0}),
            Case("no numbers", 1, {"shape": (0,), "exponent": 0, "sign": 1}),
            Case("the example", 1, {"x": (127.0, 0.25, -0.25, 3.0), "u": (0.0, 0.8, 0.8, 0.1)}),
        ),
        in_turn=[(2, 2)],
    ),
    "dequantize": task(
        "dequantize",
        inputs=received,
        program=run_dequantize,
        judges=[
            equals(
                from_wire(decode_bytes),
                {
                    "the numbers if the codes are read as 0 to 255: read them as int8, -127 to "
                    "127": from_wire(as_unsigned),
                    "the codes without the scale: multiply each code by s": from_wire(
                        without_scale
                    ),
                },
                tolerance=EXACT,
            )
        ],
        cases=in_many_forms(
            Case("6 numbers", 1, {"shape": (3, 2), "offset": 0}),
            Case("5 numbers, behind 3 bytes", 1, {"shape": (5,), "offset": 3}),
            Case("12 numbers, behind 16 bytes", 1, {"shape": (4, 3), "offset": 16}),
            Case("one number, behind 1 byte", 1, {"shape": (), "offset": 1}),
            Case("no numbers", 1, {"shape": (0, 2), "offset": 0}),
        ),
        in_turn=[(0, 0)],
    ),
    "encode_top_k": task(
        "encode_top_k",
        inputs=with_k,
        program=run_top_k,
        judges=[reads_top_k],
        cases=in_many_forms(
            Case("3 of 600", 1, {"shape": (20, 30), "k": 3}),
            Case("20 of 100", 1, {"shape": (100,), "k": 20, "exponent": 8}),
            Case("21 of 77", 1, {"shape": (7, 11), "k": 21}),
            Case("2 of 64", 1, {"shape": (8, 8), "k": 2}),
            Case("3 of 65", 1, {"shape": (5, 13), "k": 3}),
            Case("all of 9", 1, {"shape": (3, 3), "k": 9}),
            Case("2 of 61", 1, {"shape": (61,), "k": 2}),
            Case("1 of 24", 1, {"shape": (4, 6), "k": 1, "infinite": True}),
            Case("one of one", 1, {"shape": (), "k": 1}),
            Case("none of none", 1, {"shape": (0,), "k": 0}),
            Case("none of six", 1, {"shape": (2, 3), "k": 0}),
        ),
        in_turn=[(1, 1)],
    ),
    "with_feedback": task(
        "with_feedback",
        inputs=in_turn,
        program=run_feedback,
        judges=[equals_feedback],
        cases=in_many_forms(
            Case("one key", 1, turns(4, "rounded", "weight")),
            Case("two keys", 1, turns(6, "only_largest", "weight", "bias") | {"exponent": 6}),
            Case("two keys, signs", 1, turns(5, "signs", 0, "0")),
            Case("2 ranks, three keys", 2, turns(3, "rounded", ("a", 1000), ("a", 1001), "c")),
            Case("four keys, rounded", 1, turns(4, "rounded", "a", "b", "c", "d")),
            Case("two keys, rounded", 1, turns(6, "rounded", "weight", "bias")),
            Case("many keys", 1, turns(3, "signs", *MANY_KEYS)),
        ),
    ),
    "compressed_all_reduce": task(
        "compressed_all_reduce",
        inputs=with_codec,
        program=run_all_reduce,
        may_change=["tensor", "again"],
        judges=[
            equals_compressed_sum,
            same_on_all_ranks,
        ],
        expects=[
            sends_at_most(two_rounds, hint=TWO_ROUNDS),
            receives_at_most(two_rounds, hint=TWO_ROUNDS),
        ],
        worth={"values": 3, "communication": 1},
        cases=in_many_forms(
            Case("1 rank", 1, {"shape": (3, 2), "codec": "1 bit"}),
            Case("2 ranks, 12 numbers", 2, {"shape": (4, 3), "codec": "8 bits", "calls": 2}),
            Case("3 ranks, 95 numbers", 3, {"shape": (5, 19), "codec": "1 bit"}),
            Case("4 ranks in two groups, 30 numbers", 4, {"shape": (5, 6), "codec": "8 bits"}),
            Case("4 ranks, 203 numbers", 4, {"shape": (7, 29), "codec": "8 bits", "zeros": [2]}),
            Case("5 ranks in two groups, 7 numbers", 5, {"shape": (7,), "codec": "1 bit"}),
            Case("5 ranks, 3 numbers", 5, {"shape": (3,), "codec": "8 bits"}),
            Case("3 ranks, one number", 3, {"shape": (), "codec": "8 bits"}),
            Case("2 ranks, no numbers", 2, {"shape": (0, 4), "codec": "1 bit"}),
        ),
        in_turn=[(6, 5)],
    ),
    "random_k_mean": task(
        "random_k_mean",
        inputs=inputs_above_zero,
        program=run_random_k,
        judges=[draws_places, has_values],
        expects=[
            only_calls("all_reduce"),
            calls_at_most(K_VALUES, all_reduce=one_each),
            sends_at_most(k_numbers, hint=K_VALUES),
        ],
        worth={"values": 2, "communication": 1},
        cases=in_many_forms(
            Case("1 rank, 4 of 6", 1, drawn(4, (3, 2), 1, 2, 1)),
            Case("2 ranks, 5 of 20", 2, drawn(5, (4, 5), 7, 8, 7, 9)),
            Case("4 ranks, all of 7", 4, drawn(7, (7,), 3) | {"infinite": [2]}),
            Case("4 ranks in two groups, 3 of 12", 4, drawn(3, (3, 4), 2**32 - 1, 0)),
            Case("1 rank, 2 of 4, 2000 seeds", 1, drawn(2, (4,), *range(2000))),
            Case("5 ranks in two groups, 1 of 9", 5, drawn(1, (3, 3), 11, 12)),
            Case("4 ranks, 4 of 10", 4, drawn(4, (2, 5), 21, 22) | {"zeros": [1]}),
            Case(
                "2 ranks, 20 of 50",
                2,
                drawn(20, (5, 10), 0, 1, 1000, 2**16, 2**31, 2**32 - 2, 2**32 - 1),
            ),
        ),
        in_turn=[(2, 3)],
    ),
    "defend_compressed_all_reduce": defence("compressed_all_reduce", drawn_codec),
}
