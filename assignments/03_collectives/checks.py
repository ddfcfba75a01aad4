"""The checks of this assignment. They are handed out: read them if a message is not enough.

The numbers, and the mistakes that reports name, are in `course_lib.checking.shared.sums`. No sum of
these numbers is rounded, so every answer must be exact. A program gets only its rank's input.
"""

from __future__ import annotations

from functools import partial

import torch

from course_lib.checking import (
    Case,
    Expectation,
    Form,
    calls_at_most,
    equals,
    in_many_forms,
    only_calls,
    only_peers,
    receives_at_least,
    sends_at_most,
    task,
    time_within,
)
from course_lib.checking.defence import defence, drawn_network, one_of
from course_lib.checking.shared.sums import (
    EXACT,
    called,
    calls_of,
    equals_chunk_of_sum,
    equals_sum,
    exact_numbers,
    in_calls,
    in_place,
    numel,
    tensor_inputs,
    total,
    unusual,
    went_into_a_copy,
)
from course_lib.ranks import Network
from course_lib.ranks.explain.words import counted

# Limits on messages, bytes and time on the virtual clock ------------------------------------------
# A case has the ``shape`` of its tensors, and may have ``calls``, the number of calls of the
# function. Every limit is the limit of one call, times the number of calls. The formulas come from
# ``course_lib.cost_model``.


def longest(n: int, k: int) -> int:
    """Return the length of the longest of k chunks: n/k, rounded up."""
    return -(-n // k)


def rounds(k: int) -> int:
    """Return the number of rounds of a tree over k ranks: log2 k, rounded up."""
    return (k - 1).bit_length()


def neighbours(case: Case, rank: int) -> set[int]:
    """Return the ranks next to `rank` in the ring of its group."""
    members = case.members(rank)
    me = members.index(rank)
    return {members[me - 1], members[(me + 1) % len(members)]}


def half_ring_time(n: int, k: int, itemsize: int, network: Network) -> float:
    """Return (K-1) (α + n/(Kβ)) for the longest chunk: a reduce-scatter or an all-gather."""
    return (k - 1) * network.time(longest(n, k) * itemsize)


def in_half_rings(halves: int) -> list[Expectation]:
    """Expect the neighbours, messages, bytes and time of `halves` times K - 1 steps of a ring."""

    def steps(case: Case, rank: int) -> int:
        return calls_of(case) * halves * (len(case.members(rank)) - 1)

    def chunk_bytes(case: Case, rank: int) -> int:
        return longest(numel(case), len(case.members(rank))) * case.itemsize

    def seconds(case: Case, network: Network) -> float:
        k = max(map(len, case.groups))
        return calls_of(case) * halves * half_ring_time(numel(case), k, case.itemsize, network)

    return [
        only_calls("send", "recv"),
        only_peers(neighbours),
        sends_at_most(
            lambda case, rank: steps(case, rank) * chunk_bytes(case, rank),
            hint="In each step a rank passes on one chunk in the tensor's dtype, and never the "
            "whole tensor.",
        ),
        calls_at_most("Send only one message per step.", send=steps),
        time_within(seconds, hint="Send and receive at the same time: isend and irecv, then wait."),
        receives_at_least(partial(unknown_bytes, whole=halves == 2)),
    ]


def unknown_bytes(case: Case, rank: int, whole: bool) -> int:
    """Return the bytes that a rank cannot know: the whole sum, or at least a shortest chunk."""
    k = len(case.members(rank))
    chunk = numel(case) if whole else numel(case) // k
    return 0 if k == 1 else calls_of(case) * chunk * case.itemsize


def along_a_tree() -> list[Expectation]:
    """Expect the messages, bytes and time of a tree from ``root``, a number in the group."""

    def sends(case: Case, rank: int) -> int:
        return calls_of(case) * rounds(len(case.members(rank)))

    def receives(case: Case, rank: int) -> int:
        return calls_of(case) * int(case.members(rank)[case.parameters["root"]] != rank)

    def seconds(case: Case, network: Network) -> float:
        k = max(map(len, case.groups))
        return calls_of(case) * rounds(k) * network.time(numel(case) * case.itemsize)

    return [
        only_calls("send", "recv"),
        calls_at_most(
            "Let every rank that has the tensor pass it on: then no rank sends more than "
            "ceil(log2 K) times.",
            send=sends,
        ),
        calls_at_most("Every rank but the source receives the tensor exactly once.", recv=receives),
        sends_at_most(
            lambda case, rank: sends(case, rank) * numel(case) * case.itemsize,
            hint="Send in each message only the tensor, once and in its own dtype.",
        ),
        time_within(
            seconds, rel=0.25, hint="All ranks that have the tensor must send at the same time."
        ),
        receives_at_least(lambda case, rank: receives(case, rank) * numel(case) * case.itemsize),
    ]


def two_level_time(case: Case, network: Network) -> float:
    """Return 2 (L-1) (α₁ + n/(Lβ₁)) + 2 (M-1) (α₂ + n/(LMβ₂)), for M nodes of L ranks."""
    n, size, inside = numel(case), network.node_size, network.inside
    assert size is not None and inside is not None
    within = half_ring_time(n, size, case.itemsize, inside)
    between = half_ring_time(longest(n, size), case.world_size // size, case.itemsize, network)
    return 2 * calls_of(case) * (within + between)


# Inputs and programs of the ranks --------------------------------------------------------------


def with_source(case, generator):
    roots = [case.members(r)[case.parameters["root"]] for r in range(case.world_size)]
    return [
        {**own, "src": root}
        for own, root in zip(tensor_inputs(case, generator), roots, strict=True)
    ]


def chunks_of_one(case, generator):
    n, made = numel(case), []
    for rank in range(case.world_size):
        members = case.members(rank)
        size = len(torch.empty(n).tensor_split(len(members))[members.index(rank)])
        chunk = unusual(case, rank, exact_numbers(case, generator, (size,)))
        again = exact_numbers(case, generator, (size,)) if calls_of(case) > 1 else None
        made.append({"chunk": chunk, "again": again, "length": n})
    return made


def with_nodes(case, generator):
    size, k = case.network.node_size, case.world_size
    nodes = [list(range(first, first + size)) for first in range(0, k, size)]
    across = [list(range(place, k, size)) for place in range(size)]
    return [{**own, "nodes": nodes, "across": across} for own in tensor_inputs(case, generator)]


def run_broadcast(tree_broadcast, mine, given):
    call = in_place(lambda tensor: tree_broadcast(tensor, mine["src"], group=given.group))
    return called("tensor", mine, call)


def run_reduce_scatter(ring_reduce_scatter, mine, given):
    return called("chunk", mine, lambda tensor: ring_reduce_scatter(tensor, group=given.group))


def run_all_gather(ring_all_gather, mine, given):
    def call(chunk):
        return ring_all_gather(chunk, mine["length"], group=given.group)

    return called("vector", mine, call, key="chunk")


def run_all_reduce(ring_all_reduce, mine, given):
    call = in_place(lambda tensor: ring_all_reduce(tensor, group=given.group))
    return called("tensor", mine, call)


def run_two_levels(two_level_all_reduce, mine, given):
    inside, between = given.group_among(mine["nodes"]), given.group_among(mine["across"])
    call = in_place(lambda tensor: two_level_all_reduce(tensor, inside, between))
    return called("tensor", mine, call)


# The right results, and the results of mistakes -------------------------------------------------


def gathered(inputs, me):
    return torch.cat([each["chunk"] for each in inputs])


def held_by(number):
    """Return the oracle of the tensor of member ``number(inputs, me)``."""
    return in_calls("tensor", lambda inputs, me: inputs[number(inputs, me)]["tensor"])


def the_source(case, inputs, me):
    return held_by(lambda *_: case.parameters["root"])(case, inputs, me)


SOURCE_MISTAKES = {
    "the tensor as it was before the call: this rank received nothing, or it acted as the source": (
        held_by(lambda inputs, me: me)
    ),
    "the tensor of the group's first rank, but src is a different rank": held_by(
        lambda inputs, me: 0
    ),
}


def named_by_the_case(case, inputs, me):
    """Return the result if src is used as a number in the group, or if only a copy is written."""
    src, root, k = inputs[me]["src"], case.parameters["root"] % len(inputs), len(inputs)
    known = {}
    if src % k != root:
        words = (
            f"the tensor of number {src % k} in the group, but src is world rank {src}, which is "
            f"number {root} in the group"
        )
        known[words] = held_by(lambda *_: src % k)(case, inputs, me)
    return {**known, **went_into_a_copy(case, inputs, me)}


def places_of_chunks(case, inputs, me, value):
    """Return a hint that says which chunk is at each place of the vector, if this helps."""
    k, vector = len(inputs), value.get("vector") if isinstance(value, dict) else None
    chunks = [each["chunk"] for each in inputs]
    if not isinstance(vector, torch.Tensor) or vector.shape != (inputs[me]["length"],):
        return ""
    wrong = {}
    for place, got in enumerate(vector.tensor_split(k)):
        held = [r for r in range(k) if torch.equal(got, chunks[r][: len(got)])]
        empty = got.isnan().all() or (got == torch.iinfo(torch.int64).max).all() or not got.any()
        if not len(got) or place in held:
            continue
        if not held and not empty:
            return ""
        wrong[place] = f"chunk {held[0]}" if held else "nothing"
    if not wrong:
        return ""
    place = me if me in wrong else min(wrong)
    message = f"Place {place} of the vector holds {wrong[place]}, but should hold chunk {place}"
    if wrong[place] != "nothing":
        return f"{message}. Chunk r comes from rank r of the group, whichever rank passed it on."
    if place == me:
        return f"{message}, your own. Put it there, and send it first: you have no other chunk yet."
    return f"{message}. In each of K - 1 steps, pass on the chunk that you received last."


def node_sum(case, inputs, me):
    first = me - me % case.network.node_size
    return {"tensor": total(inputs[first : first + case.network.node_size])}


def place_sum(case, inputs, me):
    return {"tensor": total(inputs[me % case.network.node_size :: case.network.node_size])}


# The cases -------------------------------------------------------------------------------------


def in_nodes(nodes, size, shape):
    """Return a case on a cluster with faster links inside a node.

    There the latency is 10 times smaller and the bandwidth 100 times larger.
    """
    network = Network(20e-6, 1e9, node_size=size, inside=Network(2e-6, 100e9))
    name = f"{counted(nodes, 'node')} of {counted(size, 'rank')}, shape {list(shape)}"
    return Case(name, nodes * size, {"shape": shape}, network=network)


LAYOUTS = ("contiguous", "transposed", "strided")


def shaped(*cases, roots=(None, None)):
    """Return cases of (name, ranks, shape, root) in many forms, including integers, and three more.

    In these, ranks have zeros or an inf, a rank is alone in its group, or the function is called
    twice.
    """
    alone = Form(((0, 1, 3), (2,)), "float64", "strided")
    zeros = {"shape": (2, 4), "root": roots[1], "zero": 1, "overflown": 0}
    special = (
        Case("3 ranks, only zeros on rank 1, an inf on rank 0", 3, zeros),
        Case(
            "4 ranks, one of them alone in its group", 4, {"shape": (5,), "root": roots[0]}, alone
        ),
        Case("3 ranks, called twice", 3, {"shape": (2, 4), "root": roots[1], "calls": 2}),
    )
    parameters = ("shape", "root")
    made = [Case(name, k, dict(zip(parameters, rest, strict=False))) for name, k, *rest in cases]
    formed = in_many_forms(*made, dtypes=tuple(EXACT), layouts=LAYOUTS)
    return (*formed, *special)


FOUR_RANKS = (4, 3)  # places of cases: all together, then in two groups
RINGS = shaped(
    ("1 rank", 1, (3, 2)),
    ("2 ranks, 6 numbers", 2, (3, 2)),
    ("3 ranks, 10 numbers", 3, (5, 2)),
    ("4 ranks in two groups, 15 numbers", 4, (5, 3)),
    ("4 ranks, 3 numbers", 4, (3,)),
    ("5 ranks in two groups, 8 numbers", 5, (4, 2)),
    ("3 ranks, no numbers", 3, (0,)),
    ("4 ranks in two groups, one number", 4, ()),
)


def drawn_ring(generator: torch.Generator) -> Case:
    """Draw a case of task 4 for one student: ranks, numbers and a network."""
    k, n = one_of(generator, 3, 4, 5), one_of(generator, *range(51, 400))
    network, words = drawn_network(generator)
    name = f"{k} ranks, {n} numbers of 4 bytes on each.\n{words}."
    return Case(name, k, {"shape": (n,)}, network=network)


CHECKS = {
    "tree_broadcast": task(
        "tree_broadcast",
        inputs=with_source,
        program=run_broadcast,
        may_change=["tensor", "again"],
        judges=[equals(the_source, SOURCE_MISTAKES, named=named_by_the_case, tolerance=EXACT)],
        expects=along_a_tree(),
        worth={"values": 2, "communication": 1},
        cases=shaped(
            ("1 rank", 1, (3, 2), 0),
            ("2 ranks, from rank 1", 2, (3, 2), 1),
            ("3 ranks, from rank 2", 3, (4,), 2),
            ("4 ranks in two groups, each from its second", 4, (5, 3), 1),
            ("4 ranks, from rank 0", 4, (3, 4), 0),
            ("5 ranks in two groups, each from its first", 5, (4, 2), 0),
            ("5 ranks, from rank 3", 5, (0,), 3),
            roots=(-1, 1),
        ),
        in_turn=[FOUR_RANKS],
    ),
    "ring_reduce_scatter": task(
        "ring_reduce_scatter",
        inputs=tensor_inputs,
        program=run_reduce_scatter,
        judges=[equals_chunk_of_sum()],
        expects=in_half_rings(1),
        worth={"values": 2, "communication": 2},
        cases=RINGS,
        in_turn=[FOUR_RANKS],
    ),
    "ring_all_gather": task(
        "ring_all_gather",
        inputs=chunks_of_one,
        program=run_all_gather,
        judges=[
            equals(in_calls("vector", gathered, "chunk"), explain=places_of_chunks, tolerance=EXACT)
        ],
        expects=in_half_rings(1),
        worth={"values": 2, "communication": 1},
        cases=RINGS,
        in_turn=[FOUR_RANKS],
    ),
    "ring_all_reduce": task(
        "ring_all_reduce",
        inputs=tensor_inputs,
        program=run_all_reduce,
        may_change=["tensor", "again"],
        judges=[equals_sum()],
        expects=in_half_rings(2),
        worth={"values": 2, "communication": 2},
        cases=RINGS,
        in_turn=[FOUR_RANKS],
    ),
    "two_level_all_reduce": task(
        "two_level_all_reduce",
        inputs=with_nodes,
        program=run_two_levels,
        may_change=["tensor", "again"],
        judges=[
            equals_sum(
                {
                    "the sum over only the ranks of this node": node_sum,
                    "the sum over only the ranks with the same place in their nodes": place_sum,
                }
            )
        ],
        expects=[
            only_calls("send", "recv"),
            time_within(
                two_level_time,
                hint="Messages to other nodes take long. Reduce-scatter inside the node first: "
                "then each rank sends only its chunk of n/L numbers to other nodes.",
            ),
            receives_at_least(partial(unknown_bytes, whole=True)),
        ],
        worth={"values": 2, "communication": 2},
        cases=in_many_forms(
            in_nodes(3, 2, (7, 5)),
            in_nodes(2, 3, (2, 2)),
            in_nodes(2, 2, (500, 100)),
            in_nodes(3, 1, (7,)),
            in_nodes(1, 3, (3, 3)),
            in_nodes(2, 2, (4, 2)),
            in_nodes(2, 2, (1,)),
            dtypes=tuple(EXACT),
            layouts=LAYOUTS,
            groups=False,
        ),
        in_turn=[(2, 5)],
    ),
    "defend_ring_all_reduce": defence("ring_all_reduce", drawn_ring),
}
