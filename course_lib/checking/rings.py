"""What collectives built from messages may send, and how long they may take on the virtual clock.

A case has the ``shape`` of its tensors, and may have ``calls``, how often the function is called.
All limits are those of one call, times the calls. The formulas are those of
``course_lib.cost_model``.
"""

from __future__ import annotations

from course_lib.checking.cases import Case, Expectation
from course_lib.checking.expectations import (
    calls_at_most,
    only_calls,
    only_peers,
    receives_at_least,
    sends_at_most,
    time_within,
)
from course_lib.checking.sums import calls_of, numel
from course_lib.ranks.costs.network import Network


def longest(n: int, k: int) -> int:
    """Return the numbers of the longest of k chunks: n/k, rounded up."""
    return -(-n // k)


def rounds(k: int) -> int:
    """Return the rounds of a tree over k ranks: log2 k, rounded up."""
    return (k - 1).bit_length()


def neighbours(case: Case, rank: int) -> set[int]:
    """Return the ranks beside `rank` in the ring of its group."""
    members = case.members(rank)
    me = members.index(rank)
    return {members[me - 1], members[(me + 1) % len(members)]}


def half_ring_time(n: int, k: int, itemsize: int, network: Network) -> float:
    """(K-1) (α + n/(Kβ)) for the longest chunk: a reduce-scatter or an all-gather."""
    return (k - 1) * network.time(longest(n, k) * itemsize)


def in_half_rings(halves: int) -> list[Expectation]:
    """Expect neighbours, messages, bytes and time of `halves` times K - 1 steps of a ring."""

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
        calls_at_most("One message per step.", send=steps),
        time_within(seconds, hint="Send and receive at the same time: isend and irecv, then wait."),
        receives_at_least(lambda case, rank: _unknown(case, rank, whole=halves == 2)),
    ]


def _unknown(case: Case, rank: int, whole: bool) -> int:
    """Return the bytes that a rank cannot know: the whole sum, or at least a shortest chunk."""
    k = len(case.members(rank))
    chunk = numel(case) if whole else numel(case) // k
    return 0 if k == 1 else calls_of(case) * chunk * case.itemsize


def along_a_tree() -> list[Expectation]:
    """Expect messages, bytes and time of a tree from the case's ``root``, a number in the group."""

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
            "Whoever has the tensor helps: nobody sends in more than ceil(log2 K) rounds.",
            send=sends,
        ),
        calls_at_most("The tensor reaches every other rank once.", recv=receives),
        sends_at_most(
            lambda case, rank: sends(case, rank) * numel(case) * case.itemsize,
            hint="A message is the tensor, once and in its dtype.",
        ),
        time_within(seconds, rel=0.25, hint="Those that have the tensor send at the same time."),
        receives_at_least(lambda case, rank: receives(case, rank) * numel(case) * case.itemsize),
    ]


def whole_sum(case: Case, rank: int) -> int:
    """Return the bytes of a sum over all ranks, which a rank among others cannot know."""
    return 0 if case.world_size == 1 else calls_of(case) * numel(case) * case.itemsize


def two_level_time(case: Case, network: Network) -> float:
    """2 (L-1) (α₁ + n/(Lβ₁)) + 2 (M-1) (α₂ + n/(LMβ₂)), for M nodes of L ranks."""
    n, size, inside = numel(case), network.node_size, network.inside
    assert size is not None and inside is not None
    within = half_ring_time(n, size, case.itemsize, inside)
    between = half_ring_time(longest(n, size), case.world_size // size, case.itemsize, network)
    return 2 * calls_of(case) * (within + between)
