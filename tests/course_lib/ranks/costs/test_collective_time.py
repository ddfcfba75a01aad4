"""The cost of a collective is the same in the fabric and the formulas."""

import itertools
import math

import pytest

from course_lib import cost_model
from course_lib.ranks import Network, Ranks
from course_lib.ranks._torch.collective_table import KINDS
from course_lib.ranks.costs.collective_time import collective_bytes, split_bytes
from tests.helpers.collective_cases import launch

NUMEL = 84_000  # divides by 1 … 8


def network(overhead: float = 0.0, **algorithms: str) -> Network:
    return Network(1e-3, 1e8, overhead, **algorithms)


FORMULAS = {
    "ring": cost_model.ring_all_reduce_time,
    "central": cost_model.central_all_reduce_time,
    "halving-doubling": cost_model.halving_doubling_all_reduce_time,
    "direct": cost_model.direct_all_reduce_time,
    "one-shot": cost_model.one_shot_all_reduce_time,
    "tree": cost_model.tree_all_reduce_time,
}


def formula_of(kind: str, chosen: dict[str, str], n: int, k: int, net: Network) -> float:
    """Return the time by the formula of the lectures."""
    if kind == "all_reduce":
        return FORMULAS[chosen.get("all_reduce", "ring")](n, k, net)
    if kind in ("reduce_scatter", "all_gather"):
        return cost_model.ring_reduce_scatter_time(n * (k if kind == "all_gather" else 1), k, net)
    if kind in ("broadcast", "reduce"):
        return cost_model.tree_broadcast_time(n, k, net)
    if kind == "barrier":
        return math.ceil(math.log2(k)) * net.time(0)
    if kind in ("gather", "scatter"):  # all messages pass the link of the root
        return cost_model.naive_broadcast_time(n, k, net)
    return cost_model.all_to_all_time(n, k, net)


@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        *[(kind, {}) for kind in KINDS if kind not in ("send", "recv")],
        *[("all_reduce", {"all_reduce": name}) for name in FORMULAS],
    ],
)
def test_the_time_of_a_collective(kind: str, chosen: dict[str, str]) -> None:
    """One time: of the fabric and of the formula of the lectures."""
    n = 0 if kind == "barrier" else 4 * NUMEL
    for k, overhead in ((1, 0.0), (2, 3e-4), (3, 0.0), (4, 3e-4), (7, 3e-4)):
        net = network(overhead, **chosen)
        ranks = Ranks(k, on="simulated", network=net)
        ranks.run(launch, kind, NUMEL, 1 % k)
        seconds = ranks.trace.makespan
        formula = formula_of(kind, chosen, n, k, net)
        tree = kind in ("broadcast", "reduce") or chosen.get("all_reduce") == "tree"
        # Where the tree has a gap, the formula is a bound.
        early = math.ceil(math.log2(k)) * net.time(0) if tree and k & (k - 1) else 0.0
        assert formula - early - 1e-12 <= seconds <= formula + 1e-12, (k, overhead)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"send", "recv"}))
def test_bytes_sent_are_those_that_arrive(kind: str) -> None:
    """With any algorithm, a gather brings K-1 tensors to the root, and so on."""
    for k, numel in itertools.product((1, 2, 3, 4, 7, 8), (0, 1, 10, 840)):
        n = 4 * numel
        own_piece = sum(split_bytes(n, k, 4))  # of all_to_all: rank r keeps piece r
        needed = {
            "barrier": 0,
            "all_reduce": 2 * (k - 1) * n,
            "all_gather": k * (k - 1) * n,
            "all_to_all": k * n - own_piece,
        }.get(kind, (k - 1) * n)
        root = 1 % k
        for algorithm in ("ring", "tree", "central", "direct"):
            sent = collective_bytes(kind, network(all_reduce=algorithm), k, n, root, 4)
            assert sum(sent) == needed, algorithm
        halving = collective_bytes("all_reduce", network(all_reduce="halving-doubling"), k, n, 0, 4)
        assert sum(halving) == 2 * (k - 1) * n
        at_once = collective_bytes("all_reduce", network(all_reduce="one-shot"), k, n, 0, 4)
        assert at_once == ((k - 1) * n,) * k
        if k == 4 and numel == 840:
            assert collective_bytes("all_reduce", network(), k, n, 0, 4) == (6 * n // 4,) * 4
            assert collective_bytes("scatter", network(), k, n, 2, 4) == (0, 0, 3 * n, 0)
            assert collective_bytes("gather", network(), k, n, 2, 4) == (n, n, 0, n)
            assert collective_bytes("broadcast", network(), k, n, 2, 4) == (n, 0, 2 * n, 0)
