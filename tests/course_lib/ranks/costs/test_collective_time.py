"""The cost of a collective is the same in the emulated link, the fabric and the formulas."""

from __future__ import annotations

import math

import pytest
import torch

from course_lib import cost_model
from course_lib.ranks import Network, Ranks
from course_lib.ranks._torch.collective_table import COLLECTIVES, KINDS
from course_lib.ranks.costs.collective_time import (
    collective_bytes,
    collective_time,
    split_bytes,
)
from course_lib.ranks.simulated.collectives import apply_collective
from tests.helpers.collective_cases import launch

ALGORITHMS = ("ring", "tree", "central", "halving-doubling", "direct", "one-shot")
NUMEL = 84_000  # divides by 1 … 8


def network(overhead: float = 0.0, **algorithms: str) -> Network:
    return Network(1e-3, 1e8, overhead, **algorithms)  # type: ignore[arg-type]


@pytest.mark.parametrize("overhead", [0.0, 3e-4])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        *[(kind, {}) for kind in KINDS if kind not in ("send", "recv")],
        *[("all_reduce", {"all_reduce": name}) for name in ALGORITHMS],
        *[("broadcast", {"broadcast": name}) for name in ("central", "pipelined")],
    ],
)
def test_simulated_ranks_take_the_time_that_the_emulated_link_waits(
    kind: str, chosen: dict[str, str], k: int, overhead: float
) -> None:
    net = network(overhead, **chosen)
    ranks = Ranks(k, on="simulated", network=net)
    ranks.run(launch, kind, NUMEL, 1 % k)
    nbytes = 0 if kind == "barrier" else 4 * NUMEL
    expected = collective_time(kind, net, k, nbytes, root=1 % k, itemsize=4)
    assert ranks.trace.makespan == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("overhead", [0.0, 3e-4])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 8])
def test_and_that_is_the_time_of_the_formulas(k: int, overhead: float) -> None:
    n = 4 * NUMEL
    formulas = {
        "ring": cost_model.ring_all_reduce_time,
        "central": cost_model.central_all_reduce_time,
        "halving-doubling": cost_model.halving_doubling_all_reduce_time,
        "direct": cost_model.direct_all_reduce_time,
        "one-shot": cost_model.one_shot_all_reduce_time,
    }
    for name, formula in formulas.items():
        net = network(overhead, all_reduce=name)
        assert collective_time("all_reduce", net, k, n) == pytest.approx(formula(n, k, net))
    net = network(overhead)
    assert collective_time("reduce_scatter", net, k, n) == pytest.approx(
        cost_model.ring_reduce_scatter_time(n, k, net)
    )
    assert collective_time("all_gather", net, k, n) == pytest.approx(
        cost_model.ring_reduce_scatter_time(k * n, k, net)
    )
    steps = math.ceil(math.log2(k))
    early = 0 if k == 2**steps else steps * net.time(0)  # else the formula is a bound
    trees = {
        "broadcast": cost_model.tree_broadcast_time(n, k, net),
        "all_reduce": cost_model.tree_all_reduce_time(n, k, net),
    }
    for kind, formula in trees.items():
        seconds = collective_time(kind, network(overhead, all_reduce="tree"), k, n)
        assert formula - early - 1e-12 <= seconds <= formula + 1e-12
    assert collective_time("barrier", net, k, 0) == pytest.approx(steps * (1e-3 + 2 * overhead))


def test_every_kind_is_known_where_it_must_be() -> None:
    assert {each.kind for each in COLLECTIVES} == KINDS.keys() - {"send", "recv"}
    for kind in KINDS.keys() - {"send", "recv"}:
        collective_time(kind, network(), 2, 8)
        sides = [[torch.ones(1)] * 2] * 2 if kind != "barrier" else [[], []]
        apply_collective(kind, "sum", 0, sides, sides)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"send", "recv"}))
@pytest.mark.parametrize("k", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("numel", [0, 1, 10, 840])
def test_bytes_sent_are_those_that_arrive(kind: str, k: int, numel: int) -> None:
    """With any algorithm, a gather brings K-1 tensors to the root, and so on."""
    n = 4 * numel
    own_piece = sum(split_bytes(n, k, 4))  # of all_to_all: rank r keeps piece r
    needed = {
        "barrier": 0,
        "broadcast": (k - 1) * n,
        "reduce": (k - 1) * n,
        "all_reduce": 2 * (k - 1) * n,
        "gather": (k - 1) * n,
        "scatter": (k - 1) * n,
        "all_gather": k * (k - 1) * n,
        "reduce_scatter": (k - 1) * n,
        "all_to_all": k * n - own_piece,
    }
    root = 1 % k
    for algorithm in ("ring", "tree", "central", "direct"):
        for broadcast in ("tree", "central", "pipelined"):
            chosen = network(all_reduce=algorithm, broadcast=broadcast)
            sent = collective_bytes(kind, chosen, k, n, root, 4)
            assert sum(sent) == needed[kind], (algorithm, broadcast)
    halving = collective_bytes("all_reduce", network(all_reduce="halving-doubling"), k, n, 0, 4)
    assert sum(halving) == 2 * (k - 1) * n
    at_once = collective_bytes("all_reduce", network(all_reduce="one-shot"), k, n, 0, 4)
    assert at_once == ((k - 1) * n,) * k
    if k == 4 and numel == 840:
        assert collective_bytes("all_reduce", network(), k, n, 0, 4) == (6 * n // 4,) * 4
        assert collective_bytes("scatter", network(), k, n, 2, 4) == (0, 0, 3 * n, 0)
        assert collective_bytes("gather", network(), k, n, 2, 4) == (n, n, 0, n)
        assert collective_bytes("broadcast", network(), k, n, 2, 4) == (n, 0, 2 * n, 0)
