"""Common rules of all collectives by hand: groups, two levels, and mistakes that are named."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_lib import collectives
from course_lib.collectives import place_in
from course_lib.sharding import shard_bounds
from tests.helpers.collective_cases import ALL_REDUCES, BROADCASTS, LENGTHS, total
from tests.helpers.rank_values import values


def inside_groups(members: list[int]) -> dict[str, Any] | str:
    group = dist.new_group(members)
    rank = dist.get_rank()
    if rank not in members:
        try:
            collectives.ring_all_reduce(torch.ones(3), group)
        except ValueError as error:
            return str(error)
        return "no error"
    results: dict[str, Any] = {}
    for name in ALL_REDUCES:
        results[name] = values(rank, 17)
        getattr(collectives, name)(results[name], group)
    for name in [*BROADCASTS, "reduce"]:
        results[name] = values(rank, 17)
        getattr(collectives, name)(results[name], members[-1], group)
    results["reduce_scatter"] = collectives.reduce_scatter(values(rank, 17), group)
    results["rotate"] = collectives.rotate(values(rank, 17), group)
    try:
        collectives.broadcast(torch.ones(1), min({0, 1, 2, 3} - set(members)), group)
    except ValueError as error:
        results["error"] = str(error)
    return results


@pytest.mark.parametrize("on", ["simulated", "cpu"])
@pytest.mark.parametrize("members", [[1, 3], [1, 2, 3], [2]])
def test_groups_translate_ranks(ranks_of, on, members):
    replicas = ranks_of(on, 4).run(inside_groups, members)
    for rank, results in enumerate(replicas):
        if rank not in members:
            assert f"rank {rank} is not a member" in results
            continue
        for name in ALL_REDUCES:
            assert torch.equal(results[name], total(members, 17)), name
        for name in BROADCASTS:
            assert torch.equal(results[name], values(members[-1], 17)), name
        start, stop = shard_bounds(17, len(members), members.index(rank))
        assert torch.equal(results["reduce_scatter"], total(members, 17)[start:stop])
        before = members[members.index(rank) - 1]
        assert torch.equal(results["rotate"], values(before, 17))
        assert "is not a member of this group" in results["error"]
        if rank == members[-1]:
            assert torch.equal(results["reduce"], total(members, 17))


def on_two_levels(ranks_per_node: int) -> list[torch.Tensor]:
    inside, between = collectives.two_level_groups(ranks_per_node)
    results = []
    for length in LENGTHS:
        tensor = values(dist.get_rank(), length)
        collectives.hierarchical_all_reduce(tensor, inside, between)
        results.append(tensor)
    return results


@pytest.mark.parametrize(
    ("on", "k", "ranks_per_node"),
    [("simulated", 8, 2), ("simulated", 8, 4), ("simulated", 6, 3), ("cpu", 4, 2), ("cpu", 4, 1)],
)
def test_hierarchical_all_reduce(ranks_of, on, k, ranks_per_node):
    ranks = ranks_of(on, k)
    for replica in ranks.run(on_two_levels, ranks_per_node):
        for length, result in zip(LENGTHS, replica, strict=True):
            assert torch.equal(result, total(list(range(k)), length))
    between_nodes = sum(
        event.bytes
        for event in ranks.trace.events
        if event.kind == "send" and event.peer // ranks_per_node != event.rank // ranks_per_node
    )
    nodes = k // ranks_per_node
    assert between_nodes == 4 * sum(LENGTHS) * 2 * (nodes - 1)  # of all ranks together


# --- errors ---------------------------------------------------------------------------------------


def refused() -> list[str]:
    messages = []
    for call in (
        lambda: collectives.two_level_groups(2),
        lambda: collectives.pipelined_broadcast(torch.ones(3), segments=0),
        lambda: collectives.broadcast(torch.ones(3), src=9),
        lambda: collectives.ring_all_reduce(torch.ones(1).expand(3)),
    ):
        with pytest.raises(ValueError) as error:
            call()
        messages.append(str(error.value))
    with pytest.raises(TypeError) as type_error:
        collectives.ring_all_reduce(torch.ones(3).to_sparse())
    return [*messages, str(type_error.value)]


def test_mistakes_are_named(ranks_of):
    messages = ranks_of("simulated", 3).run(refused)[0]
    (nodes, broadcast, root, expanded, sparse) = messages
    assert "3 ranks do not fill nodes of 2" in nodes
    assert "segments=0" in broadcast
    assert "rank 9" in root
    assert "clone()" in expanded
    assert "to_dense" in sparse


def conjugates(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors whose conjugation, or negation, has not been computed yet."""
    rank = dist.get_rank()
    z = torch.complex(values(rank, 7).double(), values(rank + 9, 7).double())
    conjugate, negative = z.clone().conj(), z.clone().conj().imag
    assert conjugate.is_conj() and negative.is_neg()
    getattr(collectives, name)(conjugate)
    getattr(collectives, name)(negative)
    return conjugate.resolve_conj(), negative.resolve_neg()


@pytest.mark.parametrize("name", ALL_REDUCES)
@pytest.mark.parametrize(("on", "k"), [("simulated", 3), ("cpu", 2)])
def test_conjugates_are_summed_as_what_they_mean(ranks_of, on, k, name):
    real, imag = (sum(values(r + offset, 7).double() for r in range(k)) for offset in (0, 9))
    for conjugate, negative in ranks_of(on, k).run(conjugates, name):
        assert torch.equal(conjugate, torch.complex(real, -imag))
        assert torch.equal(negative, -imag)


def test_without_ranks_the_message_says_how_to_get_some():
    with pytest.raises(ValueError, match="no process group"):
        place_in(None)
