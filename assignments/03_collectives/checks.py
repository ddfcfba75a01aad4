"""The checks of this assignment. They are handed out: read them if a message is not enough.

A check has a reference in `course_lib`, a program that calls a function on a rank, and a draw that
makes a case from a seed. No sum of the drawn numbers is rounded, so every answer must be exact. In
task 4 they are rounded, because it is about the rounding. A program gets only its rank's input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checking import Allowed, Case, Draw, Given, Variety, Wrong, by_reference
from course_lib.checking.answers import expect_tensor
from course_lib.checking.defence import defence, drawn_network, one_of
from course_lib.ranks import Network
from course_lib.ranks.explain.words import counted

from .hints import parts_of_chunks, places_of_chunks, which_chunk

DTYPES = ("float32", "float64", "bfloat16", "int64")
RANKS = (2, 3, 4, 3, 5, 1, 6, 7)
VARIETY = Variety(ranks=RANKS, dtypes=DTYPES)

# Tasks 1 and 3: a tensor on every rank, and its sum -----------------------------------------------


def draw_tensors(d: Draw) -> list[Any]:
    """Draw a tensor for every rank, and one more in a case with two calls."""
    shape = d.one_of((3, 2), (5, 2), (7,), (5, 3), (2, 4), (37,))
    shape = d.maybe("fewer numbers than ranks", d.one_of((1,), (2,), ()), shape)
    shape = d.maybe("no numbers", (0,), shape, one_in=6)
    zeros, overflow = d.rank("only zeros on rank {}"), d.rank("rank {} has an inf or a NaN", 4)
    twice = d.maybe("called twice")

    def drawn(rank: int) -> Tensor:
        tensor = d.exact(*shape) * (rank != zeros)
        return d.not_finite(tensor) if rank == overflow and tensor.numel() else tensor

    return [
        {
            "tensor": drawn(rank),
            "again": d.exact(*shape) if twice else None,
            "members": d.members(rank),
        }
        for rank in d.ranks
    ]


def called(name: str, inputs: Any, call: Callable[[Tensor], Tensor], key: str = "tensor") -> Any:
    """Return the results of one call, or of two, which are compared after the second one."""
    results = {name: call(inputs[key])}
    if inputs["again"] is not None:
        results[f"{name} of the second call"] = call(inputs["again"])
    return results


def in_place(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """Return a call that runs the function and returns what is then in the tensor's memory."""

    def call(tensor: Tensor) -> Tensor:
        memory = tensor.detach()  # keeps the old memory if the tensor gets other memory
        function(tensor)
        return memory

    return call


def run_reduce_scatter(ring_reduce_scatter: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``ring_reduce_scatter(tensor, group=group)``; return the rank's chunk of the sum.

    Every bit counts, and a tensor that the function gets must stay as it is. A ring limits
    time and bytes, with every chunk as long as the longest one; its calls and partners are fixed.
    """
    return called("chunk", inputs, lambda tensor: ring_reduce_scatter(tensor, group=case.group))


def run_all_reduce(ring_all_reduce: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``ring_all_reduce(tensor, group=group)``; return the tensor, which holds the sum then.

    Every bit counts. A ring limits time and bytes, with every chunk as long as the longest one; its
    calls and partners are fixed.
    """
    call = in_place(lambda tensor: ring_all_reduce(tensor, group=case.group))
    return called("tensor", inputs, call)


def longer_chunks(halves: int) -> Callable[[Any], int]:
    """Return the bytes more if all chunks have the length of the longest one."""

    def slack(inputs: Any) -> int:
        tensor = inputs.get("tensor", inputs.get("chunk"))
        calls = 1 if inputs["again"] is None else 2
        return calls * halves * (len(inputs["members"]) - 1) * int(tensor.itemsize)

    return slack


def in_a_ring(halves: int) -> Allowed:
    """Return what a ring of `halves` times K - 1 steps may do."""
    return Allowed(
        slack=longer_chunks(halves),
        time=1.02,
        hint="In each step a rank passes on one chunk in the tensor's dtype, by one message, and "
        "never the whole tensor. Send and receive at the same time: isend and irecv, then wait.",
    )


def own_once_more(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
    return {"tensor": expected[me]["tensor"] + inputs[me]["tensor"]}


def mean(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
    total = expected[me]["tensor"]
    return {"tensor": (total / len(inputs)).to(total.dtype)}


def before_the_call(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
    return {"tensor": inputs[me]["tensor"]}


SUM_MISTAKES = {
    "the tensor as it was before the call: write the result into it": before_the_call,
    "the sum plus this rank's own numbers once more. Do not add a finished chunk: write it over "
    "the old chunk": own_once_more,
    "the mean, but the task asks for the sum": mean,
}

# Task 2: a chunk on every rank --------------------------------------------------------------------


def draw_chunks(d: Draw) -> list[Any]:
    """Draw the chunk of every rank of a vector, and one more in a case with two calls."""
    length = d.one_of(6, 10, 15, 8, 30)
    length = d.maybe("fewer numbers than ranks", d.one_of(1, 2), length)
    length = d.maybe("no numbers", 0, length, one_in=6)
    zeros, overflow = d.rank("only zeros on rank {}"), d.rank("rank {} has an inf or a NaN", 4)
    twice, inputs = d.maybe("called twice"), []
    for rank in d.ranks:
        members = d.members(rank)
        size = len(torch.empty(length).tensor_split(len(members))[members.index(rank)])
        chunk = d.exact(size) * (rank != zeros)
        chunk = d.not_finite(chunk) if rank == overflow and size else chunk
        again = d.exact(size) if twice else None
        inputs.append({"chunk": chunk, "again": again, "length": length, "members": members})
    return inputs


def run_all_gather(ring_all_gather: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``ring_all_gather(chunk, length, group=group)``; return the vector of all chunks.

    Every bit counts, and a chunk that the function gets must stay as it is. A ring limits
    time and bytes, with every chunk as long as the longest one; its calls and partners are fixed.
    """

    def call(chunk: Tensor) -> Any:
        return ring_all_gather(chunk, inputs["length"], group=case.group)

    return called("vector", inputs, call, key="chunk")


# Task 4: the same bits for every K ----------------------------------------------------------------

ONE = "sum of one part"


def draw_parts(d: Draw) -> list[Any]:
    """Draw the parts of every rank: M/K of them, an odd number times a power of two."""
    k, count = d.world_size, d.one_of(1, 2, 3, 4, 6)
    two_groups = k > 2 and d.maybe("in two groups")
    shape = d.one_of((50,), (6, 10), (3, 4, 5))
    shape = d.maybe("a part is one number", (), d.maybe("no numbers", (0,), shape, one_in=6), 6)
    d.say(f"{count} on each" if count > 1 else "one part on each")
    inner = range(k // 4, k // 4 + k // 2)
    outer = [rank for rank in d.ranks if rank not in inner]
    groups = [outer, list(inner)] if two_groups else [list(d.ranks)]
    # Rounded here, so that all bits stay: the order of their sum must matter in every dtype.
    parts = [d.randn(count, *shape).to(d.dtype) for _ in d.ranks]
    members = [next(group for group in groups if rank in group) for rank in d.ranks]
    return [
        {"parts": parts[rank], "all parts": torch.cat([parts[r] for r in group]), "groups": groups}
        for rank, group in enumerate(members)
    ]


def run_one_order(sum_in_one_order: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Add up the parts of this rank's group: as its member, and alone; and alone a single part."""
    groups = inputs["groups"]
    group = case.group_among(groups) if len(groups) > 1 else None
    alone = case.group_among([[rank] for members in groups for rank in members])
    return {
        "sum": sum_in_one_order(inputs["parts"], group=group),
        "sum on one rank": sum_in_one_order(inputs["all parts"], group=alone),
        ONE: sum_in_one_order(inputs["parts"][:1], group=alone),
    }


def expect_one_order(case: Case, inputs: Any, expected: Any, values: Sequence[Any]) -> None:
    """Judge that all sums are right up to rounding, and that the first two have the same bits."""
    for rank, (rank_input, value) in enumerate(zip(inputs, values, strict=True)):
        every = rank_input["all parts"]
        for name, total in value.items():
            expect_tensor(total, every[0], f"rank {rank}: {name}")
            parts = rank_input["parts"][:1] if name == ONE else every
            m, exact = len(parts), parts.double().sum(0)
            rounded = m * torch.finfo(parts.dtype).eps * parts.double().abs().sum(0)
            if not ((total.double() - exact).abs() <= rounded).all():
                message = f"rank {rank}: {name} is not the sum of the {counted(m, 'part')}"
                raise Wrong(f"{message} of its group, not even up to rounding")
        apart = value["sum"] != value["sum on one rank"]
        if apart.any():
            raise Wrong(
                f"rank {rank}: {int(apart.sum())} of {counted(apart.numel(), 'number')} of the sum "
                f"have other bits than your own sum of the same {counted(len(every), 'part')} on "
                "one rank",
                "Draw the tree in which each of them adds the parts. It must be one tree: what "
                "happens inside a rank and what happens between ranks are levels of it.",
            )


# Task 5: two levels -------------------------------------------------------------------------------


def draw_nodes(d: Draw) -> list[Any]:
    """Draw a tensor for every rank of a cluster, and the groups inside nodes and between them."""
    k = d.world_size
    size = d.one_of(*(divisor for divisor in (1, 2, 3, 4, k) if k % divisor == 0))
    d.say(f"{k // size} nodes of {size}")
    shape = d.one_of((7, 5), (2, 2), (500, 100), (7,), (3, 7), (500, 222), (1,), ())
    d.say(f"shape {list(shape)}")
    zeros, overflow = d.rank("only zeros on rank {}"), d.rank("rank {} has an inf or a NaN", 4)
    nodes = [list(range(first, first + size)) for first in range(0, k, size)]
    across = [list(range(place, k, size)) for place in range(size)]
    inputs = []
    for rank in d.ranks:
        tensor = d.exact(*shape) * (rank != zeros)
        tensor = d.not_finite(tensor) if rank == overflow else tensor
        inputs.append({"tensor": tensor, "again": None, "nodes": nodes, "across": across})
    return inputs


def node_network(d: Draw, inputs: Sequence[Any]) -> Network:
    """Return a network whose links inside a node are faster: 10 times less latency, 100 times β."""
    size = len(inputs[0]["nodes"][0])
    return Network(20e-6, 1e9, node_size=size, inside=Network(2e-6, 100e9))


def run_two_levels(two_level_all_reduce: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``two_level_all_reduce(tensor, inside, between)``; return the tensor, now the sum.

    Every bit counts. The time is limited on a network on which messages to other nodes take long;
    how many calls and bytes there are, and in which order, is free.
    """
    inside, between = case.group_among(inputs["nodes"]), case.group_among(inputs["across"])
    call = in_place(lambda tensor: two_level_all_reduce(tensor, inside, between))
    return called("tensor", inputs, call)


def sum_over(key: str) -> Callable[..., Any]:
    """Return the mistake that sums up only over the ranks of one group."""

    def mistake(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
        ranks = next(ranks for ranks in inputs[me][key] if me in ranks)
        return {"tensor": torch.stack([inputs[rank]["tensor"] for rank in ranks]).sum(0)}

    return mistake


LEVEL_MISTAKES = {
    "the sum over only the ranks of this node": sum_over("nodes"),
    "the sum over only the ranks with the same place in their nodes": sum_over("across"),
}


# The checks ---------------------------------------------------------------------------------------


def drawn_ring(generator: torch.Generator) -> tuple[Case, list[Any]]:
    """Draw a case of task 3 for one student: ranks, numbers and a network."""
    k, n = one_of(generator, 3, 4, 5), one_of(generator, *range(51, 400))
    network, description = drawn_network(generator)
    name = f"{k} ranks, {n} numbers of 4 bytes on each.\n{description}."
    drawn = [torch.randn(n, generator=generator) for _ in range(k)]
    inputs = [{"tensor": tensor, "again": None} for tensor in drawn]
    return Case(name, k, network=network), inputs


CHECKS = {
    "ring_reduce_scatter": by_reference(
        "ring_reduce_scatter",
        seeds=(2, 5, 11, 26, 33, 38, 39, 44, 49),
        reference="course_lib.collectives:ring_reduce_scatter",
        program=run_reduce_scatter,
        draw=draw_tensors,
        variety=VARIETY,
        explain=which_chunk,
        exact=True,
        allowed=in_a_ring(1),
        worth={"values": 2, "communication": 2},
    ),
    "ring_all_gather": by_reference(
        "ring_all_gather",
        seeds=(1, 2, 3, 11, 16, 20, 24, 44, 49),
        reference="course_lib.collectives:ring_all_gather",
        program=run_all_gather,
        draw=draw_chunks,
        variety=VARIETY,
        explain=places_of_chunks,
        exact=True,
        allowed=in_a_ring(1),
        worth={"values": 2, "communication": 1},
    ),
    "ring_all_reduce": by_reference(
        "ring_all_reduce",
        seeds=(2, 3, 5, 11, 12, 26, 38, 44, 49),
        reference="course_lib.collectives:ring_all_reduce",
        program=run_all_reduce,
        draw=draw_tensors,
        variety=VARIETY,
        mistakes=SUM_MISTAKES,
        explain=parts_of_chunks,
        may_change=["tensor", "again"],
        exact=True,
        allowed=in_a_ring(2),
        worth={"values": 2, "communication": 2},
    ),
    "sum_in_one_order": by_reference(
        "sum_in_one_order",
        seeds=(3, 4, 7, 8, 11, 13, 15, 20, 22),
        reference="course_lib.collectives:sum_in_one_order",
        program=run_one_order,
        draw=draw_parts,
        variety=Variety(ranks=(4, 2, 8, 4, 8, 1), dtypes=DTYPES[:3], groups=False),
        judge=expect_one_order,
        allowed=Allowed(
            roles=True,
            time=1.02,
            hint="In each of log2(K) rounds, two ranks swap what they have: one tensor of the size "
            "of a part, in its dtype, sent and received at the same time.",
        ),
        worth={"values": 2, "communication": 1},
    ),
    "two_level_all_reduce": by_reference(
        "two_level_all_reduce",
        seeds=(8, 17, 29, 40, 46, 48, 49, 59),
        reference="course_lib.collectives:hierarchical_all_reduce",
        program=run_two_levels,
        draw=draw_nodes,
        variety=Variety(ranks=(6, 4, 6, 8, 3, 1), dtypes=DTYPES, groups=False),
        mistakes={**LEVEL_MISTAKES, **SUM_MISTAKES},
        may_change=["tensor", "again"],
        exact=True,
        allowed=Allowed(
            roles=True,
            calls=None,
            slack=None,
            time=1.1,
            hint="Messages to other nodes take long. Reduce-scatter inside the node first: then "
            "each rank sends only its chunk of n/L numbers to other nodes.",
        ),
        network=node_network,
        worth={"values": 2, "communication": 2},
    ),
    "defend_ring_all_reduce": defence("ring_all_reduce", drawn_ring),
}
