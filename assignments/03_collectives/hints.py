"""Hints about wrong chunks: whose numbers are in a chunk, and at which place it is.

The numbers are drawn so that no sum of them is rounded, so the parts of a sum can be found again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from course_lib.ranks.explain.words import names_inside

_FEW = 6  # members whose subsets are tried


def parts_of_chunks(inputs: Sequence[Any], me: int, expected: Sequence[Any], value: Any) -> str:
    """Return whose parts an unfinished chunk holds, if all chunks are sums of parts."""
    k, tensors, got = len(inputs), [member["tensor"] for member in inputs], value.get("tensor")
    if not isinstance(got, Tensor) or got.shape != tensors[0].shape or k > _FEW:
        return ""
    held = [_parts_in(_chunk(got, k, n), [_chunk(t, k, n) for t in tensors]) for n in range(k)]
    unfinished = {number: parts for number, parts in enumerate(held) if parts and len(parts) < k}
    if None in held or not unfinished or set(unfinished.values()) == {(me,)}:
        return ""  # something else is wrong, or nothing has arrived at all
    number, parts = next(iter(unfinished.items()))
    return (
        f"On this rank, chunk {number} has only the numbers of {names_inside(parts)} of the group "
        f"(unfinished chunks: {len(unfinished)} of {k}). In the second half of the ring, pass on "
        "only finished chunks. Send first the chunk that you finished in the first half."
    )


def which_chunk(inputs: Sequence[Any], me: int, expected: Sequence[Any], value: Any) -> str:
    """Return which chunk a member holds, and whose parts are in it."""
    k, got = len(inputs), value.get("chunk")
    if not isinstance(got, Tensor) or k > _FEW:
        return ""
    for number in (me, *range(k)):
        parts = _parts_in(got, [_chunk(member["tensor"], k, number) for member in inputs])
        if parts is not None and (number, len(parts)) != (me, k):
            owners = "all ranks" if len(parts) == k else names_inside(parts)
            return (
                f"This is chunk {number} with the numbers of {owners} of the group. Chunk {me} "
                "must be the last to arrive here, with the numbers of all others: add yours and "
                "keep it."
            )
    return ""


def places_of_chunks(inputs: Sequence[Any], me: int, expected: Sequence[Any], value: Any) -> str:
    """Return which chunk is at a wrong place of the gathered vector."""
    chunks, vector = [member["chunk"] for member in inputs], value.get("vector")
    if not isinstance(vector, Tensor) or vector.shape != (inputs[me]["length"],):
        return ""
    contents = {}
    for place, got in enumerate(vector.tensor_split(len(chunks))):
        held = [r for r, chunk in enumerate(chunks) if torch.equal(got, chunk[: len(got)])]
        empty = got.isnan().all() or (got == torch.iinfo(torch.int64).max).all() or not got.any()
        if not len(got) or place in held:
            continue
        if not held and not empty:
            return ""
        contents[place] = f"chunk {held[0]}" if held else "nothing"
    if not contents:
        return ""
    place = me if me in contents else min(contents)
    message = f"Place {place} of the vector holds {contents[place]}, but should hold chunk {place}"
    if contents[place] != "nothing":
        return f"{message}. Chunk r comes from rank r of the group, whichever rank passed it on."
    if place == me:
        return f"{message}, your own. Put it there, and send it first: you have no other chunk yet."
    return f"{message}. In each of K - 1 steps, pass on the chunk that you received last."


def _chunk(tensor: Tensor, k: int, number: int) -> Tensor:
    return tensor.flatten().tensor_split(k)[number % k]


def _parts_in(got: Tensor, parts: Sequence[Tensor]) -> tuple[int, ...] | None:
    """Return the numbers of the parts whose sum is `got`, as many as possible; else None."""
    for count in range(len(parts), 0, -1):
        for some in combinations(range(len(parts)), count):
            if torch.equal(got, torch.stack([parts[i] for i in some]).sum(0).to(got.dtype)):
                return some
    return None
