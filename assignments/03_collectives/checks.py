"""The checks of this assignment. They are handed out: read them if a message is not enough.

The numbers, and the mistakes that are named, stand in `course_lib.checking.sums`: no sum of these
numbers is rounded, so every answer must be exact. A program gets only its rank's input.
"""

import torch

from course_lib.checking import (
    Case,
    calls_at_most,
    equals,
    in_many_forms,
    only_calls,
    only_peers,
    sends_at_most,
    task,
    time_within,
)
from course_lib.checking.sums import (
    EXACT,
    equals_chunk_of_sum,
    equals_sum,
    exact_numbers,
    numel,
    tensor_inputs,
    total,
)
from course_lib.ranks import Network
from course_lib.ranks.explain.words import counted


def longest(n, k):
    return -(-n // k)


# What the ranks have, and what they call -------------------------------------------------------


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
        made.append({"chunk": exact_numbers(case, generator, (size,)), "length": n})
    return made


def with_nodes(case, generator):
    size, k = case.network.node_size, case.world_size
    nodes = [list(range(first, first + size)) for first in range(0, k, size)]
    across = [list(range(place, k, size)) for place in range(size)]
    return [{**own, "nodes": nodes, "across": across} for own in tensor_inputs(case, generator)]


def run_broadcast(tree_broadcast, mine, given):
    tree_broadcast(mine["tensor"], mine["src"], group=given.group)
    return {"tensor": mine["tensor"]}


def run_reduce_scatter(ring_reduce_scatter, mine, given):
    return {"chunk": ring_reduce_scatter(mine["tensor"], group=given.group)}


def run_all_gather(ring_all_gather, mine, given):
    return {"tensor": ring_all_gather(mine["chunk"], mine["length"], group=given.group)}


def run_all_reduce(ring_all_reduce, mine, given):
    ring_all_reduce(mine["tensor"], group=given.group)
    return {"tensor": mine["tensor"]}


def run_two_levels(two_level_all_reduce, mine, given):
    inside, between = given.group_among(mine["nodes"]), given.group_among(mine["across"])
    two_level_all_reduce(mine["tensor"], inside, between)
    return {"tensor": mine["tensor"]}


# What is right, and what people get instead ----------------------------------------------------


def gathered(inputs, first=0):
    pieces = [each["chunk"] for each in inputs]
    return {"tensor": torch.cat(pieces[first:] + pieces[:first])}


def held_by(number):
    return lambda case, inputs, me: {"tensor": inputs[number(me)]["tensor"]}


def the_source(of):
    return lambda case, inputs, me: {"tensor": of(inputs[case.parameters["root"]]["tensor"])}


def node_sum(case, inputs, me):
    first = me - me % case.network.node_size
    return {"tensor": total(inputs[first : first + case.network.node_size])}


def place_sum(case, inputs, me):
    return {"tensor": total(inputs[me % case.network.node_size :: case.network.node_size])}


# What may be sent, and how long it may take ----------------------------------------------------


def rounds(k):
    return (k - 1).bit_length()


def others(case, rank):
    return len(case.members(rank)) - 1


def neighbours(case, rank):
    members = case.members(rank)
    me = members.index(rank)
    return {members[me - 1], members[(me + 1) % len(members)]}


def chunk_bytes(case, rank):
    return longest(numel(case), len(case.members(rank))) * case.itemsize


def half_ring_time(n, k, itemsize, network):
    """(K-1) (α + n/(Kβ)) for the longest chunk: a reduce-scatter or an all-gather."""
    return (k - 1) * network.time(longest(n, k) * itemsize)


def in_half_rings(halves):
    """Expect neighbours, messages, bytes and time of `halves` times K - 1 steps of a ring."""

    def seconds(case, network):
        k = max(map(len, case.groups))
        return halves * half_ring_time(numel(case), k, case.itemsize, network)

    return [
        only_calls("send", "recv"),
        only_peers(neighbours),
        sends_at_most(
            lambda case, rank: halves * others(case, rank) * chunk_bytes(case, rank),
            hint="In each step a rank passes on one chunk, and never the whole tensor.",
        ),
        calls_at_most("One message per step.", send=lambda c, r: halves * others(c, r)),
        time_within(seconds, hint="Send and receive at the same time: isend and irecv, then wait."),
    ]


def tree_time(case, network):
    k = max(map(len, case.groups))
    return rounds(k) * network.time(numel(case) * case.itemsize)


def two_level_time(case, network):
    n, inside = numel(case), network.node_size
    chunk, nodes = longest(n, inside), case.world_size // inside
    within = half_ring_time(n, inside, case.itemsize, network.inside)
    return 2 * (within + half_ring_time(chunk, nodes, case.itemsize, network))


def in_nodes(nodes, size, shape):
    """Return a case on a cluster: inside a node a link is 10 times as near and 100 as wide."""
    network = Network(20e-6, 1e9, node_size=size, inside=Network(2e-6, 100e9))
    name = f"{counted(nodes, 'node')} of {counted(size, 'rank')}, shape {list(shape)}"
    return Case(name, nodes * size, {"shape": shape}, network=network)


def shaped(*cases):
    """Return cases of (name, ranks, shape, root) in many forms, integers among them."""
    parameters = ("shape", "root")
    made = [Case(name, k, dict(zip(parameters, rest, strict=False))) for name, k, *rest in cases]
    return in_many_forms(*made, dtypes=tuple(EXACT))


RINGS = shaped(
    ("1 rank", 1, (3, 2)),
    ("2 ranks, 6 numbers", 2, (3, 2)),
    ("3 ranks, 7 numbers", 3, (7,)),
    ("4 ranks in two groups, 15 numbers", 4, (5, 3)),
    ("4 ranks, 3 numbers", 4, (3,)),
    ("5 ranks in two groups, 8 numbers", 5, (4, 2)),
    ("3 ranks, no numbers", 3, (0,)),
    ("4 ranks in two groups, one number", 4, ()),
)

CHECKS = {
    "tree_broadcast": task(
        "tree_broadcast",
        inputs=with_source,
        program=run_broadcast,
        may_change=["tensor"],
        judges=[
            equals(
                the_source(lambda tensor: tensor),
                {
                    "what this rank had before: nothing arrived": held_by(lambda me: me),
                    "the tensor of the group's first rank: src is another": held_by(lambda me: 0),
                    "the right tensor, rounded to float32: keep its dtype": the_source(
                        lambda tensor: tensor.float().to(tensor.dtype)
                    ),
                },
                tolerance=EXACT,
            )
        ],
        expects=[
            only_calls("send", "recv"),
            calls_at_most(
                "Whoever has the tensor helps: nobody sends in more than ceil(log2 K) rounds.",
                send=lambda case, rank: rounds(len(case.members(rank))),
            ),
            calls_at_most(
                "The tensor reaches every other rank once.",
                recv=lambda case, rank: int(case.members(rank)[case.parameters["root"]] != rank),
            ),
            time_within(
                tree_time, rel=0.25, hint="Those that have the tensor send at the same time."
            ),
        ],
        worth={"values": 2, "communication": 1},
        cases=shaped(
            ("1 rank", 1, (3, 2), 0),
            ("2 ranks, from rank 1", 2, (3, 2), 1),
            ("3 ranks, from rank 2", 3, (4,), 2),
            ("4 ranks in two groups, each from its second", 4, (5, 3), 1),
            ("4 ranks, from rank 0", 4, (3, 4), 0),
            ("5 ranks in two groups, each from its first", 5, (4, 2), 0),
            ("5 ranks, from rank 3", 5, (0,), 3),
        ),
    ),
    "ring_reduce_scatter": task(
        "ring_reduce_scatter",
        inputs=tensor_inputs,
        program=run_reduce_scatter,
        judges=[equals_chunk_of_sum()],
        expects=in_half_rings(1),
        worth={"values": 2, "communication": 2},
        cases=RINGS,
    ),
    "ring_all_gather": task(
        "ring_all_gather",
        inputs=chunks_of_one,
        program=run_all_gather,
        judges=[
            equals(
                lambda case, inputs, me: gathered(inputs),
                {
                    "the chunks from this rank's own on: chunk r belongs to place r": (
                        lambda case, inputs, me: gathered(inputs, me)
                    )
                },
                tolerance=EXACT,
            )
        ],
        expects=in_half_rings(1),
        worth={"values": 2, "communication": 1},
        cases=RINGS,
    ),
    "ring_all_reduce": task(
        "ring_all_reduce",
        inputs=tensor_inputs,
        program=run_all_reduce,
        may_change=["tensor"],
        judges=[equals_sum()],
        expects=in_half_rings(2),
        worth={"values": 2, "communication": 2},
        cases=RINGS,
    ),
    "two_level_all_reduce": task(
        "two_level_all_reduce",
        inputs=with_nodes,
        program=run_two_levels,
        may_change=["tensor"],
        judges=[
            equals_sum(
                {
                    "the sum over the ranks of this node only": node_sum,
                    "the sum over the ranks of this place in all nodes only": place_sum,
                }
            )
        ],
        expects=[
            only_calls("send", "recv"),
            time_within(
                two_level_time,
                hint="What leaves the node is what takes long: who sends how much of it?",
            ),
        ],
        worth={"values": 2, "communication": 2},
        cases=in_many_forms(
            in_nodes(2, 2, (500, 100)),
            in_nodes(3, 1, (7,)),
            in_nodes(1, 3, (3, 3)),
            in_nodes(2, 2, (4, 2)),
            in_nodes(3, 2, (7, 5)),
            in_nodes(2, 3, (4,)),
            dtypes=tuple(EXACT),
            groups=False,
        ),
    ),
}
