"""The checks of this assignment. They are handed out: read them if a message is not enough.

A check has a reference in `course_lib`, a program that calls a function on a rank, and a draw that
makes a case from a seed. No sum of the drawn numbers is rounded, so every answer must be exact. A
program gets only its rank's input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checking import NETWORK, Allowed, Case, Draw, Given, Variety, by_reference
from course_lib.checking.defence import defence, drawn_network, one_of
from course_lib.ranks import Network

from .hints import parts_of_chunks, places_of_chunks, which_chunk

DTYPES = ("float32", "float64", "bfloat16", "int64")
RANKS = (2, 3, 4, 3, 5, 1, 6, 7)
VARIETY = Variety(ranks=RANKS, dtypes=DTYPES)

# Tasks 2 and 4: a tensor on every rank, and its sum -----------------------------------------------


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
    return called("chunk", inputs, lambda tensor: ring_reduce_scatter(tensor, group=case.group))


def run_all_reduce(ring_all_reduce: Callable[..., Any], inputs: Any, case: Given) -> Any:
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

# Task 1: along a tree -----------------------------------------------------------------------------


def draw_source(d: Draw) -> list[Any]:
    """Draw a tensor for every rank, and the source of each group, a rank of the whole world."""
    place = d.one_of(0, 1, 2, -1)
    sources = [members[place % len(members)] for members in map(d.members, d.ranks)]
    pairs = zip(draw_tensors(d), sources, strict=True)
    return [{**rank_inputs, "src": src} for rank_inputs, src in pairs]


def run_broadcast(tree_broadcast: Callable[..., Any], inputs: Any, case: Given) -> Any:
    call = in_place(lambda tensor: tree_broadcast(tensor, inputs["src"], group=case.group))
    return called("tensor", inputs, call)


def broadcast_network(d: Draw, inputs: Sequence[Any]) -> Network:
    """Draw a network; on the second one each message that a rank sends costs time."""
    network: Network = d.one_of(NETWORK, Network(1e-6, 1e6))
    return network


def held_by(number: Callable[[Sequence[Any], int], int]) -> Callable[..., Any]:
    """Return the mistake that gives a member the tensor of another member."""
    return lambda inputs, me, expected: {"tensor": inputs[number(inputs, me)]["tensor"]}


SOURCE_MISTAKES = {
    "the tensor as it was before the call: this rank received nothing, or it acted as the source, "
    "or only a copy of its tensor was written": held_by(lambda inputs, me: me),
    "the tensor of the group's first rank, but src is a different rank": held_by(lambda *_: 0),
    "the tensor of number src in the group, but src is a rank of the whole world": held_by(
        lambda inputs, me: inputs[me]["src"] % len(inputs)
    ),
}


# Task 3: a chunk on every rank --------------------------------------------------------------------


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
    def call(chunk: Tensor) -> Any:
        return ring_all_gather(chunk, inputs["length"], group=case.group)

    return called("vector", inputs, call, key="chunk")


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
    """Draw a case of task 4 for one student: ranks, numbers and a network."""
    k, n = one_of(generator, 3, 4, 5), one_of(generator, *range(51, 400))
    network, description = drawn_network(generator)
    name = f"{k} ranks, {n} numbers of 4 bytes on each.\n{description}."
    drawn = [torch.randn(n, generator=generator) for _ in range(k)]
    inputs = [{"tensor": tensor, "again": None} for tensor in drawn]
    return Case(name, k, network=network), inputs


CHECKS = {
    "tree_broadcast": by_reference(
        "tree_broadcast",
        seeds=(2, 11, 15, 27, 28, 44, 46, 49, 51, 54, 59),
        reference="course_lib.collectives:tree_broadcast",
        program=run_broadcast,
        draw=draw_source,
        variety=Variety(ranks=(2, 3, 4, 7, 5, 1, 6, 7), dtypes=DTYPES),
        mistakes=SOURCE_MISTAKES,
        may_change=["tensor", "again"],
        exact=True,
        allowed=Allowed(
            roles=True,
            time=1.25,
            hint="Let every rank that has the tensor pass it on, all at the same time: then no "
            "rank sends more than ceil(log2 K) times, and nobody receives twice.",
        ),
        network=broadcast_network,
        worth={"values": 2, "communication": 1},
    ),
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
