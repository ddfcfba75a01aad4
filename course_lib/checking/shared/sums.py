"""Sums of tensors over ranks: exact numbers, and judges that know the results of mistakes.

All numbers are chosen so that no sum of them is rounded, in any order of the additions. So every
answer must be exact, in every dtype. An answer that went through a different dtype is not exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from course_lib.checking.answers import Judge
from course_lib.checking.cases import Case
from course_lib.checking.judges import Oracle, equals
from course_lib.ranks.explain.words import names_inside

EXACT = dict.fromkeys(("float32", "float64", "bfloat16", "int64"), 0.0)
"""dtype → allowed relative error."""

_FEW = 6
_Of = Callable[[Sequence[Any], int], Tensor]
"""A function from the inputs of a group and the number of a member to the member's tensor."""


def exact_numbers(case: Case, generator: torch.Generator, shape: Sequence[int]) -> Tensor:
    """Draw multiples of a power of two; the dtype holds them and their sums over 8 ranks exactly.

    Integers are larger than float64 can hold exactly.
    """
    if case.form.dtype == "int64":
        return torch.randint(-(2**58), 2**58, tuple(shape), generator=generator)
    bits, unit = {"bfloat16": (4, 1.0), "float32": (16, 2.0**-8)}.get(
        case.form.dtype, (40, 2.0**-20)
    )
    return torch.randint(-(2**bits), 2**bits, tuple(shape), generator=generator).double() * unit


AGAIN = " of the second call"


def calls_of(case: Case) -> int:
    """Return how often a case calls the function: once, or twice if its ``calls`` says so."""
    return int(case.parameters.get("calls", 1))


def called(name: str, mine: Any, call: Callable[[Tensor], Tensor], key: str = "tensor") -> Any:
    """Return ``{name: call(tensor)}``; in a case with two calls, also the result of the second.

    Both results are compared after the second call. This shows whether the function keeps
    something from one call to the next.
    """
    results = {name: call(mine[key])}
    if mine["again"] is not None:
        results[name + AGAIN] = call(mine["again"])
    return results


def in_place(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """Return a call that runs the function and returns what is then in the tensor's memory."""

    def call(tensor: Tensor) -> Tensor:
        memory = tensor.detach()  # keeps the old memory if the tensor gets other memory
        function(tensor)
        return memory

    return call


def in_calls(name: str, of: _Of, key: str = "tensor") -> Oracle:
    """Return the oracle for the results of `called`, made from the right value of one call."""

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
        right = {name: of(inputs, me)}
        if inputs[me]["again"] is not None:
            right[name + AGAIN] = of([{**each, key: each["again"]} for each in inputs], me)
        return right

    return oracle


def tensor_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw a ``tensor`` of the case's ``shape`` for every rank, and one more for a second call."""
    shape, twice = case.parameters["shape"], calls_of(case) > 1
    drawn = []
    for rank in range(case.world_size):
        tensor = unusual(case, rank, exact_numbers(case, generator, shape))
        again = exact_numbers(case, generator, shape) if twice else None
        drawn.append({"tensor": tensor, "again": again})
    return drawn


def unusual(case: Case, rank: int, tensor: Tensor) -> Tensor:
    """Return the tensor; all of it is 0 on rank ``zero``, its first number inf on ``overflown``."""
    if rank == case.parameters.get("zero"):
        return torch.zeros_like(tensor)
    if rank == case.parameters.get("overflown"):
        tensor.view(-1)[:1] = torch.inf
    return tensor


def numel(case: Case) -> int:
    """Return how many numbers a tensor of such a case has."""
    return torch.Size(case.parameters["shape"]).numel()


def total(inputs: Sequence[Any]) -> Tensor:
    """Return the sum over the members of a group."""
    return torch.stack([each["tensor"] for each in inputs]).sum(0)


def chunk(tensor: Tensor, k: int, number: int) -> Tensor:
    """Return one of the K chunks of the flattened tensor; the first ones may be longer by one."""
    return tensor.flatten().tensor_split(k)[number % k]


def _own(inputs: Sequence[Any], me: int) -> Tensor:
    own: Tensor = inputs[me]["tensor"]
    return own


MISTAKES: dict[str, _Of] = {
    "the tensor as it was before the call: write the result into it": _own,
    "the sum plus this rank's own numbers once more. Do not add a finished chunk: write it over "
    "the old chunk": lambda ins, me: total(ins) + ins[me]["tensor"],
    "the mean, but the task asks for the sum": lambda ins, me: (total(ins) / len(ins)).to(
        ins[me]["tensor"].dtype
    ),
}


def equals_sum(mistakes: dict[str, Oracle] | None = None) -> Judge:
    """Return a judge that compares ``{"tensor": …}`` with the sum over the group.

    Args:
        mistakes: more known mistakes, which come first; see `equals`.

    """
    known = {name: in_calls("tensor", of) for name, of in MISTAKES.items()}
    right = in_calls("tensor", _sum)
    return equals(
        right,
        {**(mistakes or {}), **known},
        named=went_into_a_copy,
        explain=_parts_of_each_chunk,
        tolerance=EXACT,
    )


def _parts_of_each_chunk(case: Case, inputs: Sequence[Any], me: int, value: Any) -> str:
    """Return whose parts an unfinished chunk holds, if all chunks are sums of parts."""
    k, tensors = len(inputs), [each["tensor"] for each in inputs]
    got = value.get("tensor") if isinstance(value, dict) else None
    if not isinstance(got, Tensor) or got.shape != tensors[0].shape or k > _FEW:
        return ""
    held = [
        _parts_in(chunk(got, k, number), [chunk(each, k, number) for each in tensors])
        for number in range(k)
    ]
    unfinished = {number: parts for number, parts in enumerate(held) if parts and len(parts) < k}
    if None in held or not unfinished or set(unfinished.values()) == {(me,)}:
        return ""  # something else is wrong, or nothing has arrived at all
    number, parts = next(iter(unfinished.items()))
    return (
        f"On this rank, chunk {number} has only the numbers of {names_inside(parts)} of the group "
        f"(unfinished chunks: {len(unfinished)} of {k}). In the second half of the ring, pass on "
        "only finished chunks. Send first the chunk that you finished in the first half."
    )


def _parts_in(got: Tensor, parts: Sequence[Tensor]) -> tuple[int, ...] | None:
    """Return the numbers of the parts whose sum is `got`, as many as possible; else None."""
    for count in range(len(parts), 0, -1):
        for some in combinations(range(len(parts)), count):
            if torch.equal(got, torch.stack([parts[i] for i in some]).sum(0).to(got.dtype)):
                return some
    return None


def went_into_a_copy(case: Case, inputs: Sequence[Any], me: int) -> Any:
    """Return words about a copy that fit the case's layout → the tensor as before the call."""
    if case.form.layout == "contiguous" or inputs[me]["tensor"].dim() < 2:
        return {}
    copies = {
        "transposed": ".reshape(), .flatten() and .contiguous() make a copy",
        "strided": ".contiguous() makes a copy",  # .reshape(-1) of such a tensor is a view
    }
    words = (
        f"the tensor as before the call. It is {case.form.layout}, so {copies[case.form.layout]}, "
        "and the result went into the copy. Copy the result back: tensor.copy_(…)"
    )
    return {words: in_calls("tensor", _own)(case, inputs, me)}


def equals_chunk_of_sum() -> Judge:
    """Return a judge that compares ``{"chunk": …}`` with the sum's chunk of the member's number."""

    def chunk_of(of: _Of) -> Oracle:
        return in_calls("chunk", lambda ins, me: chunk(of(ins, me), len(ins), me))

    known = {name: chunk_of(of) for name, of in MISTAKES.items() if of is not _own}
    return equals(chunk_of(_sum), known, explain=_which_chunk, tolerance=EXACT)


def _sum(inputs: Sequence[Any], me: int) -> Tensor:
    return total(inputs)


def _which_chunk(case: Case, inputs: Sequence[Any], me: int, value: Any) -> str:
    """Return which chunk a member holds, and whose parts are in it."""
    k, got = len(inputs), value.get("chunk") if isinstance(value, dict) else None
    if not isinstance(got, Tensor) or k > _FEW:
        return ""
    for number in (me, *range(k)):
        parts = _parts_in(got, [chunk(each["tensor"], k, number) for each in inputs])
        if parts is not None and (number, len(parts)) != (me, k):
            whose = "all ranks" if len(parts) == k else names_inside(parts)
            return (
                f"This is chunk {number} with the numbers of {whose} of the group. Chunk {me} must "
                "be the last to arrive here, with the numbers of all others: add yours and keep it."
            )
    return ""
