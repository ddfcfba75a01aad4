"""The cost of a collective: the messages of its algorithm, sent over the links.

An algorithm is a list of rounds, and a round is a list of messages. A rank enters a round when it
has left the previous one. A message starts when both its ends have entered the round. So the time
of a collective is the longest path through its messages. A late rank delays only the ranks that
depend on it. On an idle switch, with all K ranks ready at once and n bytes that divide evenly:

    ring                2 (K-1) (α + n/(Kβ))               Patarasuk and Yuan, 2009
    halving-doubling    2 log₂K α + 2 (K-1)/K n/β          Thakur, Rabenseifner and Gropp, 2005
    tree                2 log₂K (α + n/β)                  K a power of two
    central             2 α + 2 (K-1) n/β
    direct              2 α + 2 (K-1) n/(Kβ)
    one-shot            α + (K-1) n/β

A network's overhead o adds to each: see `cost_model`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from course_lib.ranks.costs.network import Network
from course_lib.ranks.costs.transfer import Round


def rounds_of(
    kind: str, network: Network, sizes: Sequence[Sequence[int]], root: int, itemsize: int
) -> Iterable[Round]:
    """Return the messages of a collective, round by round.

    Args:
        kind: for example ``"all_reduce"``.
        network: only its choice of algorithms matters.
        sizes: per member, the bytes of each of the tensors that it puts in.
        root: root of a rooted collective, as a rank of the group.
        itemsize: bytes of one element; pieces are cut between elements.

    """
    k = len(sizes)
    return COSTS[kind](_Request(network, k, sizes, root, itemsize)) if k > 1 else ()


@functools.lru_cache(maxsize=1024)
def collective_bytes(
    kind: str, network: Network, k: int, nbytes: int, root: int = 0, itemsize: int = 1
) -> tuple[int, ...]:
    """Return the bytes that each of `k` ranks sends in a collective.

    They are derived as the sum of the algorithm's messages. They are not measured on a library.
    Ring all_reduce: 2 (K-1)/K n on every rank; all_gather (n put in): (K-1) n; reduce_scatter:
    (K-1)/K n; tree broadcast: at most ⌈log₂K⌉ n, which the root sends.

    Args:
        kind: for example ``"all_reduce"``.
        network: only its choice of algorithms matters.
        k: number of ranks that take part.
        nbytes: n, the bytes that one rank puts in, or gets in a scatter.
        root: root of a rooted collective, as a rank of the group.
        itemsize: bytes of one element; pieces are cut between elements.

    """
    sent = [0] * k
    sizes = _sizes(kind, k, nbytes, root, itemsize)
    for messages in rounds_of(kind, network, sizes, root, itemsize):
        for source, _, size in messages:
            sent[source] += size
    return tuple(sent)


def _sizes(kind: str, k: int, nbytes: int, root: int, itemsize: int) -> list[list[int]]:
    """Return, per rank, the bytes of each of its tensors if all ranks put in `nbytes`."""
    if kind == "scatter":
        return [[nbytes] * k if rank == root else [] for rank in range(k)]
    if kind == "all_to_all":
        return [split_bytes(nbytes, k, itemsize)] * k
    return [[nbytes]] * k


class _Request(NamedTuple):
    """The arguments of a function in `COSTS`; see `rounds_of`."""

    network: Network
    k: int
    sizes: Sequence[Sequence[int]]
    root: int
    item: int


def _all_reduce(request: _Request) -> Iterable[Round]:
    k, n, algorithm = request.k, sum(request.sizes[0]), request.network.all_reduce
    if algorithm == "ring":
        pieces = split_bytes(n, k, request.item)
        return [*ring(k, pieces, 0), *ring(k, pieces, 1)]
    if algorithm == "halving-doubling":
        return halving_doubling(k, n, request.item)
    if algorithm == "central":
        leaves = range(1, k)
        return [[(r, 0, n) for r in leaves], [(0, r, n) for r in leaves]]
    if algorithm == "direct":
        pieces = split_bytes(n, k, request.item)
        apart = range(1, k)
        return [
            [(r, (r + s) % k, pieces[(r + s) % k]) for s in apart for r in range(k)],
            [(r, (r + s) % k, pieces[r]) for s in apart for r in range(k)],
        ]
    if algorithm == "one-shot":
        return [[(r, (r + s) % k, n) for s in range(1, k) for r in range(k)]]
    return [*tree_up(k, n, 0), *tree_down(k, n, 0)]


def _all_gather(request: _Request) -> Iterable[Round]:
    return ring(request.k, [sum(size) for size in request.sizes], 0)


def _reduce_scatter(request: _Request) -> Iterable[Round]:
    k, first = request.k, request.sizes[0]
    return ring(k, first if len(first) == k else split_bytes(sum(first), k, request.item), -1)


def _gather(request: _Request) -> Iterable[Round]:
    k, root, sizes = request.k, request.root, request.sizes
    return [[(r, root, sum(sizes[r])) for r in range(k) if r != root]]


def _scatter(request: _Request) -> Iterable[Round]:
    k, root, sizes = request.k, request.root, request.sizes
    return [[(root, r, sizes[root][r]) for r in range(k) if r != root]]


def _all_to_all(request: _Request) -> Iterable[Round]:
    # In step s each rank sends to its s-th neighbour, so each rank gets only one message at a time.
    k, sizes = request.k, request.sizes
    return [[(r, (r + s) % k, sizes[r][(r + s) % k]) for r in range(k)] for s in range(1, k)]


def _barrier(request: _Request) -> Iterable[Round]:
    k = request.k
    return [[(r, (r + s) % k, 0) for r in range(k)] for s in _powers(k)]


COSTS: dict[str, Callable[[_Request], Iterable[Round]]] = {
    "all_reduce": _all_reduce,
    "broadcast": lambda request: tree_down(
        request.k, sum(request.sizes[request.root]), request.root
    ),
    "reduce": lambda request: tree_up(request.k, sum(request.sizes[0]), request.root),
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}
"""For every collective in `_torch.collective_table`, a function that returns its messages."""


def split_bytes(nbytes: int, parts: int, itemsize: int) -> list[int]:
    """Return the bytes of `parts` pieces that differ by at most one element, longer ones first."""
    length, remainder = divmod(nbytes // max(1, itemsize), parts)
    return [(length + (i < remainder)) * itemsize for i in range(parts)]


def _powers(k: int) -> list[int]:
    return [1 << i for i in range((k - 1).bit_length())]


def ring(k: int, pieces: Sequence[int], shift: int) -> Iterator[Round]:
    """Yield K-1 rounds: in round s, rank r passes piece r - s + shift to its right neighbour."""
    for s in range(k - 1):
        yield [(r, (r + 1) % k, pieces[(r - s + shift) % k]) for r in range(k)]


def tree_up(k: int, n: int, root: int) -> Iterator[Round]:
    """Reduce along a binomial tree: in round i, the ranks whose lowest set bit is i send."""
    for step in _powers(k):
        yield [((r + root) % k, (r - step + root) % k, n) for r in range(step, k, 2 * step)]


def tree_down(k: int, n: int, root: int) -> Iterator[Round]:
    """Broadcast along the same tree, from the root to its farthest child first."""
    for step in reversed(_powers(k)):
        yield [((r - step + root) % k, (r + root) % k, n) for r in range(step, k, 2 * step)]


def halving_doubling(k: int, n: int, itemsize: int) -> Iterator[Round]:
    """Exchange halves with nearer and nearer ranks, then gather them back in reverse order.

    The ranks beyond the largest power of two send their tensor to another rank before this, and
    receive the result after it.
    """
    power = 1 << (k.bit_length() - 1)
    starts = [0, *accumulate(split_bytes(n, power, itemsize))]

    def block(rank: int, width: int) -> int:
        first = rank // width * width
        return starts[first + width] - starts[first]

    if k > power:
        yield [(r, r - power, n) for r in range(power, k)]
    widths = [1 << i for i in range(power.bit_length() - 1)]
    for width in reversed(widths):
        yield [(r, r ^ width, block(r ^ width, width)) for r in range(power)]
    for width in widths:
        yield [(r, r ^ width, block(r, width)) for r in range(power)]
    if k > power:
        yield [(r - power, r, n) for r in range(power, k)]
